"""What `brigade launch` and `brigade logs` show of what other machines say."""

import os
from pathlib import Path

import pytest

from coordinator.cli.launch import _print_line, _shown, _tell, workers_of
from coordinator.deploy.launch import Outcome
from tests.unit.cli.conftest import Command
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import BrigadeError, ConfigError


def test_what_is_done_on_a_node_is_shown_as_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes it for a terminal
    monkeypatch.setenv("TERM", "xterm")
    with _shown() as report:
        report("mini", "[/oops] [bold]installing")
    assert "[/oops] [bold]installing" in capsys.readouterr().err


def test_a_failure_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert _tell([Outcome("mini", "mini", error=BrigadeError("no\x1b[2J", node="mini"))]) == 3
    assert capsys.readouterr().err == "error: worker mini: no[2J\n"


def test_a_log_keeps_its_tabs_and_nothing_that_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _print_line("\x1b]0;owned\x07a\tb\r")
    assert capsys.readouterr().out == "]0;owneda\tb\n"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["w1"], r"^cluster\.yaml has no workers: expected one named 'w1' under `workers:`; brigade init finds some$"),
        ([], r"^cluster\.yaml has no workers: expected one under `workers:`; brigade init finds some$"),
    ],
)
def test_of_a_configuration_without_workers_it_is_told_where_they_belong(names: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        workers_of(ClusterConfig(), names)


@pytest.mark.parametrize("flag", ["--update", "--stop"])
def test_ctrl_c_tells_where_each_node_was_and_that_the_same_command_goes_on(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brigade: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ssh of this test interrupts whoever starts it, once it is given a script, and says nothing more."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nread -r line\nkill -INT {os.getpid()}\nexec sleep 60\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = tmp_path / "cluster.yaml"
    config.write_text("workers: [{name: mini, address: '127.0.0.1:1', ssh: mac}]")
    assert brigade("launch", flag, "--config", str(config)) == 130
    were = "looking" if flag == "--update" else "stopping"
    said = (
        f"interrupted (mini: {were}). Nothing is undone: started workers keep running, the same command does the rest\n"
    )
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize("flags", [(), ("--stop",)])
def test_without_ssh_here_no_node_has_failed(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brigade: Command
) -> None:
    monkeypatch.setenv("PATH", "")
    config = tmp_path / "cluster.yaml"
    config.write_text("workers: [{name: mini, address: '127.0.0.1:1', ssh: mac}]")
    with pytest.raises(ConfigError, match=r"^expected the program ssh here, found none$"):
        brigade("launch", *flags, "--config", str(config))


def test_names_that_a_mac_takes_for_one_are_refused_whichever_are_launched() -> None:
    workers = [
        WorkerConfig(name=name, address=f"127.0.0.1:{port}", ssh="mac") for port, name in enumerate(("Mini", "mini"), 1)
    ]
    with pytest.raises(ConfigError, match="to differ in more than case"):
        workers_of(ClusterConfig(workers=tuple(workers)), ["mini"])
