"""Threads that run calls in order for an event loop, among them the one that owns MLX and the hops."""

import asyncio
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_TRACED = 100  # frames that an exception keeps; one that is raised repeatedly would collect them
_given_up: list[threading.Thread] = []
_idle: "list[CallThread]" = []  # threads of `run_in_thread` that wait for another call
_MOST_IDLE = 8
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class CallThread:
    """Runs calls one at a time on a daemon thread: a call that never returns does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        """Return the call's result or raise its exception. Cancelling the wait does not stop the call.

        Raises:
            RuntimeError: the thread is closed.
        """
        return await self.submit(call)

    def submit(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue a call and return its future. Raises RuntimeError as `run` does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._closing:
            if self._is_closed:
                raise RuntimeError(f"the {self._thread.name} thread was closed before this call")
            self._post((call, loop, future))
        return future

    def close(self, timeout_s: float = 2.0) -> None:
        """Let the thread finish its calls; abandon it after `timeout_s`."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._post(None)
        self._thread.join(timeout_s)
        _given_up[:] = [thread for thread in (*_given_up, self._thread) if thread.is_alive()]

    def _post(self, job: _Job | None) -> None:
        self._jobs.put(job)

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(job)
            del job  # its references must not live until the next call


def calls_are_left() -> bool:
    """Return whether an abandoned call still runs.

    Python must not be finalised then: it would end the thread in the middle of C++ code, which aborts the process.
    """
    return any(thread.is_alive() for thread in _given_up)


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run one long call on a thread that does nothing else meanwhile; the process may end before it.

    Threads are used again: in each that evaluates anything, MLX starts another one for the CPU, which never ends.
    """
    try:
        thread = _idle.pop()
    except IndexError:
        thread = CallThread("background")
    future = thread.submit(call)
    try:
        return await future
    finally:
        if future.done() and not future.cancelled() and len(_idle) < _MOST_IDLE:
            _idle.append(thread)
        else:
            thread.close(timeout_s=0)


def _run(job: _Job) -> None:
    call, loop, future = job
    try:
        settle = partial(_settle, future, call(), None)
    except BaseException as error:  # raised again in the task that waits
        traceback.clear_frames(error.__traceback__)  # arrays that the call held must not leave this thread
        settle = partial(_settle, future, None, error.with_traceback(_cut(error.__traceback__)))
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
    del job, call, future, settle  # else this frame and an error that refers to it would keep each other alive


def _cut(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frame of `_run`, which holds the call, and all frames beyond `_MOST_TRACED`."""
    first = entry = trace and trace.tb_next
    for _ in range(_MOST_TRACED - 1):
        entry = entry and entry.tb_next
    if entry is not None:
        entry.tb_next = None
    return first


def _settle(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():  # the wait was cancelled
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # a future refuses StopIteration
        future.set_exception(RuntimeError(f"the call raised {error!r}").with_traceback(error.__traceback__))
    else:
        future.set_exception(error)


_SWITCH_INTERVAL_S = 0.0002  # Python's default of 5 ms would delay the event loop while a graph is built


_USER_INTERACTIVE = 0x21  # the highest class of pthread/qos.h; a new thread has the default one, whatever made it


def raise_service_class() -> None:
    """Have macOS run this thread on fast cores and before others; do nothing elsewhere."""
    if sys.platform == "darwin":
        ctypes.CDLL(None).pthread_set_qos_class_self_np(_USER_INTERACTIVE, 0)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that closes once nothing refers to it: gRPC still announces to it that the last calls have ended."""

    def __del__(self) -> None:
        if not self.is_closed():
            self.close()


class MlxThread(CallThread):
    """The one thread of a process that owns MLX: arrays never leave it.

    It runs an event loop of its own, on which the gRPC streams of hops live: between a frame and the device no other
    thread has to wake up. It is asyncio's own loop: with gRPC and inline computing it is quicker than uvloop.
    """

    def __init__(self) -> None:
        import mlx.core as mx  # commands that never compute start without it

        # The first thread that uses a CPU stream is MLX's main thread. If an evaluation fails there, MLX 0.32 may count
        # one of its tasks as active for ever, and beyond the memory limit all later evaluations wait for that task.
        mx.synchronize(mx.default_stream(mx.cpu))
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self.loop = _Loop()
        self._waiting: set[asyncio.Future[Exception]] = set()  # of `call`
        self._given_up: Exception | None = None
        super().__init__("mlx")

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that runs on this thread's loop; cancelling the wait cancels it.

        Raises:
            Exception: that of the coroutine, or that of `give_up`.
        """
        given_up = asyncio.get_running_loop().create_future()
        with self._closing:
            if self._is_closed:
                work.close()
                raise self._given_up or RuntimeError(f"the {self._thread.name} thread was closed before this call")
            running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        self._waiting.add(given_up)
        try:
            await asyncio.wait([running, given_up], return_when=asyncio.FIRST_COMPLETED)
            if given_up.done():
                raise given_up.result()
            return running.result()
        finally:
            running.cancel()
            self._waiting.discard(given_up)

    def give_up(self, error: Exception) -> None:
        """Make all calls of coroutines raise this error, on the loop that made them: the thread does not come back."""
        self._is_closed, self._given_up = True, error
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(error)

    def post(self, call: Callable[[], object]) -> None:
        """Have the thread call this soon, unless it is closed. Any thread may post."""
        with self._closing:
            if not self._is_closed:
                self.loop.call_soon_threadsafe(call)

    def _post(self, job: _Job | None) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop if job is None else partial(_run, job))

    def _main(self) -> None:
        import mlx.core as mx

        raise_service_class()
        self.loop.run_forever()
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        self.loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
        mx.synchronize()  # a step built ahead may still be computing
        mx.clear_streams()  # MLX requires this at the end of a thread
