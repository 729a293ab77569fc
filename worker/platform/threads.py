"""Threads that run calls in order for an event loop, among them the one that owns MLX and the hops."""

import asyncio
import ctypes
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
_MOST_TRACED = 100  # frames kept in a traceback; that of an error raised repeatedly would grow without limit
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class _Work:
    """Work on a daemon thread of the system, which goes on with the next work of this name.

    For each thread that evaluates arrays MLX starts another one, which never ends: a new one for each model would leave
    one behind.
    """

    given_up: ClassVar[list["_Work"]] = []  # that nothing waits for, though it goes on
    _idle: ClassVar[defaultdict[str, list[SimpleQueue["_Work"]]]] = defaultdict(list)

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name = name
        self._work: Callable[[], None] | None = work
        self.has_ended = threading.Event()
        try:
            queue = self._idle[name].pop()
        except IndexError:
            queue = SimpleQueue()
            threading.Thread(target=self._serve, args=[queue], name=name, daemon=True).start()
        queue.put(self)

    @classmethod
    def _serve(cls, queue: "SimpleQueue[_Work]") -> None:
        while True:
            work = queue.get()
            assert work._work is not None
            try:
                work._work()
                cls._idle[work.name].append(queue)
            finally:
                work._work = None  # with what it refers to
                work.has_ended.set()
                del work

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, and note if it goes on after so many seconds."""
        self.has_ended.wait(timeout_s)
        self.given_up[:] = [work for work in (*self.given_up, self) if not work.has_ended.is_set()]


class CallThread:
    """Runs calls one at a time on a daemon thread, so that a call which never returns cannot keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = _Work(name, self._main)

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
        """Wait for the queued calls, but abandon the thread after `timeout_s` seconds."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._post(None)
        self._thread.wait(timeout_s)

    def _post(self, job: _Job | None) -> None:
        self._jobs.put(job)

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            _run(job)
            del job  # release its references before the next call


def calls_are_left() -> bool:
    """Return whether an abandoned call still runs.

    If so, do not finalise Python: it would end that thread inside C++ code, which aborts the process.
    """
    return any(not work.has_ended.is_set() for work in _Work.given_up)


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run one long call on a thread of its own; the process may end before the call does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    work = _Work("background", partial(_run, (call, loop, future)))
    try:
        return await future
    finally:
        if future.cancelled():
            work.wait(timeout_s=0)


def _run(job: _Job) -> None:
    call, loop, future = job
    try:
        settle = partial(_settle, future, call(), None)
    except BaseException as error:  # raised again in the task that waits
        traceback.clear_frames(error.__traceback__)  # the call's arrays must not leave this thread
        settle = partial(_settle, future, None, error.with_traceback(_cut(error.__traceback__)))
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle)
    del job, call, future, settle  # break the cycle between this frame and an error that refers to it


def _cut(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frame of `_run`, which holds the call, and without frames beyond the limit."""
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
_USER_INTERACTIVE = 0x21  # the highest class of pthread/qos.h; new threads have the default one


def raise_service_class() -> None:
    """Make macOS prefer this thread and run it on fast cores; do nothing on other systems."""
    if sys.platform == "darwin":
        ctypes.CDLL(None).pthread_set_qos_class_self_np(_USER_INTERACTIVE, 0)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that closes when it is garbage collected: until then gRPC reports the end of the last calls to it."""

    def __del__(self) -> None:
        if not self.is_closed():
            self.close()


class MlxThread(CallThread):
    """The only thread of a process that uses MLX: arrays never leave it.

    It runs its own event loop with the gRPC streams of hops, so that no other thread has to wake up between a frame and
    the device. The loop is asyncio's: with gRPC and computation on the loop itself, it is faster than uvloop. The next
    thread takes it over: gRPC keeps every loop that it has seen, with its files, for as long as any channel is open.
    """

    _idle_loops: ClassVar[list[_Loop]] = []

    def __init__(self) -> None:
        import mlx.core as mx  # commands that never compute start without it

        # MLX's main thread is the first that uses a CPU stream: make it the calling thread. If an evaluation fails on
        # it, MLX 0.32 may count a task as active for ever: evaluations beyond the memory limit wait for that task.
        mx.synchronize(mx.default_stream(mx.cpu))
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self.loop = self._idle_loops.pop() if self._idle_loops else _Loop()
        self._waiting: set[asyncio.Future[Exception]] = set()  # one per running `call`
        self._given_up: Exception | None = None
        super().__init__("mlx")

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this thread's loop and return its result. Cancelling the wait cancels the coroutine.

        Raises:
            Exception: the error of the coroutine, or that passed to `give_up`.
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
        """Make every `call` raise this error, because the thread hangs. Call it on the loop that awaits them."""
        self._given_up = error
        self.close(0.0)  # should it ever return, it ends
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(error)

    def post(self, call: Callable[[], object]) -> None:
        """Schedule a call on the thread's loop, unless it is closed. Any thread may post."""
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
        mx.synchronize()  # a step launched ahead may still be computing
        self._idle_loops.append(self.loop)
