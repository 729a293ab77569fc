"""From workers that announce themselves to a cluster.yaml that answers: `brigade nodes` and `brigade init`."""

import secrets
from pathlib import Path

import pytest

from tests.cluster.commands import answer_here, parse, run_here
from tests.cluster.processes import Starter

LISTENS_S = ("0.25", "1", "4", "16")  # a busy machine may need longer ones


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_worker_that_announces_itself_is_found_written_down_and_used(start: Starter, folder: Path) -> None:
    name = f"mini-{secrets.token_hex(4)}"
    for arguments in (("init",), ("issue", name)):
        assert run_here("keys", *arguments).code == 0
    worker = start.worker(name, "--keys", folder / "keys", "--announce")
    assert worker.address
    for listens_s in LISTENS_S:
        wrote = run_here("init", name, "--yes", "--timeout", listens_s)
        if "announced itself" not in wrote.err:
            break
    assert wrote.code == 0, wrote.err
    assert f"{name} at {worker.address} on this machine" in wrote.err
    assert "next: brigade plan --config cluster.yaml" in wrote.err and "keys init" not in wrote.err
    answer = answer_here("--config", "cluster.yaml", "--prompt", "go", "--max-tokens", "2")
    assert [stage["node"] for stage in answer["stages"]] == ["coordinator", name]
    for listens_s in LISTENS_S:
        heard = parse(run_here("nodes", "--json", "--config", "cluster.yaml", "--timeout", listens_s))["nodes"]
        [node] = [each for each in heard if each["name"] == name]
        if node["is_announced"]:
            break
    assert (node["is_announced"], node["is_configured"], len(node["fingerprint"])) == (True, True, 64)
    assert node["addresses"] == [
        {"address": worker.address, "interface": "lo", "medium": "loopback", "is_configured": True}
    ]
    again = run_here("init", "nobody", "--yes")  # refused before it listens
    assert again.code == 2 and again.err.startswith("error: cluster.yaml exists already ")
