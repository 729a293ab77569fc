"""Processes that end early: by a signal before there is an event loop, and while MLX still computes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tests.cluster.processes import ROOT, Outcome, Starter

COORDINATOR, WORKER = ("coordinator", "plan", "--model", "demo"), ("worker", "--bind", "127.0.0.1:0")
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


WRITES = """
def command():
    for _ in range(99):
        print("0" * 999, file=sys.stderr, flush=True)
    print("done")
    return 7
"""


def usual_environment() -> dict[str, str]:
    """That of the tests, with buffered streams: they keep what could not be written."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("command", "place", "number"),
    [
        (COORDINATOR, "import", signal.SIGTERM),
        (COORDINATOR, "first import", signal.SIGINT),
        (COORDINATOR, "compiler", signal.SIGINT),
        (WORKER, "import", signal.SIGINT),
        (WORKER, "compiler", signal.SIGTERM),
    ],
)
def test_a_signal_before_there_is_an_event_loop_ends_the_process_silently(
    start: Starter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    place: str,
    command: tuple[str, ...],
) -> None:
    """MLX looks for a compiler by system(), during which a process ignores SIGINT."""
    if place == "compiler" and mx.default_device().type != mx.cpu:
        pytest.skip("MLX needs a compiler for a CPU only")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # who opens it to read waits until the test opens it to write
    (tmp_path / "modules").mkdir()
    module = "msgpack" if place == "first import" else "typer"
    (tmp_path / "modules" / f"{module}.py").write_text(f"open({str(pipe)!r}).read()")
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\ncat {pipe}\nexit 1\n")
    compiler.chmod(0o700)
    if "import" in place:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    else:
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    running = start.python("-m", *command)
    with pipe.open("w"):
        running.send_signal(number)
    assert running.wait(10.0) == Outcome(130, "", "")


def test_a_process_ends_as_it_should_while_a_call_that_was_given_up_computes() -> None:
    def start(*arguments: str, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", GIVES_UP, *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=usual_environment(), stdout=stdout, stderr=subprocess.PIPE, text=True
        )

    running = [start() for _ in range(ATTEMPTS)]
    assert {(*process.communicate(timeout=60), process.returncode) for process in running} == {("done\n", "", 7)}
    with open("/dev/full", "w") as full:
        process = start("fail", stdout=full.fileno())
        assert (process.communicate(timeout=60)[1], process.wait()) == ("error: torn\n", 2)


@pytest.mark.parametrize("error", ["2>/dev/full", "2>&1 >&3 | true"])
def test_a_standard_error_that_takes_nothing_fails_nothing(error: str, tmp_path: Path) -> None:
    """The disk is full, or its reader has left: a server goes on without a log, a batch without its progress."""
    code = f"import sys; from worker.platform.run import run_command; exec({WRITES!r}); run_command(lambda: command())"
    shell = f'exec 3>&1; ({sys.executable} -c "$0"; echo $? >&3) {error}'
    done = subprocess.run(
        ["sh", "-c", shell, code],
        env=usual_environment() | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert done.stdout == "done\n7\n"


@pytest.mark.parametrize(("command", "code"), [("plan --model demo", 2), ("keys init", 0)])
def test_only_what_has_an_answer_to_write_fails_if_standard_output_is_closed(
    command: str, code: int, tmp_path: Path
) -> None:
    shell = f"exec {sys.executable} -m coordinator {command} >&-"
    done = subprocess.run(
        ["sh", "-c", shell],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert done.returncode == code and ("error: cannot write standard output: " in done.stderr) == (code == 2)


def test_a_server_that_is_told_to_stop_before_it_answers_ends_well(start: Starter, talker: Path) -> None:
    running = start.brigade("serve", "--model", talker, "--local", "1", "--port", "0")
    start.children(running, 2)  # one of them renders chat templates
    running.process.terminate()
    outcome = running.wait()
    assert outcome.code == 0 and "Traceback" not in outcome.err
