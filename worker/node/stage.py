"""A stage's loop: frames in, the MLX thread, frames or results out. The same code in the coordinator and on workers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx

from protos.brigade_pb2 import Frame, Result, StatusReply
from worker.compute.engine import Engine, Step
from worker.errors import FrameError, StageLost
from worker.process.mlx_thread import MlxThread

_DEPTH = 64  # frames that may wait here: more than a scheduler ever has in flight, so one more is a peer's mistake

Send = Callable[[Frame], Awaitable[None]]


class Stage:
    """One shard at its place in the chain."""

    def __init__(self, engine: Engine, thread: MlxThread, epoch: int, send: Send | None) -> None:
        """`send` takes a frame to the next stage; the last stage has none."""
        self.engine = engine
        self.last_step = 0
        self._sent_bytes = 0
        self._thread = thread
        self._epoch = epoch
        self._send = send
        self._frames: SimpleQueue[tuple[Frame, int]] = SimpleQueue()
        self._arrived = asyncio.Event()
        self._outputs: asyncio.Queue[Frame | Result] = asyncio.Queue()
        self._outcomes: asyncio.Queue[Result | BaseException] = asyncio.Queue()
        self._idle = asyncio.Event()  # no slot is open
        self._idle.set()
        self._busy_since: float | None = None
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def busy_s(self) -> float:
        """How long the engine has been at its present step; 0 when idle."""
        return 0.0 if self._busy_since is None else time.monotonic() - self._busy_since

    def start(self, *watched: Coroutine[Any, Any, None]) -> None:
        """Start working, and run `watched` beside it: whichever ends or fails first fails the stage."""
        for work in (self._work(), self._pass_on(), *watched):
            task = asyncio.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def submit(self, frame: Frame) -> None:
        """Hand over a frame that has just arrived. Raises FrameError if it is of another epoch or one too many."""
        if frame.epoch != self._epoch:
            raise FrameError(f"expected frames of epoch {self._epoch}, got epoch {frame.epoch} (step {frame.step})")
        if frame.opened:
            self._idle.clear()
        if self._frames.qsize() >= _DEPTH:
            raise FrameError(f"expected at most {_DEPTH} frames in flight, got one more (step {frame.step})")
        self._frames.put((frame, time.monotonic_ns()))
        self._arrived.set()

    def deliver(self, result: Result) -> None:
        """Add a result that came from elsewhere: the coordinator's stage gets those of the last worker."""
        self._outcomes.put_nowait(result)

    async def next_result(self) -> Result:
        """The next result, in order. Raises whatever ended the stage."""
        outcome = await self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def status(self) -> StatusReply:
        """What this stage is doing and what it holds now; asks nothing of the MLX thread."""
        return StatusReply(
            clock=time.monotonic_ns(),
            step=self.last_step,
            busy_s=self.busy_s,
            slots=self.engine.num_slots,
            cache_bytes=self.engine.cache_bytes,
            weight_bytes=self.engine.weight_bytes,
            peak_memory_bytes=mx.get_peak_memory(),
            sent_bytes=self._sent_bytes,
        )

    async def wait_idle(self) -> None:
        """Return once no slot is open."""
        await self._idle.wait()

    async def stop(self) -> None:
        self._is_stopping = True
        self._idle.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await self._thread.run(partial(self._run_waiting, loop))

    def _run_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the MLX thread: all frames that wait, one after another."""
        step = self._begin_next()
        while step is not None:
            following = self._begin_next() if self.engine.runs_ahead else None
            output = self.engine.finish(step)
            self._busy_since = None if following is None else time.monotonic()
            loop.call_soon_threadsafe(self._outputs.put_nowait, output)
            step = following or self._begin_next()

    def _begin_next(self) -> Step | None:
        if self._is_stopping:
            return None
        busy_since = self._busy_since
        self._busy_since = busy_since or time.monotonic()  # before the frame is gone from the queue: see wait_idle
        try:
            frame, received = self._frames.get_nowait()
        except Empty:
            self._busy_since = busy_since
            return None
        return self.engine.begin(frame, received)

    async def _pass_on(self) -> None:
        while True:
            output = await self._outputs.get()
            self.last_step = output.step
            if not self.engine.num_slots and self._frames.empty() and self._busy_since is None:
                self._idle.set()
            output.timings[-1].sent = time.monotonic_ns()
            self._sent_bytes += output.ByteSize()
            if isinstance(output, Result):
                self.deliver(output)
            else:
                assert self._send is not None
                await self._send(output)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not self._is_stopping:
            error = None if task.cancelled() else task.exception()
            self._outcomes.put_nowait(error or StageLost("a part of the stage ended by itself"))
