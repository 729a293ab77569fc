"""A thread that runs calls in order and whose results are awaited. Knows nothing of what it runs."""

import asyncio
import threading
import traceback
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_TRACED = 100  # frames that an exception keeps: one that calls raise again and again would gather them for ever
_given_up: list[threading.Thread] = []
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class CallThread:
    """Runs calls one at a time. A daemon: a call that never returns must not keep the process alive."""

    def __init__(self, name: str, at_end: Callable[[], None] = lambda: None) -> None:
        """`at_end` is called on the thread once it is closed."""
        self._at_end = at_end
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result, or its exception. Cancelling the wait does not stop the call.

        Raises:
            RuntimeError: the thread was closed before, so that nobody would ever run it.
        """
        return await self.submit(call)

    def submit(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """As `run`, for a call that nobody has to wait for. Raises RuntimeError likewise."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._closing:
            if self._is_closed:
                raise RuntimeError(f"the {self._thread.name} thread was closed before this call")
            self._jobs.put((call, loop, future))
        return future

    def give_way(self) -> None:
        """Run what waits by now: for a call on this thread that goes on for long, between two of its parts."""
        for _ in range(self._jobs.qsize()):
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)  # the end comes once the long call has returned
                break
            _run(job)

    def close(self, timeout_s: float = 2.0) -> None:
        """Let the thread finish what it has; give up on it after `timeout_s`."""
        with self._closing:
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(timeout_s)
        _given_up[:] = [thread for thread in (*_given_up, self._thread) if thread.is_alive()]

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(job)
            del job  # what a call held must not live until the next one
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


def _run(job: _Job) -> None:
    call, loop, future = job
    try:
        settle = partial(_settle, future, call(), None)
    except BaseException as error:  # raised again in the task that waits
        traceback.clear_frames(error.__traceback__)  # what the call held must not leave this thread with it
        settle = partial(_settle, future, None, error.with_traceback(_cut(error.__traceback__)))
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
    del job, call, future, settle  # the frames of an error lead back to this one, and it would keep them with the error


def _cut(trace: TracebackType | None) -> TracebackType | None:
    """Without the frame of `_run`, which holds the call, and without the oldest of too many: those come last."""
    first = entry = trace and trace.tb_next
    for _ in range(_MOST_TRACED - 1):
        entry = entry and entry.tb_next
    if entry is not None:
        entry.tb_next = None
    return first


def _settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():  # nobody waits any more
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # a future refuses it, and the caller would wait for ever
        future.set_exception(RuntimeError(f"the call raised {error!r}").with_traceback(error.__traceback__))
    else:
        future.set_exception(error)
