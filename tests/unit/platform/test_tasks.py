"""What must not be broken off is done whole, however often whoever awaits it is cancelled."""

import asyncio

import pytest

from worker.platform.tasks import background, shielded


def test_a_cancelled_task_ends_only_once_the_work_is_done() -> None:
    asyncio.run(cancel_while_it_works())


async def cancel_while_it_works() -> None:
    may_end, done = asyncio.Event(), []

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


def test_what_the_work_fails_with_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        asyncio.run(shielded(fail()))


def test_the_failure_of_background_work_is_reported_at_once() -> None:
    async def fail() -> None:
        raise ValueError("lost")

    async def run() -> object:
        loop = asyncio.get_running_loop()
        reported = loop.create_future()
        loop.set_exception_handler(lambda _, context: reported.set_result(context["exception"]))
        async with background(fail()):
            return await reported

    assert str(asyncio.run(run())) == "lost"


def test_background_work_that_is_ended_by_its_context_reports_nothing() -> None:
    reported: list[object] = []

    async def wait() -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        async with background(wait()):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert not reported
