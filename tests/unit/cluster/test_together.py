"""Several coroutines of which each is needed."""

import asyncio
import contextlib

import pytest

from worker.errors import ModelError
from worker.platform.tasks import together


def test_results_come_in_the_order_of_the_work() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(together(after(3), after(0), after(1))) == [3, 0, 1]
    assert asyncio.run(together()) == []


def test_the_first_failure_ends_the_others_and_is_raised_itself_and_a_deadline_around_them_stays_one() -> None:
    """Not a group of it, on any release of Python."""
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ModelError("torn")

    with pytest.raises(ModelError, match=r"^torn$"):
        asyncio.run(together(wait(), fail(), wait()))
    assert ended == [1, 1]

    async def in_time() -> None:
        async with asyncio.timeout(0.01):
            with contextlib.suppress(ModelError):
                await together(wait(), fail())
            await wait()

    with pytest.raises(TimeoutError):
        asyncio.run(in_time())
