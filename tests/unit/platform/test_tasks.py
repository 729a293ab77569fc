"""Work that must not be broken off, work in the background, work of which each part is needed, and idle time."""

import asyncio
import contextlib

import pytest

from tests.unit.virtual_time import VirtualTime
from worker.errors import ModelError
from worker.platform.tasks import Use, background, shielded, together


async def test_a_cancelled_task_ends_only_once_the_work_is_done() -> None:
    done, may_end = [], asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        done.append("all of it")

    task = asyncio.create_task(shielded(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["all of it"]


async def fail() -> None:
    await asyncio.sleep(0)
    raise ModelError("torn")


async def test_a_failure_of_the_work_is_raised() -> None:
    with pytest.raises(ModelError, match="torn"):
        await shielded(fail())


def test_a_failure_of_background_work_is_reported_at_once_and_its_end_by_its_context_is_none() -> None:
    async def run() -> object:
        loop = asyncio.get_running_loop()
        reported = loop.create_future()
        loop.set_exception_handler(lambda _, context: reported.set_result(context["exception"]))
        async with background(asyncio.Event().wait()):
            await asyncio.sleep(0)
        assert not reported.done()
        async with background(fail()):
            return await reported

    assert str(asyncio.run(run())) == "torn"


async def test_the_first_failure_ends_the_others_and_is_raised_itself_and_a_deadline_around_them_stays_one() -> None:
    """Not a group of it, on any release of Python."""
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    with pytest.raises(ModelError, match=r"^torn$"):
        await together(wait(), fail(), wait())
    assert ended == [1, 1]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            with contextlib.suppress(ModelError):
                await together(wait(), fail())
            await wait()


KEEP_S = 300.0


def test_only_an_unbroken_time_without_use_counts(virtual: VirtualTime) -> None:
    use = Use()

    async def work() -> float:
        waiting = asyncio.create_task(use.wait_unused(KEEP_S))
        await asyncio.sleep(299)
        with use.using():
            await asyncio.sleep(1000)
            with use.using():
                await asyncio.sleep(1000)
            await asyncio.sleep(299)
        assert not waiting.done()
        ended = virtual.now
        await waiting
        return virtual.now - ended

    assert virtual.run(work()) == pytest.approx(KEEP_S)


def test_without_a_time_nothing_counts_as_unused(virtual: VirtualTime) -> None:
    use = Use()

    async def work() -> None:
        waiting = asyncio.create_task(use.wait_unused(None))
        await asyncio.sleep(1e6)
        with use.using():
            await asyncio.sleep(1)
        await asyncio.sleep(1e6)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])

    virtual.run(work())
