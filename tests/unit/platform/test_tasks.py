"""What must not be broken off is done whole, however often whoever awaits it is cancelled."""

import asyncio

import pytest

from worker.platform.tasks import shielded


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
