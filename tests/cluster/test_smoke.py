"""`brigade smoke` as a command: what it prints, its exit codes, and that workers outlive it."""

import json
from pathlib import Path

import pytest

from coordinator.cluster import peer
from coordinator.cluster.options import ClusterOptions
from coordinator.deploy import trial as trial_module
from coordinator.deploy.trial import ChainTrial
from tests.cluster.commands import run_here
from tests.cluster.processes import Starter, write_cluster
from tests.unit.deploy.cases import tried
from worker.errors import NodeBusy


def test_it_tells_every_hop_and_that_it_works_and_the_worker_runs_on(start: Starter, tmp_path: Path) -> None:
    worker = start.worker("mini")
    done = run_here("smoke", "--config", write_cluster(tmp_path / "cluster.yaml", ("mini", worker.address)))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("demo on coordinator [0, 4), mini [4, 8): open after ")
    assert [line.split()[:3] for line in lines[2:4]] == [["coordinator", "→", "mini"], ["mini", "→", "coordinator"]]
    assert lines[-1].startswith("8 tokens, twice, in ") and lines[-1].endswith("the same tokens: it works")
    worker.wait_slots(0, 30.0)
    assert worker.running.is_running


def test_a_cluster_that_fails_is_exit_code_3_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "_HELLO_S", 0.2)
    config = write_cluster(tmp_path / "cluster.yaml", ("gone", "127.0.0.1:1"))
    done = run_here("smoke", "--config", config, "--json")
    found = json.loads(done.out)
    assert (done.code, found["works"]) == (3, False)
    assert found["error"]["advice"] == f"brigade doctor --config {config} tells what is wrong with nodes and links"
    assert "nothing answers at 127.0.0.1:1" in found["error"]["message"] and "what to do: brigade doctor" in done.err


def test_other_tokens_are_exit_code_1_and_a_workers_message_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def tries(options: ClusterOptions) -> ChainTrial:
        return tried(second=(7, 9))

    async def refuses(options: ClusterOptions) -> ChainTrial:
        raise NodeBusy("serves \x1b[2Janother\nsecond line", node="mini")

    monkeypatch.setattr(trial_module, "try_cluster", tries)
    done = run_here("smoke", "--model", "demo", "--local", "0")
    assert done.code == 1 and "OTHER TOKENS the second time, [7, 8], then [7, 9]" in done.out.splitlines()[-1]
    monkeypatch.setattr(trial_module, "try_cluster", refuses)
    done = run_here("smoke", "--model", "demo")
    assert done.code == 3 and "\x1b" not in done.err and len(done.err.splitlines()) == 3
