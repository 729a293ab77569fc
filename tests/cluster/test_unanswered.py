"""Workers whose name does not resolve or that do not answer: what commands say of them."""

import json
from pathlib import Path

import pytest

from coordinator.cli import status
from tests.cluster.commands import run_here
from tests.cluster.processes import write_cluster
from tools.worker_process import free_port

HOST = f"{'x' * 64}.invalid"  # a label longer than any: no name server is asked


@pytest.fixture
def unresolved(tmp_path: Path) -> Path:
    return write_cluster(tmp_path / "cluster.yaml", ("mini", f"{HOST}:50070"), model="demo", insecure="true")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that `status` waits for a worker."""
    monkeypatch.setattr(status, "_WORKER_WITHIN_S", 0.2)


@pytest.mark.parametrize("command", ["plan", "verify", "bench -p 1 -g 2"])
def test_a_workers_name_that_does_not_resolve_is_told_with_the_key_to_mend(command: str, unresolved: Path) -> None:
    outcome = run_here(*command.split(), "--config", unresolved)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.startswith(f"error: worker mini: the name {HOST} does not resolve on this machine: ")
    assert f"`address:` in {unresolved}" in outcome.err and outcome.err.count("\n") == 1


def test_status_and_smoke_tell_the_same_in_json(unresolved: Path) -> None:
    status, smoke = (run_here(name, "--config", unresolved, "--json") for name in ("status", "smoke"))
    told = f"the name {HOST} does not resolve on this machine: "
    assert json.loads(status.out)["nodes"][0]["why"].startswith(told)
    assert json.loads(smoke.out)["error"]["message"].startswith(f"worker mini: {told}")
    assert (status.code, smoke.code) == (3, 3)


def test_of_several_addresses_one_that_may_come_to_life_is_told(tmp_path: Path, impatient: None) -> None:
    place = f"0.0.0.0:{free_port()}"  # this machine, too, though no loopback address
    config = tmp_path / "cluster.yaml"
    config.write_text(f"insecure: true\nworkers: [{{name: mini, address: ['{HOST}:9', '{place}']}}]\n")
    outcome = run_here("status", "--config", config, "--json")
    why = json.loads(outcome.out)["nodes"][0]["why"]
    assert why.startswith(f"nothing answers at {HOST}:9 or {place} ")


@pytest.mark.parametrize("flags", [(), ("--bind", f"{HOST}:0")], ids=["address", "--bind"])
def test_a_name_to_listen_on_that_does_not_resolve_is_told(flags: tuple[str, ...], unresolved: Path) -> None:
    outcome = run_here("--config", unresolved, "--name", "mini", *flags, program="worker")
    assert (outcome.code, outcome.out) == (2, "")
    assert f": the name {HOST} does not resolve on this machine; give its IP address, as `address:`" in outcome.err


def test_status_shows_workers_that_do_not_answer_and_fails_if_none_does(tmp_path: Path, impatient: None) -> None:
    config = write_cluster(tmp_path / "cluster.yaml", *((name, f"127.0.0.1:{free_port()}") for name in ("mini", "air")))
    for flags in ((), ("--json",)):
        outcome = run_here("status", "--config", config, *flags)
        assert outcome.code == 3 and outcome.out.count("nothing answers at") == 2
        assert outcome.err == (
            f"error: expected any of the 2 workers of {config} to answer: "
            f"the reason stands above, and brigade doctor --config {config} looks closer\n"
        )
    assert [node["state"] for node in json.loads(outcome.out)["nodes"]] == ["lost", "lost"]
