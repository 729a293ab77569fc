"""Processes that end early: by Ctrl-C before there is an event loop, and while MLX still computes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.cluster.processes import ROOT, Outcome, Starter

COMMANDS = (("coordinator", "plan", "--model", "demo"), ("worker", "--bind", "127.0.0.1:0"))
ATTEMPTS = 4  # finalising Python while MLX computes aborts in about every third
GIVES_UP = """
import asyncio
import sys
import mlx.core as mx
from worker.errors import ModelError
from worker.platform.threads import MlxThread
from worker.platform.run import run_command

def compute():
    array = mx.random.normal((300, 300))
    while True:
        for _ in range(20):
            array = mx.tanh(array @ array)
        mx.eval(array)

async def give_up():
    thread = MlxThread()
    await asyncio.wait([asyncio.ensure_future(thread.run(compute))], timeout=0.3)
    thread.close(0.1)

def command() -> int:
    asyncio.run(give_up())
    print("done")
    if flags:
        raise ModelError("torn")
    return 7

sys.argv, flags = sys.argv[:1], sys.argv[1:]
run_command(command)
"""


@pytest.fixture
def held_up(tmp_path: Path) -> Path:
    """A pipe: a program that opens it to read waits until the test opens it to write."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_ctrl_c_while_modules_are_imported_ends_the_process_silently(
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
    """MLX runs the compiler by system(), during which a process ignores SIGINT."""
    compiler = held_up.parent / "g++"
    compiler.write_text(f"#!/bin/sh\ncat {held_up}\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{held_up.parent}:{os.environ['PATH']}")
    running = start.python("-m", *command)
    with held_up.open("w"):
        running.send_signal(signal.SIGINT)
    assert running.wait(10.0) == Outcome(130, "", "")


def start_giving_up(*arguments: str, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", GIVES_UP, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_a_process_ends_as_it_should_whatever_a_call_that_was_given_up_is_doing() -> None:
    running = [start_giving_up() for _ in range(ATTEMPTS)]
    assert {(*process.communicate(timeout=60), process.returncode) for process in running} == {("done\n", "", 7)}
    with open("/dev/full", "w") as full:
        process = start_giving_up("fail", stdout=full.fileno())
        assert (process.communicate(timeout=60)[1], process.wait()) == ("error: torn\n", 2)
