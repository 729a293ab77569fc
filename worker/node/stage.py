"""A stage's loop: frames in, the executor, frames or results out. The coordinator and workers use the same code.

It lives on the MLX thread's event loop, with the streams that bring its frames and take what it makes of them:
`receive` or `submit` queue frames, `_run_frames` runs one after another, `_send_frames` passes frames on, and
`next_result` returns results. `start`, `forwarded`, `wait_ended` and `stop` are for the main loop, `status` for any
thread.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from protos.brigade_pb2 import Credit, Frame, Result, StatusReply
from worker.compute.ahead import StepOutputs
from worker.compute.executor import Executor
from worker.compute.step import Step
from worker.errors import BrigadeError, ChainReplaced, FrameError, StageLost, again, without_trace
from worker.node.framing import PLAIN, Arrival, FrameAssembler, Wire
from worker.node.hop import Link, pack, pack_segments
from worker.platform.mlx_memory import forget_peak, memory_held, mlx_errors_named
from worker.platform.tasks import cancel_all, shielded, wait_set
from worker.platform.threads import MlxThread

_DEPTH = 64  # frames that may wait here: more than a scheduler ever has in flight, so one more is a peer's error
_MOST_RESULTS = 4096  # unread results: many times what can be in flight
_TURNS = 3  # iterations of the loop in which what is queued goes out, and what has come is read


Work = Callable[[], Coroutine[Any, Any, None]]
Outcome = Result | bytes  # for the coordinator: a result, or a report of segments as a message


class Stage:
    """One shard at its place in the chain."""

    def __init__(self, executor: Executor, epoch: int, wire: Wire = PLAIN) -> None:
        """`wire` is the format of both hops."""
        self.executor = executor
        self.last_step = 0  # completed
        self._epoch = epoch
        self._wire = wire
        self._thread: MlxThread | None = None  # and what it does for this stage, once started
        self._running: asyncio.Future[None] | None = None
        self._is_released = asyncio.Event()  # of the main loop; set while the thread holds nothing of this
        self._is_released.set()
        self.failure: BrigadeError | None = None  # why it has ended; None while it runs
        self._has_ended = asyncio.Event()
        # receiving
        self._newest_step = -1  # of the received frames
        self._frames: asyncio.Queue[tuple[Arrival, int]] = asyncio.Queue()  # each with its time of arrival
        self._has_hop = False
        self.credit: asyncio.Queue[int] = asyncio.Queue()  # to grant; 0 ends the hop
        self._num_uncredited = 0  # frames completed since the last grant
        # running
        self._begun: Step | None = None  # not finished
        self._builds_beside = False  # whether a step was built while the device computed the last one
        self.busy_since: float | None = None
        self._idle = asyncio.Event()  # no slot is open
        self._idle.set()
        # sending
        self._outgoing: asyncio.Queue[list[bytes]] = asyncio.Queue()  # frames for the next stage, as messages
        self._outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue()  # None at the end of the stage
        self._sent_bytes = 0

    # From any thread

    @property
    def busy_s(self) -> float:
        """The age of the executor's present step in seconds; 0 when idle."""
        since = self.busy_since  # read once: the MLX thread sets it
        return 0.0 if since is None else time.monotonic() - since

    def status(self) -> StatusReply:
        """Return this stage's activity and memory. Does not wait for the MLX thread."""
        return status_reply(
            step=self.last_step,
            busy_s=self.busy_s,
            slots=self.executor.num_slots,
            cache_bytes=self.executor.cache_bytes,
            weight_bytes=self.executor.weight_bytes,
            sent_bytes=self._sent_bytes,
        )

    # From the main loop

    async def start(self, thread: MlxThread, connect: Callable[[], Link] | None = None, *watched: Work) -> None:
        """Have the thread run this stage until it fails or is stopped; return once it takes frames.

        Args:
            connect: opens the hop to the next stage, on the MLX thread's loop; None on the last stage.
            watched: run beside it, on that loop; the end or failure of any of them fails the stage.
        Raises:
            BrigadeError: the refusal of the next stage.
        """
        is_open, loop = asyncio.Event(), asyncio.get_running_loop()
        self._thread, self._is_released = thread, asyncio.Event()
        note_open = partial(loop.call_soon_threadsafe, is_open.set)
        note_released = partial(loop.call_soon_threadsafe, self._is_released.set)
        self._running = asyncio.ensure_future(thread.call(self._run(connect, watched, note_open, note_released)))
        if not await wait_set(is_open, self._running):
            await self._running

    async def forwarded(self) -> AsyncGenerator[Outcome, None]:
        """Yield on the main loop what `outcomes` yields on the thread's, which a step blocks. Raises likewise."""
        assert self._thread is not None
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Outcome | None]()

        async def forward() -> NoReturn:
            while True:
                outcome = await self.next_result()
                if arrived.qsize() >= _MOST_RESULTS:
                    raise FrameError(f"expected at most {_MOST_RESULTS} unread results, got one more")
                loop.call_soon_threadsafe(arrived.put_nowait, outcome)

        forwarding: asyncio.Task[NoReturn] = asyncio.create_task(self._thread.call(forward()))
        forwarding.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (outcome := await arrived.get()) is not None:
                yield outcome
            await forwarding
        finally:
            await cancel_all(forwarding)

    async def wait_ended(self) -> NoReturn:
        """Wait until the stage fails, and raise the reason."""
        assert self._running is not None
        await self._running
        raise AssertionError("a stage ends by an error")

    def stop(self) -> "LeftStep":
        """Have the thread free all slots after the step in progress, before any later call; do not wait for it."""
        if self._running is not None and self._thread is not None:
            self._thread.post(self._end)
            self._running.cancel()
            self._running = None  # its error refers back to this stage
        return LeftStep(self.busy_since, self._is_released)

    async def wait_released(self) -> None:
        """Wait until the thread holds nothing of this stage, which was started and then stopped or has failed."""
        await self._is_released.wait()

    # From here on the MLX thread's loop

    async def _run(
        self,
        connect: Callable[[], Link] | None,
        watched: Sequence[Work],
        note_open: Callable[[], object],
        note_released: Callable[[], object],
    ) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(_unless_closed, note_released)
            works = [self._run_frames, *watched]
            if connect:
                link = connect()
                stack.push_async_callback(lambda: shielded(link.close()))  # even if the stage is stopped meanwhile
                await link.wait_open()
                works += [partial(self._send_frames, link), link.wait_lost]
            note_open()
            await self._run_all(works)

    async def _run_all(self, works: Sequence[Work]) -> NoReturn:
        tasks = [asyncio.create_task(work()) for work in works]
        for task in tasks:
            task.add_done_callback(self._part_ended)
        try:
            await self._has_ended.wait()
        finally:
            self._end()
            await cancel_all(*tasks)
        assert self.failure is not None
        raise again(self.failure)

    def _end(self) -> None:
        """Leave the chain and free all slots; the step in progress has ended, since this runs on its thread.

        The first stage may leave its slots to the next chain, if this one ends because of another node.
        """
        self.fail(StageLost("left the chain"))
        self._idle.set()
        self._begun = None
        error = self.failure
        self.executor.close(leaves_slots=isinstance(error, ChainReplaced) or bool(error and error.node))

    def fail(self, error: BaseException) -> None:
        """End the stage with this error, unless it has ended: from now on all calls raise it."""
        if self.failure is None:
            self.failure = without_trace(error)
            self._outcomes.put_nowait(None)
            self.credit.put_nowait(0)
            self._has_ended.set()

    async def wait_idle(self) -> None:
        """Return once no slot is open."""
        await self._idle.wait()

    # Receive

    def submit(self, frame: Frame) -> None:
        """Queue a frame of this process. The stage fails if it is not for this stage, or one too many."""
        try:
            self._check(frame)
            self._receive(Arrival(frame))
        except FrameError as error:
            self.fail(error)

    async def receive(self, parts: AsyncIterator[bytes]) -> AsyncGenerator[Credit, None]:
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
            while frames := await self.credit.get():
                yield Credit(frames=frames)
        finally:
            await cancel_all(reading)
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
        self._frames.put_nowait((arrival, time.monotonic_ns()))

    # Run

    async def _run_frames(self) -> None:
        with mlx_errors_named("at a step"):
            while True:
                frame = None if self._begun else await self._frames.get()
                if frame and self.failure is None:
                    self._begun = self._begin(*frame)
                del frame
                await asyncio.sleep(0)  # what else has come is read
                if self.failure is not None:
                    return
                ahead = self._run_step()
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                if ahead:
                    ahead.evaluate()  # on a CPU this waits for most of the step before it
                # lanes that take turns: the other one's frame is due, and this one's next step is built beside it
                elif self._begun is None and not self._builds_beside and self._frames.empty():
                    self.executor.build_ahead()
                del ahead

    def _run_step(self) -> StepOutputs | None:
        """Finish the begun step and put out what it made; return the next one if it is launched ahead of its frame.

        Nothing of a finished step stays in memory after this: a call that runs next may need it.
        """
        step, self._begun = self._begun, None
        assert step is not None
        if self.executor.runs_ahead and not step.has_drafting and not self._frames.empty():
            self._begun = self._begin(*self._frames.get_nowait())
        if self._begun is None and (ahead := self.executor.launch_ahead(step, is_finished=False)):
            ahead.evaluate()
        self._builds_beside = self.executor.runs_ahead and self.executor.build_ahead()  # while the device computes
        header, array = self.executor.finish(step)
        for slot, segments in step.segments:
            report = pack_segments(step.frame.epoch, step.frame.step, slot, segments)
            self._sent_bytes += len(report)
            self.deliver(report)
        if step.goes_on and self.executor.returns_segments:
            self.deliver(Result(epoch=step.frame.epoch, step=step.frame.step))
        output = header if isinstance(header, Result) else pack(header, array, self._wire)
        self.busy_since = None if self._begun is None else time.monotonic()
        is_last = self._begun is None and self._frames.empty()  # what comes from now on answers this output
        ahead = self.executor.launch_ahead(step, is_finished=True) if is_last else None
        self._put_out(step.frame.step, output)
        return ahead

    def _begin(self, arrival: Arrival, received: int) -> Step:
        self.busy_since = self.busy_since or time.monotonic()
        taken = time.monotonic_ns()
        if arrival.header.opened:
            forget_peak()
        return self.executor.begin(arrival.header, arrival.payload, received, taken)

    def _put_out(self, step: int, output: list[bytes] | Result) -> None:
        """Queue what a step made for the task that sends it."""
        self.last_step = step
        if self.busy_since is None and self._frames.empty() and not self.executor.num_slots:
            self._idle.set()
        if isinstance(output, Result):
            output.timings[-1].sent = time.monotonic_ns()
            self._sent_bytes += output.ByteSize()
            self.deliver(output)
            self._grant()
        else:
            self._outgoing.put_nowait(output)

    # Send

    async def next_result(self) -> Outcome:
        """Return the next outcome. Raises the reason of the stage's end, also in later calls."""
        outcome = await self._outcomes.get()
        if outcome is None:
            self._outcomes.put_nowait(None)  # for the next call
            self._raise_failure()
        assert outcome is not None
        return outcome

    async def outcomes(self) -> AsyncGenerator[Outcome, None]:
        """Yield outcomes as they come. Raises the reason of the stage's end."""
        while True:
            yield await self.next_result()

    def deliver(self, outcome: Outcome) -> None:
        """Add an outcome, made here or received from a worker, which may send too many."""
        if self.failure is None and self._outcomes.qsize() >= _MOST_RESULTS:
            self.fail(FrameError(f"expected at most {_MOST_RESULTS} unread results, got one more"))
        if self.failure is None:
            self._outcomes.put_nowait(outcome)

    async def _send_frames(self, link: Link) -> NoReturn:
        while True:
            parts = await self._outgoing.get()
            self._sent_bytes += sum(map(len, parts))
            await link.send(parts)
            self._grant()

    def _grant(self) -> None:
        """Return credit for completed frames, half of it at a time, since each grant is a message."""
        self._num_uncredited += self._has_hop
        if self._num_uncredited == _DEPTH // 2:
            self._num_uncredited = 0
            self.credit.put_nowait(_DEPTH // 2)

    # The end

    def _part_ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        self.fail(error or StageLost("a task of the stage ended unexpectedly"))

    def _hop_ended(self, reading: "asyncio.Task[None]") -> None:
        """Fail the stage if the sender broke the protocol. The coordinator notices a lost sender by itself."""
        if not reading.cancelled() and (error := reading.exception()):
            self.fail(error)
        self.credit.put_nowait(0)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise again(self.failure)


@dataclass(frozen=True)
class LeftStep:
    """The step of a stage that has left its chain. Until that is released, the MLX thread holds it and its shard."""

    since: float | None
    is_released: asyncio.Event

    @property
    def busy_s(self) -> float:
        """How many seconds it has lasted, 0 once it is over."""
        return 0.0 if self.since is None or self.is_released.is_set() else time.monotonic() - self.since


def status_reply(**own: Any) -> StatusReply:
    """Return a status with these fields, the clock and MLX's memory."""
    memory = memory_held()
    return StatusReply(
        clock=time.monotonic_ns(),
        peak_memory_bytes=memory.peak,
        active_memory_bytes=memory.active,
        cached_memory_bytes=memory.cached,
        **own,
    )


def _unless_closed(note: Callable[[], object]) -> None:
    """Post a note to a loop, unless it has been closed."""
    with suppress(RuntimeError):
        note()
