"""`brigade doctor` as a command, with real workers: what it prints, and its exit code."""

import json
from pathlib import Path

import pytest

from coordinator.deploy import checks
from tests.cluster.commands import run_here
from tests.cluster.processes import Starter, write_cluster


def test_a_line_per_finding_and_exit_code_1_if_one_is_a_problem(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_VERY_SLOW_MS", 10_000.0)  # a machine that is busy with other tests
    workers = [start.worker("one"), start.worker("two")]
    nodes = [(worker.name, worker.address) for worker in workers]
    config = write_cluster(tmp_path / "cluster.yaml", *nodes)
    done = run_here("doctor", "--config", config)
    assert done.code == 0, done.err  # progress is told once it takes long
    lines = done.out.splitlines()
    for about in ("coordinator", "one", "two", "coordinator → one", "one → two", "coordinator ← two", "all nodes"):
        assert about in lines
    assert lines[-1].startswith("nothing to fix; ") and not any("FIX" in line for line in lines)
    assert sum(" of each token (round trip " in line for line in lines) == 3
    assert sum("8 tokens through every node, twice, in " in line for line in lines) == 1

    write_cluster(config, nodes[0], ("gone", "127.0.0.1:1"))
    done = run_here("doctor", "--config", config, "--model", tmp_path / "nowhere", "--json")
    found = json.loads(done.out)
    assert (done.code, found["must_be_mended"], found["trial"]) == (1, 2, None)
    worst = {each["kind"]: each for each in found["findings"] if each["level"] == "must be mended"}
    assert set(worst) == {"unreachable", "model"} and worst["unreachable"]["about"] == "gone"
    assert worst["unreachable"]["fix"] == f"there: brigade worker --config {config} --name gone"
    assert [node["error"] is None for node in found["nodes"]] == [True, True, False]


def test_without_a_configuration_this_machine_alone_is_examined() -> None:
    done = run_here("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == (1 if found["must_be_mended"] else 0)
    assert ([node["node"] for node in found["nodes"]], found["hops"], found["trial"]) == (["coordinator"], [], None)
