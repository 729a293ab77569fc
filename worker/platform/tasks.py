"""Additions to asyncio: background tasks, uncancellable awaits, concurrent awaits, and idle detection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

Task = asyncio.Task[None]
T = TypeVar("T")


def report_failure(task: Task) -> None:
    """Report a failed task's error to the event loop, which logs it. A done callback."""
    if not task.cancelled() and (error := task.exception()):
        task.get_loop().call_exception_handler(
            {"message": "a background task has failed", "exception": error, "task": task}
        )


async def cancel_all(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel the tasks that have not ended. Return the result or exception of each once all have."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def background(
    work: Coroutine[Any, Any, None], when_done: Callable[[Task], object] = report_failure
) -> AsyncIterator[None]:
    """Run `work` as a task until the context ends. `when_done` is its done callback."""
    task = asyncio.create_task(work)
    task.add_done_callback(when_done)
    try:
        yield
    finally:
        await cancel_all(task)


async def shielded(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` until it ends, even if this task is cancelled meanwhile; raise the cancellation afterwards."""
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


async def wait_set(event: asyncio.Event, unless: asyncio.Future[Any], within_s: float | None = None) -> bool:
    """Wait until the event is set, `unless` ends, or the time is over; return whether the event is set."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((waiting, unless), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return event.is_set()


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all concurrently and return their results in order; on a failure cancel the others and raise it.

    Not a TaskGroup: up to Python 3.12 its failure leaves the waiting task marked as cancelled, so that a timeout around
    it raises CancelledError.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
        return [task.result() for task in sorted(done, key=tasks.index)]
    finally:
        await cancel_all(*tasks)


async def for_each(items: Iterable[T], act: Callable[[T], Coroutine[Any, Any, None]], *, most: int) -> None:
    """Act on all items in order, on so many at a time at most; on a failure cancel the others and raise it."""
    left = iter(items)

    async def act_in_turn() -> None:
        for item in left:
            await act(item)

    await together(*(act_in_turn() for _ in range(most)))


class Use:
    """Counts the users of a resource, to find out when it has been idle for some time."""

    def __init__(self) -> None:
        self._num_users = 0
        self._used = asyncio.Event()
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def is_used(self) -> bool:
        return self._num_users > 0

    @contextmanager
    def using(self) -> Iterator[None]:
        """Count one user while this context lasts."""
        self._num_users += 1
        self._used.set()
        self._unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._used.clear()
                self._unused.set()

    async def wait_unused(self, for_s: float | None) -> None:
        """Return once it has been unused for `for_s` consecutive seconds; never if None."""
        while True:
            await self._unused.wait()
            try:
                async with asyncio.timeout(for_s):
                    await self._used.wait()
            except TimeoutError:
                if not self.is_used:  # it may have been used since the timeout fired
                    return
