"""What a command that is interrupted ends with, and what it leaves behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from coordinator.cli.run import run_async
from worker.errors import StageLost
from worker.platform import interrupts


async def interrupted(number: signal.Signals = signal.SIGINT) -> None:
    """Return once the signal has cancelled this."""
    os.kill(os.getpid(), number)
    await asyncio.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_interrupt_once_all_is_cleaned_up(number: signal.Signals) -> None:
    done = []

    async def work() -> None:
        try:
            await interrupted(number)
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        run_async(work())
    assert done == ["cleaned up"]


def test_how_work_ends_that_is_interrupted() -> None:
    async def fail() -> None:
        try:
            await interrupted()
        finally:
            raise StageLost("its compiler was interrupted, too")

    with pytest.raises(KeyboardInterrupt):  # the failure because of an interrupt is not told instead
        run_async(fail())

    async def serve() -> int:
        try:
            await interrupted(signal.SIGTERM)
        except asyncio.CancelledError:
            return 7
        return 8

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run_async(serve()) == 7, "a signal may be its usual end"
    # uvloop would leave handlers behind that do nothing
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


STUCK = """
import asyncio, os, sys
from coordinator.cli.run import run_async

async def work():
    sys.stdout.write("stuck")
    sys.stdout.flush()
    os.read(0, 1)

run_async(work())
"""


def test_a_second_signal_ends_a_process_whose_loop_is_stuck() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read(5) == b"stuck"
        deadline = time.monotonic() + 10.0
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)  # until the second has come
            time.sleep(0.02)
        process.kill()
    assert process.returncode == 130


def test_one_signal_ends_a_process_whose_output_is_not_read() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read(5) == b"stuck"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) == 130
        finally:
            process.kill()


def test_what_is_cleaned_up_may_take_longer_than_a_stuck_loop_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "STUCK_S", 0.1)

    async def work() -> None:
        try:
            await interrupted()
        finally:
            await asyncio.sleep(0.3)

    with pytest.raises(KeyboardInterrupt):
        run_async(work())


GRACEFUL = """
import asyncio, os, signal, sys
from coordinator.cli.run import run_async

async def work():
    for number in (1, 2):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("cancelled", number, flush=True)
    {end}

run_async(work(), grace_s={grace_s})
"""


@pytest.mark.parametrize(
    ("end", "grace_s"), [("pass", 60.0), ("await asyncio.Event().wait()", 0.1), ("os.read(0, 1)", 0.1)]
)
def test_a_second_signal_leaves_a_moment_to_cut_off_what_runs(end: str, grace_s: float) -> None:
    program = [sys.executable, "-c", GRACEFUL.format(end=end, grace_s=grace_s)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read() == b"cancelled 1\ncancelled 2\n"
        assert process.wait() == 130


def test_a_reader_who_leaves_while_rich_prints_ends_the_command_and_not_the_loop() -> None:
    async def work() -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 - as rich's console does

    with pytest.raises(BrokenPipeError):
        run_async(work())


def test_help_is_there_before_what_computes_is_imported() -> None:
    program = "import sys, coordinator.cli.app; print(*{'mlx', 'mlx_lm', 'grpc', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
