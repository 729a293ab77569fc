"""What asyncio lacks: a task that lives as long as a context, and an await that cancellation does not break off."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

Task = asyncio.Task[None]


@asynccontextmanager
async def background(
    work: Coroutine[Any, Any, None], when_done: Callable[[Task], object] = lambda task: None
) -> AsyncIterator[None]:
    """Run `work` as a task until the context ends. `when_done` is called with the task once it ends."""
    task = asyncio.create_task(work)
    task.add_done_callback(when_done)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def shielded(work: Coroutine[Any, Any, None]) -> None:
    """Await the work to its end even if this task is cancelled meanwhile; then raise the cancellation."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
