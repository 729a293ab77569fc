"""Running several coroutines at once when all of them are needed."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all at once and return their results in order; raise the first failure after cancelling the others.

    A TaskGroup will not do: up to Python 3.12 a failure leaves the waiting task marked as cancelled, and a timeout
    around it then ends in a CancelledError.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
        return [task.result() for task in sorted(done, key=tasks.index)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
