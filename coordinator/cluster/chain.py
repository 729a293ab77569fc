"""Chain: all stages of one epoch as one object that takes frames and returns results. I/O; no decisions.

Frames and results live on the MLX thread's loop, to which the main loop passes reports of prompts on. Workers are
attached, watched and asked on the main loop, which ends the chain when one of them is lost, or an engine is at one step
for too long.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NoReturn, Self

from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.cluster.peer import Peer
from coordinator.cluster.prefixes import ChainPrefixes
from coordinator.cluster.progress import NodeProgress
from coordinator.cluster.step_timeouts import ArrivedResult, Flight, SuspendWatch
from coordinator.planning.costs import ChainCosts
from protos.brigade_pb2 import (
    AttachRequest,
    Frame,
    Grammar,
    LoadProgress,
    Opening,
    Report,
    Result,
    Segments,
    StatusReply,
    Window,
)
from worker.compute.executor import Executor
from worker.compute.header import check_result
from worker.compute.slots import close_slots
from worker.drafters.kinds import prepare_drafting
from worker.errors import (
    BrigadeError,
    ConfigError,
    EngineHung,
    FrameError,
    NodeBusy,
    NodeLeaving,
    NodeSilent,
    StageLost,
)
from worker.memory.history import History
from worker.model.model_spec import ModelSpec
from worker.node.framing import PLAIN
from worker.node.hop import unpack_segments
from worker.node.prefix_store import PrefixStore
from worker.node.stage import Stage, Work
from worker.platform.tasks import background, cancel_all
from worker.platform.text import printable
from worker.platform.threads import MlxThread, run_in_thread

PROBE_S = 1.5  # for a status
_WARM_UP_ROWS = 64
_TURNS = 8  # of the MLX thread's loop, from a result's arrival until the chain has learned from it
_STOP_S = 2.0  # for the step in progress of a stage that is stopped
OWN_STEP_S = 120.0  # beyond the time of a step, until this process is given up
MOST_WAITING_BYTES = 1 << 29  # of prompts' reports, for the end of a step: the caches of a long chunk
_REPORT_BYTES = 1024  # about what a report takes beside its data
_CLOCKS_S = 60.0  # between two measurements of the clock offsets


class Chain:
    """Stage 0 here and the later stages on workers, all of which hold their shards. An async context manager."""

    def __init__(
        self,
        own: OwnNode,
        deployment: Deployment,
        epoch: int = 1,
        *,
        costs: ChainCosts | None = None,
        answer_costs: ChainCosts | None = None,
        is_awaited: bool = False,
        can_spare: Callable[[str], bool] = lambda name: False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say` takes lines for the user.

        Args:
            costs: what frames are expected to cost before any result.
            answer_costs: likewise those that stay on the first node, if that makes answers alone.
            is_awaited: whether requests wait: their replay warms this one up.
            can_spare: whether requests can go on without a worker that is shutting down.
        """
        self.epoch = epoch
        self.deployment = deployment
        self.plan = deployment.plan
        self.peers = deployment.peers
        self.last_step = 0
        self.begins_draining = asyncio.Event()  # of the MLX thread's loop; no new session may begin: see `draining`
        self.retires = asyncio.Event()  # likewise; the engine then writes what sessions have, and calls `leave`
        self.has_token = asyncio.Event()  # set with the first token after the warm-up
        self.clock_offsets: list[int] = [0] * self.num_stages  # nanoseconds, by stage
        self._is_awaited = is_awaited
        self._is_warm = False
        self._joining = ""  # the worker that is about to join
        self._moved_at = 0.0  # when a stage joined, or the warm-up had a result; seconds, monotonic
        self._has_lost_drafter = False
        self._can_spare = can_spare
        self._own = own
        self._say = say
        self._suspends = SuspendWatch()
        self._flight = Flight(costs or ChainCosts(self.num_stages), self._suspends, self.peers)
        # Of the frames that stay on the first node, if that makes answers alone: they and prompts overtake each other.
        self._own_flight = self._flight
        if self.answers_alone:
            self._own_flight = Flight(answer_costs or ChainCosts(1), self._suspends)
        self._missing: dict[int, set[str]] = {}  # by step of a prompt: the nodes whose segments have not all come
        self._held_back: dict[int, Result] = {}  # and its result
        self._reports = asyncio.Queue[tuple[Peer, Report, memoryview]]()  # of prompts, for the MLX thread
        self._waiting_bytes = 0  # of these
        self._has_taken = asyncio.Event()
        self._returned_at = 0  # when the last of these came, nanoseconds
        self.prefixes: ChainPrefixes | None = None  # on the disks of all nodes; None if none are kept there
        self._retired: tuple[BrigadeError, float | None] | None = None  # why, and since when it was still then
        self._stack = AsyncExitStack()
        self.stage: Stage | None = None
        self._main = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def open(self, progress: NodeProgress = lambda node, report: None, most_still_s: float | None = None) -> None:
        """Join the stages last to first, and run some rows through them.

        Raises:
            EngineHung: no stage joined and no result came for `most_still_s`, because of the node that the error names,
                or of this process.
            NodeSilent: likewise, and the node that the error names does not answer.
            StageLost: likewise, and no node is to blame.
            BrigadeError: what the first node that cannot take part says.
        """
        self._moved_at = time.monotonic()
        opening = asyncio.create_task(self._open(progress))
        left_s = most_still_s
        try:
            while not (await asyncio.wait([opening], timeout=left_s))[0]:
                assert most_still_s is not None
                if (left_s := self._moved_at + most_still_s - time.monotonic()) <= 0:
                    await self._check_still(most_still_s)
            opening.result()
        finally:
            await cancel_all(opening)
            del opening  # the traceback of its error holds this frame
        self._is_warm = True

    async def _open(self, progress: NodeProgress) -> None:
        for stage, peer in reversed(list(enumerate(self.peers, 1))):
            self._joining = peer.name
            self._stack.callback(peer.detach)
            await peer.attach(self._attach_request(stage))
            self.clock_offsets[stage] = await peer.clock_offset()
            self._moved_at = time.monotonic()
        self._joining = ""
        limit = self.deployment.prefix_bytes
        store = PrefixStore(*self.plan.answer_parts[0], limit) if limit else None
        await self._start(store)
        if store:
            await self._list_prefixes(store)
        await self.thread.call(self._warm_up(progress))

    async def _check_still(self, still_s: float) -> None:
        """Raise the cause for which opening has stood still for so long, unless it moves meanwhile."""
        if self.stage is None:
            cause = "did not join" if self._joining else "this process's engine is at a long step and did not join"
            raise EngineHung(f"{cause} the chain within {still_s:.1f} s", node=self._joining)
        await self._diagnose(self._flight, still_s, allowed_s=still_s / 2)
        if time.monotonic() - self._moved_at >= still_s:
            raise StageLost(f"the warm-up of the chain had no result for {still_s:.1f} s")

    @property
    def answers_alone(self) -> bool:
        """Whether the first node makes answers alone, and the others compute prompts only."""
        return self.plan.prompt_end is not None

    @property
    def answer_costs(self) -> ChainCosts:
        """The times of the frames that make answers, learned from each result."""
        return self._own_flight.costs

    @property
    def costs(self) -> ChainCosts:
        """The times of its frames, learned from each result; of prompts only if it `answers_alone`."""
        return self._flight.costs

    @costs.setter
    def costs(self, costs: ChainCosts) -> None:
        self._flight.costs = costs

    @property
    def spec(self) -> ModelSpec:
        return self.deployment.spec

    @property
    def most_drafts(self) -> int:
        """The most drafts after one window; 0 without a drafter, and once it has failed."""
        return 0 if self._has_lost_drafter else self.spec.most_drafts

    @property
    def thread(self) -> MlxThread:
        """The MLX thread of this process, which every chain uses."""
        return self._own.thread

    @property
    def still_since(self) -> float | None:
        """Since when the frames in flight have brought no result, seconds, monotonic; None without any.

        Once the chain retires, this stays as it was then.
        """
        if self._retired:
            return self._retired[1]
        still = [each for flight in self._flights if (each := flight.still_since) is not None]
        return min(still, default=None)

    @property
    def idle_s(self) -> float:
        """For how long nothing has been in flight, seconds."""
        is_moving = self.prefixes and self.prefixes.num_moving
        return 0.0 if is_moving else min(flight.idle_s for flight in self._flights)

    @property
    def _flights(self) -> list[Flight]:
        return [self._flight, *([self._own_flight] if self.answers_alone else [])]

    def _flight_of(self, *, stays: bool) -> Flight:
        return self._own_flight if stays else self._flight

    @property
    def num_stages(self) -> int:
        return 1 + len(self.peers)

    @property
    def draining(self) -> NodeBusy | None:
        """Why no new session may begin, if a worker that is needed is shutting down."""
        names = (peer.name for peer in self.peers if peer.is_draining and not self._can_spare(peer.name))
        return next((NodeBusy("is shutting down and takes no new request", node=name) for name in names), None)

    def end(self, error: BaseException) -> None:
        """Make `receive` raise this error from now on, unless it raises another one."""
        assert self.stage is not None
        self.thread.post(partial(self.stage.fail, error))

    def retire(self, error: BrigadeError) -> None:
        """End with this error, but write first to disk what sessions need to go on elsewhere. Call it on the main loop.

        Where the first node makes answers alone, it goes on with what it has.
        """
        if self.prefixes is None or self.answers_alone:
            self.end(error)
        elif self._retired is None:
            self._retired = error, self.still_since
            self.thread.post(self.retires.set)

    async def leave(self, names: Collection[bytes]) -> None:
        """End, but have this node keep the pieces of these names first. Call it on the main loop, once it retires."""
        assert self.prefixes is not None and self._retired is not None
        try:
            await self.prefixes.keep_of_leaving(names)
        finally:
            self.end(self._retired[0])

    # On the MLX thread's loop

    @property
    def held_slots(self) -> dict[int, History]:
        """The tokens of the slots that stage 0 holds, by number: before any frame, those of the chain before."""
        return {number: slot.history for number, slot in self._own.slots.items()}

    def keep_slots(self, numbers: set[int]) -> None:
        """Free the slots of the chain before but these."""
        close_slots({number: self._own.slots.pop(number) for number in self._own.slots.keys() - numbers})

    def send(self, frame: Frame) -> None:
        """Hand a frame to stage 0."""
        assert self.stage is not None
        self.last_step = frame.step
        for flight in self._flights:
            flight.open(frame)
        self._flight_of(stays=frame.stays).send(frame)
        if self.answers_alone and not frame.stays:
            self._missing[frame.step] = {peer.name for peer in self.peers}
        self.stage.submit(frame)

    async def receive(self) -> ArrivedResult:
        """Return the next result; waits as long as nothing is in flight.

        Raises:
            StageLost: a node closed its connection, or was silent for longer than its work can take.
            BrigadeError: what a stage failed with.
        """
        assert self.stage is not None
        try:
            found = await self.stage.next_result()
            assert isinstance(found, Result)
            return self._arrived(found)
        except StageLost as error:
            raise self._suspends.blame() or error from error.__cause__

    def learn(self, arrival: ArrivedResult) -> None:
        """Learn the costs of frames from this one. Call it for each result, once the next frame is on its way."""
        self._flight_of(stays=len(arrival.result.timings) == 1).learn(arrival)

    # On the main loop

    @property
    def own_status(self) -> StatusReply | None:
        """The memory and work of stage 0; None before it was opened."""
        return self.stage.status() if self.stage else None

    async def statuses(self) -> list[StatusReply]:
        """Return the memory and work of every stage, stage 0 first; zeros for a worker that does not answer."""
        assert self.stage is not None
        replies = await _statuses(self.peers)
        theirs = [reply if isinstance(reply, StatusReply) else StatusReply() for reply in replies]
        return [self.stage.status(), *theirs]

    async def _list_prefixes(self, own: PrefixStore) -> None:
        """List the prefixes on disks; go on without if this node cannot name them, or another does not list them."""
        try:
            key = await self._own.naming_key(self.deployment)
        except ConfigError as error:
            self._say(f"{error}; requests go on without")
            return
        self.prefixes = ChainPrefixes(key, own, self.peers, self.plan.answer_parts)
        try:
            await self.prefixes.learn()
        except (TimeoutError, BrigadeError) as error:
            self._say(f"no prefixes are read from disks: {error or 'a worker does not list them'}")

    async def digests(self) -> dict[str, str]:
        """Return a digest per tensor that stage 0 holds."""
        assert self._own.shard is not None
        return await self.thread.run(self._own.shard.digests)

    async def compile(self, grammar: Grammar) -> None:
        """Have the last stage prepare a grammar while steps go on. Raises BrigadeError if it cannot."""
        if self.peers and not self.answers_alone:
            await self.peers[-1].compile(grammar)
        else:
            assert self._own.shard is not None
            await run_in_thread(partial(self._own.shard.grammars.guide, grammar))

    def _arrived(self, result: Result) -> ArrivedResult:
        """Check and note a result. Raises FrameError if it does not answer the oldest frame."""
        flight = self._flight_of(stays=len(result.timings) == 1)
        num_stages = 1 + len(flight.peers)
        found = result.epoch, [timing.stage for timing in result.timings[: num_stages + 1]]
        expected = self.epoch, list(range(num_stages))
        node = flight.peers[-1].name if flight.peers else ""
        if result.step != flight.oldest_step or found != expected:
            raise FrameError(
                f"expected a result of a step in flight, the oldest, (epoch, stages passed) {expected}, "
                f"got {found} of step {result.step}",
                node=node,
            )
        sent = flight.take(result.step)
        if self.answers_alone and flight.peers and sent.num_rows:
            self._observe_return(result, sent.num_rows)
        check_result(result, sent.asked, self.spec, node)
        if result.drafter_failure and not self._has_lost_drafter:
            self._has_lost_drafter = True
            line = f"the drafter failed; the chain goes on without drafts: {printable(result.drafter_failure, 500)}"
            self._main.call_soon_threadsafe(self._say, f"worker {node}: {line}" if node else line)
        if self._is_warm and (result.samples or result.guesses) and not self.has_token.is_set():
            self._main.call_soon_threadsafe(self.has_token.set)
        return ArrivedResult(result, time.monotonic_ns(), sent)

    def _observe_return(self, result: Result, num_rows: int) -> None:
        """Learn for how long segments were on their way here: since the last node was done, or since those before."""
        now, done = time.monotonic_ns(), result.timings[-1].computed - self.clock_offsets[-1]
        self.costs.observe_return(num_rows, max(0, now - max(done, self._returned_at)) / 1e9)
        self._returned_at = now

    async def _watch_frames(self) -> NoReturn:
        """Report that the oldest frame seems to compile. Raises the cause once it is overdue."""
        while True:
            await asyncio.sleep(min(flight.left_s for flight in self._flights))
            for flight in self._flights:
                if (overdue := flight.overdue()) is not None:
                    await self._diagnose(flight, *overdue)
                if flight.begins_to_compile():
                    self._say("compiling: the first step of its kind on this chain, which may take a minute")

    async def _start(self, prefixes: PrefixStore | None) -> None:
        """Start stage 0 and the hop to the first worker, and watch every part of the chain."""
        own = self._own
        assert own.shard is not None
        drafter = await own.thread.run(partial(prepare_drafting, own.shard, own.part, self.spec.num_features))
        is_whole = self.answers_alone or not self.peers
        if not is_whole:
            await own.thread.run(partial(close_slots, own.slots))
        engine = Executor(
            *(own.shard, 0, self.spec.dtype),
            checks_finite=self.deployment.check_finite,
            prompt_end=self.plan.prompt_end,
            pieces=prefixes,
            slots=own.slots,
            drafter=drafter,
            drafter_bytes=own.part.nbytes if own.part else 0,
            drop_drafter=partial(self._main.call_soon_threadsafe, own.drop_part),
        )
        stage = Stage(engine, self.epoch, self.peers[0].wire if self.peers else PLAIN)
        self._stack.push_async_callback(_stop, stage)
        link = None
        watched: list[Work] = []
        if self.peers:
            link = partial(self.peers[0].link, self.epoch, 0, self.plan.assignments[0].name)
        if self.answers_alone:
            watched.append(partial(self._take_reports, stage))
        elif self.peers:
            watched.append(partial(self.peers[-1].results, self.epoch, lambda report, _: stage.deliver(report.result)))
        await stage.start(self.thread, link, *watched)
        self.stage = stage
        works = [stage.wait_ended(), self._watch_frames(), self._suspends.watch(), self._measure_clocks()]
        works += [peer.watch(partial(self._begin_draining, peer)) for peer in self.peers]
        for work in works:
            await self._stack.enter_async_context(background(work, self._part_ended))
        for peer in self.peers if self.answers_alone else ():
            reports = peer.results(self.epoch, partial(self._pass_on, peer), of_prompts=True)
            await self._stack.enter_async_context(background(reports, self._part_ended))

    async def _pass_on(self, peer: Peer, report: Report, data: memoryview) -> None:
        """Pass a report of a prompt on to the MLX thread, and wait while too much waits for its next step to end."""
        num_bytes = _REPORT_BYTES + len(data)
        self._waiting_bytes += num_bytes
        self.thread.post(partial(self._reports.put_nowait, (peer, report, data)))
        while self._waiting_bytes > MOST_WAITING_BYTES:
            self._has_taken.clear()
            await self._has_taken.wait()

    def _note_taken(self, num_bytes: int) -> None:
        self._waiting_bytes -= num_bytes
        self._has_taken.set()

    async def _take_reports(self, stage: Stage) -> NoReturn:
        """Take what is passed on, on the MLX thread's loop.

        The last node's result of a frame counts once all segments of all nodes are here.
        """
        while True:
            peer, report, data = await self._reports.get()
            self._main.call_soon_threadsafe(self._note_taken, _REPORT_BYTES + len(data))
            found = report.segments if report.HasField("segments") else report.result
            missing = self._missing.get(found.step, set())
            if found.epoch != self.epoch or peer.name not in missing:
                raise FrameError(
                    f"expected reports of a prompt in flight, got one of step {found.step}", node=peer.name
                )
            if isinstance(found, Segments):
                stage.executor.put_segments(found.slot, unpack_segments(found.segments, data))
                continue
            missing.remove(peer.name)
            if peer is self.peers[-1]:
                self._held_back[found.step] = found
            if not missing:
                del self._missing[found.step]
                stage.deliver(self._held_back.pop(found.step))

    def _part_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self.end(error)

    async def _measure_clocks(self) -> NoReturn:
        """Measure the clock offsets again every minute: clocks drift apart by milliseconds an hour."""
        while True:
            await asyncio.sleep(_CLOCKS_S)
            for stage, peer in enumerate(self.peers, 1):
                with contextlib.suppress(BrigadeError):  # `Peer.watch` notices a lost worker
                    self.clock_offsets[stage] = await peer.clock_offset()

    def _begin_draining(self, peer: Peer) -> None:
        if self._can_spare(peer.name):
            self.retire(NodeLeaving("is about to end", node=peer.name))
        else:
            self._say(f"{self.draining}; running requests have ten seconds to end")
            self.thread.post(self.begins_draining.set)

    async def _warm_up(self, progress: NodeProgress) -> None:
        """Send a chunk of rows and a row through all stages, twice each: that compiles, pages in, and measures costs.

        Both sizes are needed to tell what longer chunks cost. Stage 0 also computes a row of an answer if it makes
        answers alone. While requests wait, send a single row, or block: it shows that every stage computes.
        """
        slot = max(self.held_slots, default=-1) + 1
        prefix_hash = History().prefix_hash(0)
        grid = self.spec.canvas.grid if self.spec.canvas else 1
        num_rows = max(grid, min(_WARM_UP_ROWS, self.spec.context) // grid * grid)
        sizes = [grid] if self._is_awaited else [num_rows, num_rows, grid, grid]
        wanted = 0 if self.answers_alone else 1
        windows = [Window(slot=slot, prefix_hash=prefix_hash, tokens=[0] * size, wanted=wanted) for size in sizes]
        frames = [Frame(opened=[Opening(slot=slot)]), *(Frame(windows=[window]) for window in windows)]
        if self.answers_alone:
            answer = Window(slot=slot, prefix_hash=prefix_hash, tokens=[0] * grid, wanted=1)
            frames += [Frame(windows=[answer], stays=True) for _ in range(sizes.count(grid))]
        frames.append(Frame(closed=[slot]))
        for step, frame in enumerate(frames):
            report = LoadProgress(phase="warm-up", done=step, total=len(frames))
            self._main.call_soon_threadsafe(progress, "", report)
            frame.epoch, frame.step = self.epoch, step
            self.send(frame)
            self.learn(await self.receive())
            self._moved_at = time.monotonic()

    async def _diagnose(self, flight: Flight, waited_s: float, allowed_s: float) -> None:
        """Ask every node that these frames pass, since a stage that waits for a result cannot know the cause.

        An engine that has been at its step for less than `allowed_s` is left the rest of that time.

        Raises:
            StageLost: a node does not answer, an engine hangs, or none is at work.
        """
        assert self.stage is not None
        oldest = flight.awaited
        replies = await _statuses(flight.peers)
        if flight.awaited != oldest:  # a result arrived in the meantime
            return
        busy = [("", self.stage.busy_s)]
        for peer, reply in zip(flight.peers, replies, strict=True):
            if isinstance(reply, BaseException):
                found = f"no answer at {peer.address} after {waited_s:.1f} s without a result"
                raise NodeSilent(f"{found} (stopped, hung, or cut off)", node=peer.name)
            busy.append((peer.name, reply.busy_s))
        node, busy_s = max(busy, key=lambda each: each[1])
        if 0.0 < busy_s < allowed_s:
            flight.began(busy_s)
        elif node:
            raise EngineHung(f"its engine has been at one step for {busy_s:.1f} s", node=node)
        else:
            for _ in range(_TURNS if not busy_s else 1):  # a result may be on its way through the loop of this engine
                await self._wait_own_engine()
            if busy_s or flight.awaited != oldest:
                return
            raise StageLost(
                f"no result for {waited_s:.1f} s though every worker answers (last step {self.stage.last_step})"
            )

    async def _wait_own_engine(self) -> None:
        """Return once this process's engine ends its step: nothing else can go on before that; or give it up."""
        try:
            async with asyncio.timeout(OWN_STEP_S):
                await self.thread.run(lambda: None)
        except TimeoutError:
            assert self.stage is not None
            hung = EngineHung(f"this process's engine has been at one step for {self.stage.busy_s:.0f} s")
            self.thread.give_up(hung)
            raise hung from None

    def _attach_request(self, stage: int) -> AttachRequest:
        request = AttachRequest(
            epoch=self.epoch,
            stage=stage,
            num_stages=self.num_stages,
            predecessor_name=self.plan.assignments[stage - 1].name,
            coordinator=self.deployment.coordinator,
            loaded=self.deployment.load_request(stage),
            check_finite=self.deployment.check_finite,
            num_features=self.spec.num_features,
            returns_segments=self.answers_alone,
            returns_rows=self.answers_alone and self.spec.draft_head is not None,
            prefix_bytes=self.deployment.prefix_bytes,
        )
        if stage < len(self.peers):
            successor = self.peers[stage]
            request.successor_name = successor.name
            request.successor, *others = successor.addresses
            request.successor_fallbacks.extend(others)
        if drafter := self.deployment.drafter_request(stage):
            request.drafter.CopyFrom(drafter)
        return request


async def _statuses(peers: Sequence[Peer]) -> list[StatusReply | BaseException]:
    return await asyncio.gather(*(peer.status(PROBE_S) for peer in peers), return_exceptions=True)


async def _stop(stage: Stage) -> None:
    """Stop a stage, and wait until its memory is free, unless it is at a long step."""
    stage.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            await stage.wait_released()
