"""The one thread of a process that owns MLX. Bytes and plain objects cross it; arrays never do."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class MlxThread:
    """Runs calls in order, one at a time. A daemon: a kernel that never returns must not keep the process alive."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="mlx", daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result, or its exception. Cancelling the wait does not stop the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((call, loop, future))
        return await future

    def close(self, timeout_s: float = 2.0) -> None:
        """Let the thread finish what it has; give up on it after `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, loop, future = job
            try:
                settle = partial(_settle, future, call(), None)
            except BaseException as error:  # raised again in the task that waits
                settle = partial(_settle, future, None, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)
            del job, call, future, settle  # what a call held must not live until the next one
        mx.clear_streams()  # MLX asks for this at the end of every thread that used it


def _settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():  # nobody waits any more
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # a future refuses it, and the caller would wait for ever
        future.set_exception(RuntimeError(f"the call raised {error!r}").with_traceback(error.__traceback__))
    else:
        future.set_exception(error)
