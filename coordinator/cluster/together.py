"""Several coroutines at once, of which each is needed."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all at once and return their results in order; the first failure ends the others, and is raised itself.

    Without `except*`: some releases of Python 3.11 wrap what is raised there into a group again.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
