"""One thread, calls in order. Threads meet on events here; nothing sleeps."""

import asyncio
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from worker.platform.threads import MlxThread, calls_are_left


@pytest.fixture
def thread() -> Iterator[MlxThread]:
    thread = MlxThread()
    yield thread
    thread.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, within a time; what the event loop would only log is a failure too."""
    logged: list[dict[str, Any]] = []

    async def bounded() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        async with asyncio.timeout(30):
            return await work

    outcome = asyncio.run(bounded())
    assert not logged
    return outcome


@asynccontextmanager
async def blocked(thread: MlxThread) -> AsyncIterator[threading.Event]:
    """The thread is in the middle of a call until the event is set."""
    entered, leave = threading.Event(), threading.Event()
    call = asyncio.ensure_future(thread.run(lambda: (entered.set(), leave.wait(5))))
    await asyncio.to_thread(entered.wait, 5)
    try:
        yield leave
    finally:
        leave.set()
        await asyncio.wait([call])


def test_calls_run_one_after_the_other_in_the_order_they_came_on_one_thread_that_is_not_ours(thread: MlxThread) -> None:
    log: list[tuple[str, int, int]] = []

    def call(number: int) -> int:
        log.append(("begin", number, threading.get_ident()))
        log.append(("end", number, threading.get_ident()))
        return number * number

    async def work() -> list[int]:
        return await asyncio.gather(*(thread.run(lambda n=n: call(n)) for n in range(50)))  # type: ignore[misc]

    assert run(work()) == [n * n for n in range(50)]
    assert [(what, n) for what, n, _ in log] == [(what, n) for n in range(50) for what in ("begin", "end")]
    assert len({ident for *_, ident in log}) == 1
    assert log[0][2] != threading.get_ident()


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyError(3), MemoryError(), SystemError("odd"), asyncio.CancelledError()], ids=repr
)
def test_an_exception_comes_back_to_who_waits_and_the_thread_goes_on(thread: MlxThread, error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def work() -> int:
        with pytest.raises(type(error)) as caught:
            await thread.run(fail)
        assert caught.value is error
        with pytest.raises(RuntimeError, match="StopIteration"):  # asyncio refuses it: its caller would wait for ever
            await thread.run(lambda: next(iter(())))
        return await thread.run(lambda: 7)

    assert run(work()) == 7


def test_a_cancelled_wait_leaves_its_call_running_and_the_next_one_waits_for_it(thread: MlxThread) -> None:
    done: list[str] = []

    async def work() -> None:
        entered, leave = threading.Event(), threading.Event()
        first = asyncio.ensure_future(thread.run(lambda: (entered.set(), leave.wait(5), done.append("first"))))
        await asyncio.to_thread(entered.wait, 5)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(thread.run(lambda: done.append("second")))
        await asyncio.sleep(0)
        assert done == []
        leave.set()
        await second
        assert done == ["first", "second"]

    run(work())


def test_nothing_that_a_call_took_or_made_is_kept_while_the_thread_waits_for_the_next_one(thread: MlxThread) -> None:
    class Array:
        pass

    taken, made = threading.Event(), threading.Event()

    def call(array: Array) -> Array:
        weakref.finalize(array, taken.set)
        result = Array()
        weakref.finalize(result, made.set)
        return result

    async def work() -> None:
        await thread.run(partial(call, Array()))

    run(work())
    assert taken.wait(2) and made.wait(2)


def test_an_exception_that_is_raised_again_and_again_does_not_gather_frames(thread: MlxThread) -> None:
    error = ValueError("the stage has failed")

    def fail() -> None:
        raise error

    async def depth() -> int:
        with pytest.raises(ValueError, match="has failed"):
            await thread.run(fail)
        return len(traceback.extract_tb(error.__traceback__))

    async def work() -> list[int]:
        return [await depth() for _ in range(400)]

    depths = run(work())
    assert max(depths) < 150
    assert depths[-1] == depths[-2]


def test_a_long_call_lets_those_that_wait_run_where_it_gives_way(thread: MlxThread) -> None:
    log: list[str] = []
    entered, go_on = threading.Event(), threading.Event()

    def long() -> None:
        entered.set()
        assert go_on.wait(5)
        log.append("first half")
        thread.give_way()
        log.append("second half")

    async def work() -> None:
        waits = asyncio.ensure_future(thread.run(long))
        await asyncio.to_thread(entered.wait, 5)
        others = [asyncio.ensure_future(thread.run(partial(log.append, name))) for name in ("a", "b")]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(waits, *others)

    run(work())
    assert log == ["first half", "a", "b", "second half"]


def test_a_thread_that_is_closed_while_a_call_gives_way_ends_after_that_call() -> None:
    thread = MlxThread()
    entered, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def long() -> None:
        entered.set()
        assert go_on.wait(5)
        thread.give_way()
        done.set()

    async def work() -> None:
        waits = asyncio.ensure_future(thread.run(long))
        await asyncio.to_thread(entered.wait, 5)
        thread.close(timeout_s=0)
        go_on.set()
        await waits
        thread.close()

    run(work())
    assert done.is_set()
    assert not calls_are_left()


def test_close_ends_the_thread_after_what_it_was_given_and_later_calls_are_refused_at_once() -> None:
    before = set(threading.enumerate())
    thread = MlxThread()
    [started] = set(threading.enumerate()) - before
    entered, leave, done = threading.Event(), threading.Event(), list[int]()

    async def abandon() -> None:
        call = asyncio.ensure_future(thread.run(lambda: (entered.set(), leave.wait(5))))
        await asyncio.to_thread(entered.wait, 5)
        call.cancel()

    async def work() -> None:
        calls = [asyncio.ensure_future(thread.run(lambda n=n: done.append(n))) for n in range(20)]  # type: ignore[misc]
        await asyncio.sleep(0)
        thread.close()
        await asyncio.gather(*calls)

    run(abandon())  # a result for a loop that is gone harms nobody
    leave.set()
    run(work())
    assert not started.is_alive()
    assert done == list(range(20))
    with pytest.raises(RuntimeError, match="the mlx thread was closed before this call"):
        run(thread.run(lambda: 1))


def test_close_gives_up_on_a_call_that_never_returns() -> None:
    """And the thread is a daemon, so that it does not keep the process alive."""
    before = set(threading.enumerate())
    thread = MlxThread()
    [started] = set(threading.enumerate()) - before

    async def work() -> None:
        async with blocked(thread):
            thread.close(timeout_s=0.01)
            assert started.is_alive() and started.daemon

    run(work())
    started.join(5)
    assert not started.is_alive()
