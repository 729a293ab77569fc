"""One thread, calls in order. Threads meet on events here; nothing sleeps."""

import asyncio
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from worker.platform.threads import CallThread, MlxThread, calls_are_left, run_in_thread


@pytest.fixture
def thread() -> Iterator[MlxThread]:
    thread = MlxThread()
    yield thread
    thread.close()


@asynccontextmanager
async def blocked(thread: MlxThread) -> AsyncIterator[tuple[threading.Event, "asyncio.Task[object]"]]:
    """The thread is in the middle of this call until the event is set."""
    entered, leave = threading.Event(), threading.Event()
    call = asyncio.create_task(thread.run(lambda: (entered.set(), leave.wait(5))))
    await asyncio.to_thread(entered.wait, 5)
    try:
        yield leave, call
    finally:
        leave.set()
        await asyncio.wait([call])


@asynccontextmanager
async def endless(thread: MlxThread) -> AsyncIterator[tuple["asyncio.Task[None]", threading.Event]]:
    """A coroutine that waits for ever on the thread, and an event that is set once it has been cancelled."""
    begun, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    waits = asyncio.create_task(thread.call(wait()))
    await asyncio.to_thread(begun.wait, 5)
    yield waits, ended
    await asyncio.wait([waits])


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError(3), MemoryError(), SystemError("odd"), asyncio.CancelledError()], ids=repr
)
async def test_an_exception_comes_back_and_the_thread_goes_on(thread: MlxThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    async def give() -> int:
        return 7

    with pytest.raises(type(error)) as caught:
        await thread.run(fail)
    assert caught.value is error
    if isinstance(error, Exception):
        with pytest.raises(type(error)) as caught:
            await thread.call(fail_later())
        assert caught.value is error
    with pytest.raises(RuntimeError, match="StopIteration"):  # asyncio refuses it: its caller would wait for ever
        await thread.run(lambda: next(iter(())))
    assert [await thread.run(lambda: 7), await thread.call(give())] == [7, 7]


async def test_a_cancelled_wait_leaves_its_call_running_and_the_next_one_waits_for_it(thread: MlxThread) -> None:
    done: list[bool] = []
    async with blocked(thread) as (leave, first):
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(thread.run(lambda: done.append(leave.is_set())))
        await asyncio.sleep(0)
        assert done == []
        leave.set()
        await second
        assert done == [True]


class ClosedMeanwhile(asyncio.SelectorEventLoop):
    """A loop that is closed between a look at it and what follows from that."""

    looks_open = True

    def is_closed(self) -> bool:
        return not self.looks_open and super().is_closed()


async def test_a_loop_that_closes_as_its_call_ends_takes_no_thread_with_it() -> None:
    thread, leave = CallThread("calls"), threading.Event()

    async def submit() -> None:
        thread.submit(lambda: leave.wait(5))

    loop = ClosedMeanwhile()
    await asyncio.to_thread(loop.run_until_complete, submit())
    loop.close()
    leave.set()
    async with asyncio.timeout(5):
        assert await thread.run(lambda: 7) == 7
    loop.looks_open = False
    thread.close()


async def test_nothing_of_a_call_is_kept_while_the_thread_waits(thread: MlxThread) -> None:
    class Array:
        pass

    taken, made = threading.Event(), threading.Event()

    def call(array: Array) -> Array:
        weakref.finalize(array, taken.set)
        result = Array()
        weakref.finalize(result, made.set)
        return result

    await thread.run(partial(call, Array()))
    assert await asyncio.to_thread(taken.wait, 2) and await asyncio.to_thread(made.wait, 2)


async def test_an_exception_that_is_raised_again_and_again_does_not_gather_frames(thread: MlxThread) -> None:
    error = ValueError("the stage has failed")

    def fail() -> None:
        raise error

    async def depth() -> int:
        with pytest.raises(ValueError, match="has failed"):
            await thread.run(fail)
        return len(traceback.extract_tb(error.__traceback__))

    depths = [await depth() for _ in range(400)]
    assert max(depths) < 150 and depths[-1] == depths[-2]


async def test_a_coroutine_runs_on_the_thread_and_lets_calls_run_where_it_waits(thread: MlxThread) -> None:
    log: list[tuple[str, int]] = []
    entered, go_on = threading.Event(), threading.Event()

    def note(what: str) -> None:
        log.append((what, threading.get_ident()))

    async def long() -> str:
        entered.set()
        assert go_on.wait(5)
        note("first half")
        await asyncio.sleep(0)
        note("second half")
        return "done"

    waits = asyncio.create_task(thread.call(long()))
    await asyncio.to_thread(entered.wait, 5)
    calls = [asyncio.create_task(thread.run(partial(note, "a")))]
    await asyncio.sleep(0)
    thread.post(partial(note, "b"))
    calls.append(asyncio.create_task(thread.run(partial(note, "c"))))
    await asyncio.sleep(0)
    go_on.set()
    assert await waits == "done"
    await asyncio.gather(*calls)
    assert [what for what, _ in log] == ["first half", "a", "b", "c", "second half"]
    assert len({ident for _, ident in log}) == 1 and log[0][1] != threading.get_ident()


async def test_a_caller_that_no_longer_waits_for_a_coroutine_cancels_it(thread: MlxThread) -> None:
    async with endless(thread) as (waits, ended):
        waits.cancel()
        await asyncio.wait([waits])
        assert waits.cancelled() and await asyncio.to_thread(ended.wait, 5)


async def test_a_closed_thread_ends_its_coroutines_takes_no_calls_and_nothing_that_is_posted() -> None:
    async def later() -> None:
        raise AssertionError

    thread, posted = MlxThread(), list[int]()
    async with endless(thread) as (_, ended):
        thread.close()
        assert ended.is_set()
    thread.post(partial(posted.append, 1))
    call = later()
    with pytest.raises(RuntimeError, match="the mlx thread was closed before this call"):
        await thread.call(call)
    call.close()
    assert posted == [] and not calls_are_left()


async def test_callers_of_a_thread_that_is_given_up_hear_why_and_so_do_later_calls() -> None:
    thread, release = MlxThread(), threading.Event()

    async def never() -> None:
        raise AssertionError

    async with blocked(thread) as (leave, _):
        waits = [asyncio.create_task(thread.call(never())) for _ in range(2)]
        await asyncio.sleep(0)
        thread.give_up(ValueError("stuck"))
        for call in (*waits, thread.call(never())):
            with pytest.raises(ValueError, match=r"^stuck$"):
                await call
        thread.post(release.set)
        leave.set()
    thread.close()
    assert not release.is_set() and not calls_are_left(), "its step has returned"


def test_close_ends_the_thread_after_what_it_was_given_and_later_calls_are_refused_at_once() -> None:
    thread = MlxThread()
    entered, leave, done = threading.Event(), threading.Event(), list[int]()

    async def abandon() -> None:
        call = asyncio.create_task(thread.run(lambda: (entered.set(), leave.wait(5))))
        await asyncio.to_thread(entered.wait, 5)
        call.cancel()

    async def close() -> None:
        calls = [asyncio.create_task(thread.run(partial(done.append, n))) for n in range(20)]
        await asyncio.sleep(0)
        thread.close()
        await asyncio.gather(*calls)
        with pytest.raises(RuntimeError, match="the mlx thread was closed before this call"):
            await thread.run(lambda: 1)

    asyncio.run(abandon())  # a result for a loop that is gone harms nobody
    leave.set()
    asyncio.run(close())
    assert not calls_are_left() and done == list(range(20))


async def test_close_gives_up_on_a_call_that_never_returns() -> None:
    """And the thread is a daemon, so that it does not keep the process alive."""
    thread = MlxThread()
    assert await thread.run(lambda: threading.current_thread().daemon)
    async with blocked(thread):
        thread.close(timeout_s=0.01)
        assert calls_are_left()
    await asyncio.to_thread(thread.close)
    assert not calls_are_left()


async def test_threads_of_the_system_are_used_again_and_none_by_two() -> None:
    """MLX starts one of its own for each of them that evaluates arrays, and never ends it."""

    async def compute(thread: MlxThread) -> int:
        assert await thread.run(lambda: mx.ones(3).sum().item()) == 3
        return await thread.run(threading.get_ident)

    first, second = MlxThread(), MlxThread()
    both = {await compute(first), await compute(second)}
    assert len(both) == 2
    first.close()
    third = MlxThread()
    assert await compute(third) in both
    second.close()
    third.close()
    calls = {await run_in_thread(threading.get_ident) for _ in range(20)}
    assert len(calls) < 5 and not calls & both  # one that still ends is not used


FAILURES = """
import asyncio
import os
import sys
from contextlib import closing, suppress

import mlx.core as mx

from worker.platform.threads import MlxThread

path = sys.argv[1]


def fail() -> None:
    for _ in range(10):
        mx.save_safetensors(path, {str(number): mx.ones(100) for number in range(300)})
        arrays = mx.load(path)
        os.truncate(path, 1000)
        for array in arrays.values():
            with suppress(RuntimeError):
                mx.eval(array)
                raise AssertionError("an array was read from a file that ends before it")


def compute() -> None:
    mx.eval(held := mx.ones(100))
    mx.set_memory_limit(1)
    mx.eval(held + 1)


async def main() -> None:
    with closing(MlxThread()) as thread:
        await thread.run(fail)
        await thread.run(compute)


asyncio.run(main())
"""


def test_evaluations_that_fail_do_not_make_later_ones_beyond_the_memory_limit_wait_for_ever(tmp_path: Path) -> None:
    """In a process of its own, where no other thread has computed before."""
    script = [sys.executable, "-W", "error", "-c", FAILURES, str(tmp_path / "cut.safetensors")]
    subprocess.run(script, check=True, timeout=60)


def test_a_thread_takes_over_the_loop_of_one_that_has_ended() -> None:
    """gRPC keeps every loop that it has seen, with its files."""
    first = MlxThread()
    first.close()
    second, third = MlxThread(), MlxThread()
    assert second.loop is first.loop is not third.loop

    async def call() -> int:
        return await asyncio.wait_for(second.call(asyncio.sleep(0, 7)), 10)

    assert asyncio.run(call()) == 7
    second.close()
    third.close()
