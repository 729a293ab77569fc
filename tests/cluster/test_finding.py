"""From workers that announce themselves to a cluster.yaml that answers: `brigade nodes` and `brigade init`."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.cluster.commands import answer_here, parse, run_here
from tests.cluster.processes import Starter, Worker

T = TypeVar("T")

LISTENS_S = ("0.25", "1", "4", "16")  # a busy machine may need longer ones


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start_with_keys(start: Starter, folder: Path, name: str) -> Worker:
    """A worker that has a name and a certificate, and no configuration."""
    assert run_here("keys", "init").code == 0
    assert run_here("keys", "issue", name).code == 0
    worker = start.worker(name, "--keys", folder / "keys", "--announce")
    assert worker.address
    return worker


def once(ask: Callable[[str], T], is_heard: Callable[[T], bool]) -> T:
    """Return the first result that heard the worker, or else the last one; `ask` takes the seconds to listen."""
    for listens_s in LISTENS_S:
        if is_heard(found := ask(listens_s)):
            break
    return found


def listed(name: str, listens_s: str) -> dict[str, Any]:
    heard = parse(run_here("nodes", "--json", "--config", "cluster.yaml", "--timeout", listens_s))["nodes"]
    [node] = [each for each in heard if each["name"] == name]
    return node


def test_a_worker_that_announces_itself_is_found_written_down_and_used(start: Starter, folder: Path) -> None:
    name = f"mini-{secrets.token_hex(4)}"
    worker = start_with_keys(start, folder, name)
    wrote = once(
        lambda listens_s: run_here("init", name, "--yes", "--timeout", listens_s),
        lambda tried: "announced itself" not in tried.err,
    )
    assert wrote.code == 0, wrote.err
    assert f"{name} at {worker.address} on this machine" in wrote.err
    assert "next: brigade plan --config cluster.yaml" in wrote.err and "keys init" not in wrote.err
    answer = answer_here("--config", "cluster.yaml", "--prompt", "go", "--max-tokens", "2")
    assert [stage["node"] for stage in answer["stages"]] == ["coordinator", name]
    node = once(lambda listens_s: listed(name, listens_s), lambda tried: tried["is_announced"])
    assert (node["is_announced"], node["is_configured"], len(node["fingerprint"])) == (True, True, 64)
    assert node["addresses"] == [
        {"address": worker.address, "interface": "lo", "medium": "loopback", "is_configured": True}
    ]
    again = run_here("init", "nobody", "--yes")  # refused before it listens
    assert (again.code, again.err) == (
        2, "error: cluster.yaml exists already and is not overwritten: give --force, or another --config\n",
    )  # fmt: skip


def test_init_without_a_terminal_asks_nothing_and_writes_nothing(folder: Path) -> None:
    asked = run_here("init")
    assert (asked.code, asked.err) == (
        2,
        "error: expected --yes: standard input is no terminal, so there is no answer to questions\n",
    )
    nobody = run_here("init", "nobody", "--yes", "--timeout", "0.1")
    assert (nobody.code, nobody.err) == (
        3, "error: no worker 'nobody' announced itself within 0.1 s; see `brigade nodes`\n",
    )  # fmt: skip
    assert not list(folder.iterdir())
