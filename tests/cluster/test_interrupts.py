"""Ctrl-C before there is an event loop: no module that is being imported, no program that MLX asks swallows it."""

import os
import signal
from pathlib import Path

import mlx.core as mx
import pytest

from tests.cluster.processes import Outcome, Starter

COMMANDS = (("coordinator", "plan", "--model", "demo"), ("worker", "--bind", "127.0.0.1:0"))


@pytest.fixture
def held_up(tmp_path: Path) -> Path:
    """A pipe: who opens it to read waits until a test opens it to write."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_ctrl_c_while_modules_are_imported_is_an_end_without_a_word(
    start: Starter, held_up: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (held_up.parent / "typer.py").write_text(f"open({str(held_up)!r}).read()")
    monkeypatch.setenv("PYTHONPATH", str(held_up.parent))
    running = start.python("-m", *command)
    with held_up.open("w"):
        running.send_signal(signal.SIGINT)
        assert running.wait(10.0) == Outcome(130, "", "")


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="only for a CPU does MLX need a compiler")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_ctrl_c_while_mlx_looks_for_a_compiler_is_not_lost(
    start: Starter, held_up: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """It asks by system(), during which a process ignores SIGINT."""
    compiler = held_up.parent / "g++"
    compiler.write_text(f"#!/bin/sh\ncat {held_up}\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{held_up.parent}:{os.environ['PATH']}")
    running = start.python("-m", *command)
    with held_up.open("w"):
        running.send_signal(signal.SIGINT)
    assert running.wait(10.0) == Outcome(130, "", "")
