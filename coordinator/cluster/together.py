"""Several coroutines at once, of which each is needed."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all at once and return their results in order; the first failure ends the others, and is raised itself.

    Without a TaskGroup: up to Python 3.12 it leaves the task that waits marked as being cancelled when one fails, and a
    timeout around it then ends in a CancelledError.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
        return [task.result() for task in sorted(done, key=tasks.index)]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
