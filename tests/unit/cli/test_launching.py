"""What `brigade launch` and `brigade logs` show of what other machines say."""

import pytest

from coordinator.cli.launching import _shown, _tell
from coordinator.cli.logs import _print_line
from coordinator.fleet.launch import Outcome
from worker.errors import BrigadeError


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
