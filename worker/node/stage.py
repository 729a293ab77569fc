"""A stage's loop: frames in, the MLX thread, frames or results out. The coordinator and workers use the same code.

Receive: `take_hop` or `submit` queues frames, on the event loop. Run: the MLX thread takes them one after another
(`_run_frames`). Send: `_send_out` passes the outputs to the next stage or to `next_result`, on the event loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from protos.brigade_pb2 import Credit, Frame, Result, StatusReply
from worker.compute.executor import Executor, Step
from worker.errors import BrigadeError, FrameError, StageLost, without_trace
from worker.node.framing import PLAIN, Arrival, FrameAssembler, Wire
from worker.node.hop import pack, unpack
from worker.platform.mlx_memory import forget_peak, memory_errors_named, memory_held
from worker.platform.threads import MlxThread

_DEPTH = 64  # frames that may wait here: more than a scheduler ever has in flight, so one more is a peer's error
_MOST_RESULTS = 4096  # unread results: many times what can be in flight

Send = Callable[[Sequence[bytes]], Awaitable[None]]


class StageState(Enum):
    """RUNNING -> FAILED -> STOPPED, or RUNNING -> STOPPED."""

    RUNNING = auto()
    FAILED = auto()  # all calls raise the failure
    STOPPED = auto()  # no more frames run; the next job of the MLX thread finds their memory free


@dataclass(frozen=True)
class Outgoing:
    """A frame for the next stage, as messages."""

    step: int
    parts: Sequence[bytes]


class Stage:
    """One shard at its place in the chain."""

    def __init__(
        self, executor: Executor, thread: MlxThread, epoch: int, send: Send | None, wire: Wire = PLAIN
    ) -> None:
        """`send` sends a frame's parts to the next stage; None on the last stage. `wire` is the format of both hops."""
        self.executor = executor
        self.last_step = 0  # completed
        self._thread = thread
        self._epoch = epoch
        self._send = send
        self._wire = wire
        self._state = StageState.RUNNING
        self._failure: BrigadeError | None = None  # once it has failed
        self._tasks: list[asyncio.Task[None]] = []
        # receiving
        self._newest_step = -1  # of the received frames
        self._frames: SimpleQueue[tuple[Arrival, int]] = SimpleQueue()  # each with its time of arrival
        self._has_hop = False
        self._credit: asyncio.Queue[int] = asyncio.Queue()  # to grant; 0 ends the hop
        self._num_uncredited = 0  # frames completed since the last grant
        # running
        self._is_scheduled = False  # `_run_frames`, on the MLX thread
        self._newest_begun = -1  # step
        self._busy_since: float | None = None  # set by the MLX thread
        self._idle = asyncio.Event()  # no slot is open
        self._idle.set()
        # sending
        self._outputs: asyncio.Queue[Outgoing] = asyncio.Queue()
        self._outcomes: asyncio.Queue[Result | None] = asyncio.Queue()  # None at the end: the stage has failed
        self._sent_bytes = 0

    @property
    def busy_s(self) -> float:
        """The age of the executor's present step in seconds; 0 when idle."""
        since = self._busy_since  # read once: the MLX thread sets it
        return 0.0 if since is None else time.monotonic() - since

    @property
    def has_outcome(self) -> bool:
        """Whether `next_result` returns or raises at once."""
        return not self._outcomes.empty()

    def start(self, *watched: Coroutine[Any, Any, None]) -> None:
        """Start sending, and run `watched` beside it. The end or failure of any of them fails the stage."""
        sending = [self._send_outputs(self._send)] if self._send else []
        for work in (*sending, *watched):
            task = asyncio.create_task(work)
            task.add_done_callback(self._part_ended)
            self._tasks.append(task)

    def fail(self, error: BaseException) -> None:
        """End the stage with this error, unless it has already ended."""
        if self._state is StageState.RUNNING:
            self._state, self._failure = StageState.FAILED, without_trace(error)
            self._outcomes.put_nowait(None)
            self._credit.put_nowait(0)

    async def stop(self) -> None:
        self._state = StageState.STOPPED
        self._idle.set()
        self._credit.put_nowait(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # the error of a failed task refers back to this stage
        self._thread.submit(self.executor.close)  # after the step in progress; not awaited, since that may take long

    async def wait_idle(self) -> None:
        """Return once no slot is open."""
        await self._idle.wait()

    def status(self) -> StatusReply:
        """Return this stage's activity and memory. Does not wait for the MLX thread."""
        memory = memory_held()
        return StatusReply(
            clock=time.monotonic_ns(),
            step=self.last_step,
            busy_s=self.busy_s,
            slots=self.executor.num_slots,
            cache_bytes=self.executor.cache_bytes,
            weight_bytes=self.executor.weight_bytes,
            peak_memory_bytes=memory.peak,
            active_memory_bytes=memory.active,
            cached_memory_bytes=memory.cached,
            sent_bytes=self._sent_bytes,
        )

    # Receive, on the event loop

    def submit(self, frame: Frame) -> None:
        """Queue a frame of this process.

        Raises:
            FrameError: it is not for this stage, or one too many. BrigadeError: the reason of the stage's end.
        """
        self._raise_failure()
        try:
            self._check(frame)
            self._receive(Arrival(frame))
        except FrameError as error:
            self.fail(error)
            raise

    async def take_hop(self, parts: AsyncIterator[bytes]) -> AsyncGenerator[Credit, None]:
        """Receive the frames of the previous stage and grant it credit for more, until it ends the hop.

        Raises:
            FrameError: there is a hop already, or a frame is refused. BrigadeError: the reason of the stage's end.
        """
        self._raise_failure()
        if self._has_hop:
            raise FrameError("expected one hop from the stage before, got another one")
        self._has_hop = True
        assembler = FrameAssembler(self._check, self._wire)
        reading = asyncio.create_task(self._read(parts, assembler))
        reading.add_done_callback(self._hop_ended)
        try:
            yield Credit(frames=_DEPTH)
            while frames := await self._credit.get():
                yield Credit(frames=frames)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        self._raise_failure()
        assembler.end()

    async def _read(self, parts: AsyncIterator[bytes], assembler: FrameAssembler) -> None:
        async for part in parts:
            if arrival := assembler.add(part):
                self._receive(arrival)

    def _check(self, frame: Frame) -> None:
        if frame.epoch != self._epoch:
            raise FrameError(f"expected frames of epoch {self._epoch}, got epoch {frame.epoch} (step {frame.step})")
        if frame.step <= self._newest_step:
            raise FrameError(f"expected a step after {self._newest_step}, got step {frame.step}")
        self.executor.check(frame)
        self._newest_step = frame.step

    def _receive(self, arrival: Arrival) -> None:
        frame = arrival.header
        if frame.opened:
            self._idle.clear()
        if self._frames.qsize() >= _DEPTH:
            raise FrameError(f"expected at most {_DEPTH} frames in flight, got one more (step {frame.step})")
        self._frames.put((arrival, time.monotonic_ns()))
        self._schedule()

    # Run, on the MLX thread

    def _schedule(self) -> None:
        """Let the MLX thread run the queued frames. Call on the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            loop = asyncio.get_running_loop()
            self._thread.submit(partial(self._run_frames, loop)).add_done_callback(self._frames_ran)

    def _run_frames(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run all queued frames, one after another."""
        with memory_errors_named("at a step"):
            step = self._begin_next()
            while step is not None:
                following = self._begin_next() if self.executor.runs_ahead else None
                if following is None and (ahead := self.executor.launch_ahead(step, is_finished=False)):
                    ahead.evaluate()
                header, array = self.executor.finish(step)
                if isinstance(header, Result):
                    output: Outgoing | Result = header
                else:
                    output = Outgoing(header.step, pack(header, array, self._wire))
                self._busy_since = None if following is None else time.monotonic()
                # frames that arrive from now on are answers to this output
                goes_on = following is None and self._frames.empty() and self._state is not StageState.STOPPED
                ahead = self.executor.launch_ahead(step, is_finished=True) if goes_on else None
                loop.call_soon_threadsafe(self._send_out, output)
                if ahead:
                    ahead.evaluate()  # releases Python's lock, so the output is handled meanwhile
                elif goes_on and self.executor.is_whole:  # no hop that building could delay
                    self.executor.build_ahead()
                if self._state is StageState.STOPPED:  # the next job, perhaps a load, needs the memory of this frame
                    return
                self._thread.give_way()  # frames may keep coming
                step = following or self._begin_next()

    def _begin_next(self) -> Step | None:
        if self._state is StageState.STOPPED:
            return None
        busy_since = self._busy_since
        self._busy_since = busy_since or time.monotonic()  # before the frame leaves the queue: see _note_idle
        try:
            arrival, received = self._frames.get_nowait()
        except Empty:
            self._busy_since = busy_since
            return None
        taken = time.monotonic_ns()
        header = arrival.header
        self._newest_begun = header.step
        if header.opened:
            forget_peak()
        x = unpack(header, arrival.payload, self.executor.awaited(header))
        return self.executor.begin(header, x, received, taken)

    def _frames_ran(self, running: "asyncio.Future[None]") -> None:
        """Note that the MLX thread found no more frames, or failed. Called on the event loop."""
        self._is_scheduled = False
        self._fail_as(running)
        self._note_idle()  # the last output may have been sent before the thread found the queue empty
        if self._state is StageState.RUNNING and not self._frames.empty():
            self._schedule()

    def build_ahead(self, step: int) -> None:
        """Build the next step until its frame comes. Call once the output of `step` is sent.

        Any earlier, Python's lock would delay the sending.
        """
        if self._frames.empty() and self._outputs.empty():
            self._thread.submit(partial(self._build_ahead, step)).add_done_callback(self._fail_as)

    def _build_ahead(self, after: int) -> None:
        """Build the next step, unless another one has begun meanwhile."""
        if self._frames.empty() and self._newest_begun == after and self._state is not StageState.STOPPED:
            with memory_errors_named("at a step"):
                self.executor.build_ahead()

    # Send, on the event loop

    async def next_result(self) -> Result:
        """Return the next result, in order. Raises the reason of the stage's end, also in all later calls."""
        outcome = await self._outcomes.get()
        if outcome is None:
            self._outcomes.put_nowait(None)  # for the next call
            self._raise_failure()
        assert outcome is not None
        return outcome

    def deliver(self, result: Result) -> None:
        """Add a result, made here or received from the last worker, which may send too many."""
        if self._state is StageState.RUNNING and self._outcomes.qsize() >= _MOST_RESULTS:
            self.fail(FrameError(f"expected at most {_MOST_RESULTS} unread results, got one more"))
        if self._state is StageState.RUNNING:
            self._outcomes.put_nowait(result)

    def _send_out(self, output: Outgoing | Result) -> None:
        if self._state is StageState.STOPPED:
            return
        self.last_step = output.step
        self._note_idle()
        if isinstance(output, Outgoing):
            self._outputs.put_nowait(output)
            return
        output.timings[-1].sent = time.monotonic_ns()
        self._sent_bytes += output.ByteSize()
        self.deliver(output)
        self._grant()

    async def _send_outputs(self, send: Send) -> None:
        while True:
            output = await self._outputs.get()
            self._sent_bytes += sum(map(len, output.parts))
            await send(output.parts)
            self._grant()
            self.build_ahead(output.step)

    def _grant(self) -> None:
        """Return credit for completed frames, half of it at a time, since each grant is a message."""
        self._num_uncredited += self._has_hop
        if self._num_uncredited == _DEPTH // 2:
            self._num_uncredited = 0
            self._credit.put_nowait(_DEPTH // 2)

    # The end

    def _note_idle(self) -> None:
        # in the order in which a frame moves: from the queue to a begun step to its slot
        if self._frames.empty() and self._busy_since is None and not self.executor.num_slots:
            self._idle.set()

    def _part_ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        self.fail(error or StageLost("a task of the stage ended unexpectedly"))

    def _hop_ended(self, reading: "asyncio.Task[None]") -> None:
        """Fail the stage if the sender broke the protocol. The coordinator notices a lost sender by itself."""
        self._fail_as(reading)
        self._credit.put_nowait(0)

    def _fail_as(self, call: "asyncio.Future[None]") -> None:
        if not call.cancelled() and (error := call.exception()):
            self.fail(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.again()
