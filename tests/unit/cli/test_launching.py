"""What `brigade launch` and `brigade logs` show of what other machines say."""

import os
from pathlib import Path

import pytest

from coordinator.cli.keys import init, issue
from coordinator.cli.launch import print_line, tell, workers_of
from coordinator.deploy.launch import Outcome
from tests.unit.cli.conftest import Command
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import BrigadeError, ConfigError


def test_neither_a_failure_nor_a_log_can_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell([Outcome("mini", "mini", error=BrigadeError("no\x1b[2J", node="mini"))]) == 3
    assert capsys.readouterr().err == "error: worker mini: no[2J\n"
    print_line("\x1b]0;owned\x07a\tb\r")
    assert capsys.readouterr().out == "]0;owneda\tb\n"


def test_workers_that_cannot_be_launched_are_refused() -> None:
    for names, said in ((["w1"], "expected one named 'w1' under `workers:`"), ([], "expected one under `workers:`")):
        with pytest.raises(ConfigError, match=rf"^cluster\.yaml has no workers: {said}; brigade init finds some$"):
            workers_of(ClusterConfig(), names)
    workers = [  # names that a Mac takes for one, whichever are launched
        WorkerConfig(name=name, address=f"127.0.0.1:{port}", ssh="mac") for port, name in enumerate(("Mini", "mini"), 1)
    ]
    with pytest.raises(ConfigError, match="to differ in more than case"):
        workers_of(ClusterConfig(workers=tuple(workers)), ["mini"])


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text("workers: [{name: mini, address: '127.0.0.1:1', ssh: mac}]")
    return str(path)


@pytest.mark.parametrize(("flag", "were"), [("--update", "looking"), ("--stop", "stopping")])
def test_ctrl_c_tells_where_each_node_was_and_that_the_same_command_goes_on(
    flag: str, were: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brigade: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The ssh of this test interrupts whoever starts it, once it is given a script, and says nothing more."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nread -r line\nkill -INT {os.getpid()}\nexec sleep 60\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert brigade("launch", flag, "--config", config) == 130
    said = (
        f"interrupted (mini: {were}). Nothing is undone: started workers keep running, the same command does the rest"
    )
    assert capsys.readouterr().err.endswith(f"{said}\n")


def test_without_ssh_here_no_node_has_failed(config: str, monkeypatch: pytest.MonkeyPatch, brigade: Command) -> None:
    monkeypatch.setenv("PATH", "")
    for flags in ((), ("--stop",)):
        with pytest.raises(ConfigError, match=r"^expected the program ssh here, found none$"):
            brigade("launch", *flags, "--config", config)


def test_the_next_step_after_keys_is_a_launch_for_workers_that_it_reaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "tls: {keys: keys}\nworkers:\n- {name: mini, address: 'mini.local:1', ssh: mini}\n"
        "- {name: studio, address: 'studio.local:1'}\n- {name: air, address: 'air.local:1', ssh: air}\n"
    )
    init(replace=False, config=config)
    steps = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next: ")]
    assert steps == [f"next: brigade launch --config {config}", f"next: brigade keys issue studio --config {config}"]


def test_keys_are_issued_by_the_names_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("tls: {keys: keys}\nworkers: [{name: mini, address: 'mini.local:50070'}]\n")
    init(replace=False, config=config)
    capsys.readouterr()
    issue("nobody", coordinator=False, config=config)
    assert f"warning: {config} has no node 'nobody', only coordinator, mini" in capsys.readouterr().err
    told = r"^expected 'mini', as .*cluster\.yaml spells this node's name, found 'Mini'$"
    with pytest.raises(ConfigError, match=told):
        issue("Mini", coordinator=False, config=config)
    assert not (tmp_path / "keys" / "mini.pem").exists()
    issue("mini", coordinator=False, config=config)
    assert "warning" not in capsys.readouterr().err
