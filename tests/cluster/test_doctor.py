"""`brigade doctor` and `brigade smoke` as commands, with real workers: what they print, and their exit codes."""

import json
from pathlib import Path

import pytest

from coordinator.cluster.options import ClusterOptions
from coordinator.deploy import checks
from coordinator.deploy import trial as trial_module
from coordinator.deploy.trial import ChainTrial
from tests.cluster.commands import run_here
from tests.cluster.processes import Starter, Worker, write_cluster
from tests.unit.deploy.cases import tried


@pytest.fixture(scope="module")
def workers(module_start: Starter) -> list[Worker]:
    return [module_start.worker("one"), module_start.worker("two")]


def test_findings_are_lines_and_exit_code_1(
    workers: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_VERY_SLOW_MS", 10_000.0)  # a machine that is busy with other tests
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


def test_smoke_tells_every_hop_and_that_it_works_and_the_worker_runs_on(workers: list[Worker], tmp_path: Path) -> None:
    worker, _ = workers
    done = run_here("smoke", "--config", write_cluster(tmp_path / "cluster.yaml", ("one", worker.address)))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("demo on coordinator [0, 4), one [4, 8): open after ")
    assert [line.split()[:3] for line in lines[2:4]] == [["coordinator", "→", "one"], ["one", "→", "coordinator"]]
    assert lines[-1].startswith("8 tokens, twice, in ") and lines[-1].endswith("the same tokens: it works")
    worker.wait_slots(0, 30.0)
    assert worker.running.is_running


def test_other_tokens_of_smoke_are_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tries(options: ClusterOptions) -> ChainTrial:
        return tried(second=(7, 9))

    monkeypatch.setattr(trial_module, "try_cluster", tries)
    done = run_here("smoke", "--model", "demo", "--local", "0")
    assert done.code == 1 and "OTHER TOKENS the second time, [7, 8], then [7, 9]" in done.out.splitlines()[-1]
