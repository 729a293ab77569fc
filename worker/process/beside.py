"""Work that goes on beside something else, for as long as that does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

Task = asyncio.Task[None]


@asynccontextmanager
async def beside(
    work: Coroutine[Any, Any, None], when_done: Callable[[Task], object] = lambda task: None
) -> AsyncIterator[None]:
    """Run `work` until the end of the context; `when_done` hears how it ended."""
    task = asyncio.create_task(work)
    task.add_done_callback(when_done)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
