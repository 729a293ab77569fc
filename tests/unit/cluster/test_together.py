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


def test_the_first_failure_ends_the_others_and_is_raised_itself() -> None:
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


def test_a_deadline_around_several_of_which_one_has_failed_is_a_deadline_still() -> None:
    async def main() -> None:
        async with asyncio.timeout(0.01):
            with contextlib.suppress(KeyError):
                await together(asyncio.sleep(1), fail_later())
            await asyncio.sleep(1)

    async def fail_later() -> None:
        await asyncio.sleep(0)
        raise KeyError

    with pytest.raises(TimeoutError):
        asyncio.run(main())
