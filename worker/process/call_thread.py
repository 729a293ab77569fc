"""A thread that runs calls in order and whose results are awaited. Knows nothing of what it runs."""

import asyncio
import threading
import traceback
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_given_up: list[threading.Thread] = []
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class CallThread:
    """Runs calls one at a time. A daemon: a call that never returns must not keep the process alive."""

    def __init__(self, name: str, at_end: Callable[[], None] = lambda: None) -> None:
        """`at_end` is called on the thread once it is closed."""
        self._at_end = at_end
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
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
        _given_up[:] = [thread for thread in (*_given_up, self._thread) if thread.is_alive()]

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, loop, future = job
            try:
                settle = partial(_settle, future, call(), None)
            except BaseException as error:  # raised again in the task that waits
                traceback.clear_frames(error.__traceback__)  # what the call held must not leave this thread with it
                settle = partial(_settle, future, None, error)
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)
            del job, call, future, settle  # what a call held must not live until the next one
        self._at_end()


def calls_are_left() -> bool:
    """Whether a call that was given up still runs. Python must not be finalised then: it would end the call's thread
    wherever that is, and C++ code aborts the process if that is in its middle.
    """
    return any(thread.is_alive() for thread in _given_up)


async def run_aside(call: Callable[[], T]) -> T:
    """Run one call that may take long on a thread of its own, for which the end of the process does not wait."""
    thread = CallThread("aside")
    try:
        return await thread.run(call)
    finally:
        thread.close(timeout_s=0)


def _settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():  # nobody waits any more
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # a future refuses it, and the caller would wait for ever
        future.set_exception(RuntimeError(f"the call raised {error!r}").with_traceback(error.__traceback__))
    else:
        future.set_exception(error)
