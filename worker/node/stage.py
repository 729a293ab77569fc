"""A stage's loop: frames in, the MLX thread, frames or results out. The same code in the coordinator and on workers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx

from protos.brigade_pb2 import Credit, Frame, Result, StatusReply
from worker.compute.engine import Engine, Step
from worker.compute.exhaustion import memory_errors_named
from worker.errors import BrigadeError, FrameError, StageLost, without_trace
from worker.node.hop import put, take
from worker.node.parts import PLAIN, Arrival, Joiner, Wire
from worker.process.mlx_memory import forget_peak, memory_held
from worker.process.mlx_thread import MlxThread

_DEPTH = 64  # frames that may wait here: more than a scheduler ever has in flight, so one more is a peer's mistake
_MOST_RESULTS = 4096  # that wait to be read: many times what can be in flight

Send = Callable[[Sequence[bytes]], Awaitable[None]]


@dataclass(frozen=True)
class Outgoing:
    """A frame for the next stage, as messages."""

    step: int
    parts: Sequence[bytes]


class Stage:
    """One shard at its place in the chain. Once it has failed every call of it fails."""

    def __init__(self, engine: Engine, thread: MlxThread, epoch: int, send: Send | None, wire: Wire = PLAIN) -> None:
        """`send` takes a frame's parts to the next stage; the last stage has none. `wire` is that of both hops."""
        self.engine = engine
        self.last_step = 0
        self._sent_bytes = 0
        self._thread = thread
        self._epoch = epoch
        self._send = send
        self._wire = wire
        self._newest_step = -1  # of the frames that came; `last_step` is done
        self._newest_begun = -1  # of those that the engine has begun
        self._frames: SimpleQueue[tuple[Arrival, int]] = SimpleQueue()
        self._is_working = False  # the MLX thread, at frames
        self._outputs: asyncio.Queue[Outgoing] = asyncio.Queue()
        self._outcomes: asyncio.Queue[Result | None] = asyncio.Queue()  # None, once and for all: it has failed
        self._failure: BrigadeError | None = None
        self._has_hop = False
        self._credit: asyncio.Queue[int] = asyncio.Queue()  # to grant; 0 ends the hop
        self._num_done = 0  # frames that credit is due for
        self._idle = asyncio.Event()  # no slot is open
        self._idle.set()
        self._busy_since: float | None = None
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def busy_s(self) -> float:
        """How long the engine has been at its present step; 0 when idle."""
        since = self._busy_since  # read once: the MLX thread sets it
        return 0.0 if since is None else time.monotonic() - since

    def start(self, *watched: Coroutine[Any, Any, None]) -> None:
        """Start working, and run `watched` beside it: whichever ends or fails first fails the stage."""
        passing_on = [self._pass_on(self._send)] if self._send else []
        for work in (*passing_on, *watched):
            task = asyncio.create_task(work)
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def submit(self, frame: Frame) -> None:
        """Hand over a frame that was made here.

        Raises:
            FrameError: it is not for this stage, or one too many. BrigadeError: whatever ended the stage.
        """
        self._raise_failure()
        try:
            self._check(frame)
            self._take_in(Arrival(frame))
        except FrameError as error:
            self.fail(error)
            raise

    async def take_hop(self, parts: AsyncIterator[bytes]) -> AsyncIterator[Credit]:
        """Take in the frames of the stage before this one, and grant it credit for more, until it ends the hop.

        Raises:
            FrameError: it has a hop already, or a frame is refused. BrigadeError: whatever ended the stage.
        """
        self._raise_failure()
        if self._has_hop:
            raise FrameError("expected one hop from the stage before, got another one")
        self._has_hop = True
        joiner = Joiner(self._check, self._wire)
        reading = asyncio.create_task(self._read(parts, joiner))
        reading.add_done_callback(self._hop_ended)
        try:
            yield Credit(frames=_DEPTH)
            while frames := await self._credit.get():
                yield Credit(frames=frames)
        finally:
            reading.cancel()
        self._raise_failure()
        joiner.end()

    def deliver(self, result: Result) -> None:
        """Add a result; those that came from elsewhere are the last worker's, which may send what nobody asked for."""
        if self._failure is None and self._outcomes.qsize() >= _MOST_RESULTS:
            self.fail(FrameError(f"expected at most {_MOST_RESULTS} results that nobody has read, got one more"))
        if self._failure is None:
            self._outcomes.put_nowait(result)

    @property
    def has_outcome(self) -> bool:
        """Whether `next_result` returns or raises at once."""
        return not self._outcomes.empty()

    async def next_result(self) -> Result:
        """The next result, in order. Raises whatever ended the stage, now and ever after."""
        outcome = await self._outcomes.get()
        if outcome is None:
            self._outcomes.put_nowait(None)  # for the next call
            self._raise_failure()
        assert outcome is not None
        return outcome

    def status(self) -> StatusReply:
        """What this stage is doing and what it holds now; asks nothing of the MLX thread."""
        memory = memory_held()
        return StatusReply(
            clock=time.monotonic_ns(),
            step=self.last_step,
            busy_s=self.busy_s,
            slots=self.engine.num_slots,
            cache_bytes=self.engine.cache_bytes,
            weight_bytes=self.engine.weight_bytes,
            peak_memory_bytes=memory.peak,
            active_memory_bytes=memory.active,
            cached_memory_bytes=memory.cached,
            sent_bytes=self._sent_bytes,
        )

    async def wait_idle(self) -> None:
        """Return once no slot is open."""
        await self._idle.wait()

    async def stop(self) -> None:
        self._is_stopping = True
        self._idle.set()
        self._credit.put_nowait(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()  # the error of one that failed leads back here
        self._thread.submit(self.engine.close)  # behind the step in progress, which may take long: not waited for

    def _work(self) -> None:
        """Have the MLX thread take what waits: at once, and not when the event loop gets round to it."""
        if not self._is_working:
            self._is_working = True
            loop = asyncio.get_running_loop()
            self._thread.submit(partial(self._run_waiting, loop)).add_done_callback(self._worked)

    def _worked(self, working: "asyncio.Future[None]") -> None:
        self._is_working = False
        if self._is_stopping:
            if not working.cancelled():
                working.exception()  # nobody wants it any more, and asyncio would log that nobody asked
            return
        self._fail_as(working)
        self._note_idle()  # the last output may have been passed on while the thread looked for one more frame
        if not (self._frames.empty() or self._failure):
            self._work()

    def _run_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the MLX thread: all frames that wait, one after another."""
        with memory_errors_named("at a step"):
            step = self._begin_next()
            while step is not None:
                following = self._begin_next() if self.engine.runs_ahead else None
                if following is None and (ahead := self.engine.launch_ahead(step, is_finished=False)):
                    ahead.evaluate()
                header, array = self.engine.finish(step)
                output = header if isinstance(header, Result) else self._outgoing(header, array)
                self._busy_since = None if following is None else time.monotonic()
                # what comes from now on is an answer to this output
                goes_on = following is None and self._frames.empty() and not self._is_stopping
                ahead = self.engine.launch_ahead(step, is_finished=True) if goes_on else None
                loop.call_soon_threadsafe(self._take_out, output)
                if ahead:
                    ahead.evaluate()  # without Python's lock: so the output is worked on meanwhile, and not before
                elif goes_on and self.engine.is_whole:  # nothing is sent that building could hold up
                    self.engine.build_ahead()
                if self._is_stopping:  # what waits, a load perhaps, must find the memory free that this frame holds
                    return
                self._thread.give_way()  # frames may come without end
                step = following or self._begin_next()

    def _outgoing(self, header: Frame, array: mx.array | None) -> Outgoing:
        return Outgoing(header.step, put(header, array, self._wire))

    def _begin_next(self) -> Step | None:
        if self._is_stopping:
            return None
        busy_since = self._busy_since
        self._busy_since = busy_since or time.monotonic()  # before the frame is gone from the queue: see wait_idle
        try:
            arrival, received = self._frames.get_nowait()
        except Empty:
            self._busy_since = busy_since
            return None
        taken = time.monotonic_ns()
        self._newest_begun = arrival.header.step
        if arrival.header.opened:
            forget_peak()
        return self.engine.begin(arrival.header, self._input(arrival), received, taken)

    def _input(self, arrival: Arrival) -> mx.array | None:
        if placeholder := self.engine.awaited(arrival.header):
            placeholder.fill(arrival.payload)
            return placeholder.array
        return take(arrival.header, arrival.payload)

    def _build_ahead(self, after: int) -> None:
        """On the MLX thread: nothing, if another step has begun meanwhile."""
        if self._frames.empty() and self._newest_begun == after and not self._is_stopping:
            with memory_errors_named("at a step"):
                self.engine.build_ahead()

    def _fail_as(self, call: "asyncio.Future[None]") -> None:
        if not call.cancelled() and (error := call.exception()):
            self.fail(error)

    def _note_idle(self) -> None:
        # in the order in which a frame moves: it is in the queue, then begun, then its slot is there
        if self._frames.empty() and self._busy_since is None and not self.engine.num_slots:
            self._idle.set()

    def _take_out(self, output: Outgoing | Result) -> None:
        if self._is_stopping:
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

    async def _pass_on(self, send: Send) -> None:
        while True:
            output = await self._outputs.get()
            self._sent_bytes += sum(map(len, output.parts))
            await send(output.parts)
            self._grant()
            self.build_ahead(output.step)

    def build_ahead(self, step: int) -> None:
        """Use the time until the next frame, now that what this step made is on its way.

        Not before: Python's lock would hold up what is sent. So whoever sends results says when.
        """
        if self._frames.empty() and self._outputs.empty():
            self._thread.submit(partial(self._build_ahead, step)).add_done_callback(self._fail_as)

    def _grant(self) -> None:
        """Let the sender replace the frames that are done, half of its credit at a time: each grant is a message."""
        self._num_done += self._has_hop
        if self._num_done == _DEPTH // 2:
            self._num_done = 0
            self._credit.put_nowait(_DEPTH // 2)

    async def _read(self, parts: AsyncIterator[bytes], joiner: Joiner) -> None:
        async for part in parts:
            if arrival := joiner.add(part):
                self._take_in(arrival)

    def _check(self, frame: Frame) -> None:
        if frame.epoch != self._epoch:
            raise FrameError(f"expected frames of epoch {self._epoch}, got epoch {frame.epoch} (step {frame.step})")
        if frame.step <= self._newest_step:
            raise FrameError(f"expected a step after {self._newest_step}, got step {frame.step}")
        self.engine.check(frame)
        self._newest_step = frame.step

    def _take_in(self, arrival: Arrival) -> None:
        frame = arrival.header
        if frame.opened:
            self._idle.clear()
        if self._frames.qsize() >= _DEPTH:
            raise FrameError(f"expected at most {_DEPTH} frames in flight, got one more (step {frame.step})")
        self._frames.put((arrival, time.monotonic_ns()))
        self._work()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not self._is_stopping:
            error = None if task.cancelled() else task.exception()
            self.fail(error or StageLost("a part of the stage ended by itself"))

    def _hop_ended(self, reading: "asyncio.Task[None]") -> None:
        """A sender that sends what it must not ends the stage; of one that has gone the coordinator knows otherwise."""
        if not reading.cancelled() and (error := reading.exception()):
            self.fail(error)
        self._credit.put_nowait(0)

    def fail(self, error: BaseException) -> None:
        """End the stage with this error, unless it has failed already."""
        if self._failure is None:
            self._failure = without_trace(error)
            self._outcomes.put_nowait(None)
            self._credit.put_nowait(0)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.again()
