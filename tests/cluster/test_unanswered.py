"""Workers whose name does not resolve or that do not answer: what commands say of them."""

import json
from pathlib import Path

import pytest

from coordinator.cli import status
from tests.cluster.commands import run_here
from tests.cluster.processes import write_cluster
from tools.worker_process import free_port

HOST = "mini.invalid"  # no name server knows one that ends so (RFC 6761)
TOLD = f"the name {HOST} does not resolve on this machine"


def test_a_name_that_does_not_resolve_is_told_with_the_key_to_correct(tmp_path: Path) -> None:
    config = write_cluster(tmp_path / "cluster.yaml", ("mini", f"{HOST}:50070"), model="demo", insecure="true")
    plan = run_here("plan", "--config", config)
    assert (plan.code, plan.out) == (3, "")
    assert plan.err.startswith(f"error: worker mini: {TOLD}: ")
    assert f"`address:` in {config}" in plan.err and plan.err.count("\n") == 1
    smoke = run_here("smoke", "--config", config, "--json")
    found = json.loads(smoke.out)
    assert (smoke.code, found["works"]) == (3, False)
    assert found["error"]["message"].startswith(f"worker mini: {TOLD}")
    for flags in ((), ("--bind", f"{HOST}:0")):
        worker = run_here("--config", config, "--name", "mini", *flags, program="worker")
        assert (worker.code, worker.out) == (2, "")
        assert f": {TOLD}; give its IP address, as `address:`" in worker.err


def test_status_shows_silent_workers_and_fails_if_none_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "WORKER_WITHIN_S", 0.2)
    place, config = f"0.0.0.0:{free_port()}", tmp_path / "cluster.yaml"  # this machine, though no loopback address
    mini, air = f"['{HOST}:9', '{place}']", f"'127.0.0.1:{free_port()}'"
    config.write_text(f"insecure: true\nworkers: [{{name: mini, address: {mini}}}, {{name: air, address: {air}}}]\n")
    for flags in ((), ("--json",)):
        outcome = run_here("status", "--config", config, *flags)
        assert outcome.code == 3 and outcome.out.count("nothing answers at") == 2
        assert outcome.err.startswith(f"error: expected any of the 2 workers of {config} to answer: ")
    nodes = json.loads(outcome.out)["nodes"]
    assert [node["state"] for node in nodes] == ["lost", "lost"]
    assert nodes[0]["why"].startswith(f"nothing answers at {HOST}:9 or {place}. Start it there: ")
