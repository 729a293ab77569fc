"""Chain: all stages as one thing that takes frames and gives results, for one epoch. I/O; no decisions."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

from coordinator.cluster.deployment import Deployment, OwnNode, Progress
from coordinator.cluster.peer import Peer
from coordinator.cluster.stillness import Stillness
from coordinator.planning.costs import ChainCosts
from coordinator.planning.patience import Patience, StepKind
from protos.brigade_pb2 import AttachRequest, Frame, Grammar, LoadProgress, Result, Session, StatusReply, Window
from worker.compute.engine import Engine
from worker.compute.header import asked_of, check_result, num_rows
from worker.errors import BrigadeError, EngineHung, FrameError, NodeBusy, NodeSilent, StageLost
from worker.memory.history import History
from worker.model.modelspec import ModelSpec
from worker.node.parts import PLAIN
from worker.node.stage import Stage
from worker.process.call_thread import run_aside
from worker.process.mlx_thread import MlxThread

_PROBE_S = 1.5
_ASK_AGAIN_S = 5.0
_COMPILES_S = 2.0  # after which the first step of a kind is said to compile
_WARM_UP_ROWS = 64


@dataclass
class Sent:
    """A frame in flight."""

    num_rows: int
    asked: dict[int, tuple[int, ...]]  # by slot, as `asked_of` counts
    kind: StepKind
    at: float  # seconds, monotonic
    is_alone: bool  # so far
    alternatives: dict[int, int]  # by slot: the most that each sample may have
    is_said_to_compile: bool = False


@dataclass(frozen=True)
class Arrival:
    """A result, and when it came, nanoseconds on the coordinator's monotonic clock."""

    result: Result
    at: int
    num_rows: int  # of the frame
    took_s: float  # since the frame was sent


class Chain:
    """Stage 0 here, the later stages on the workers, all loaded. Use as an async context manager."""

    def __init__(
        self,
        own: OwnNode,
        deployment: Deployment,
        epoch: int = 1,
        *,
        costs: ChainCosts | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say` takes lines for the user.

        `costs` are known from a chain before this one: requests wait, so their replay warms this one up.
        """
        self.epoch = epoch
        self.deployment = deployment
        self.plan = deployment.plan
        self.peers = deployment.peers
        self.costs = costs or ChainCosts(self.num_stages)
        self.last_step = 0
        self.on_draining: Callable[[], None] | None = None  # called when a worker says that it is about to end
        self.can_spare: Callable[[str], bool] = lambda name: False  # whether a worker that is about to end may go
        self.on_token: Callable[[], None] | None = None  # called once, with the first token after the warm-up
        self.clock_offsets: list[int] = [0] * self.num_stages  # nanoseconds, by stage
        self._is_awaited = costs is not None
        self._own = own
        self._say = say
        self._patience = Patience()
        self._stillness = Stillness()
        self._stack = AsyncExitStack()
        self._stage: Stage | None = None
        self._sent: dict[int, Sent] = {}  # frames in flight, oldest first
        self._last_result = 0.0  # seconds, monotonic
        self._logprobs: dict[int, int] = {}  # of the session in each slot, as its sampling says

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def open(self, progress: Progress = lambda node, report: None) -> None:
        """Join the stages last to first, and run some rows through them.

        Raises:
            BrigadeError: what the first node that cannot take part says.
        """
        for stage in range(len(self.peers), 0, -1):
            peer = self.peers[stage - 1]
            self._stack.callback(peer.detach)
            await peer.attach(self._attach_request(stage))
            self.clock_offsets[stage] = await peer.clock_offset()
        await self._start()
        on_token, self.on_token = self.on_token, None
        await self._warm_up(progress)
        self.on_token = on_token

    @property
    def spec(self) -> ModelSpec:
        return self.deployment.spec

    @property
    def thread(self) -> MlxThread:
        """This process's, which every chain uses."""
        return self._own.thread

    @property
    def still_since(self) -> float | None:
        """Since when what is in flight has brought no result, seconds, monotonic; None if nothing is."""
        return max(self._last_result, self._oldest().at) if self._sent else None

    @property
    def num_stages(self) -> int:
        return 1 + len(self.peers)

    @property
    def draining(self) -> NodeBusy | None:
        """Why no new session may begin, if a worker is about to end."""
        names = (peer.name for peer in self.peers if peer.is_draining and not self.can_spare(peer.name))
        return next((NodeBusy("is shutting down and takes no new request", node=name) for name in names), None)

    def send(self, frame: Frame) -> None:
        """Hand a frame to stage 0."""
        assert self._stage is not None
        for sent in self._sent.values():
            sent.is_alone = False
        self.last_step = frame.step
        kind = self._patience.kind_of(frame)
        rows, asked = sum(map(num_rows, frame.windows)), {w.slot: asked_of(w) for w in frame.windows}
        self._logprobs |= {session.slot: session.sampling.logprobs for session in frame.opened}
        alternatives = {slot: logprobs - 1 for slot in asked if (logprobs := self._logprobs.get(slot))}
        self._sent[frame.step] = Sent(rows, asked, kind, time.monotonic(), not self._sent, alternatives)
        self._stage.submit(frame)

    async def receive(self) -> Arrival:
        """The next result; waits as long as there is nothing in flight.

        Raises:
            StageLost: a node closed, or was silent for longer than its work can take; the message names it.
            BrigadeError: what a stage failed with.
        """
        assert self._stage is not None
        while True:
            try:
                async with asyncio.timeout(self._left_s()):
                    return self._arrived(await self._stage.next_result())
            except TimeoutError:
                await self._look_after_oldest()
            except StageLost as error:
                raise self._stillness.blame() or error from error.__cause__

    @property
    def own_status(self) -> StatusReply | None:
        """What stage 0 holds and has taken, if it has been there."""
        return self._stage.status() if self._stage else None

    async def statuses(self) -> list[StatusReply]:
        """What every stage holds and has taken, stage 0 first; zeros for a worker that does not say."""
        assert self._stage is not None
        replies = await asyncio.gather(*(peer.status(_PROBE_S) for peer in self.peers), return_exceptions=True)
        theirs = [reply if isinstance(reply, StatusReply) else StatusReply() for reply in replies]
        return [self._stage.status(), *theirs]

    async def digests(self) -> dict[str, str]:
        """A digest per tensor that stage 0 holds."""
        shard = self._own.shard
        assert shard is not None
        return await self.thread.run(lambda: dict(shard.digests()))

    async def compile(self, grammar: Grammar) -> None:
        """Have the last stage get ready for a grammar, while steps go on. Raises BrigadeError if it cannot."""
        if self.peers:
            await self.peers[-1].compile(grammar)
        else:
            assert self._own.shard is not None
            await run_aside(partial(self._own.shard.grammars.guide, grammar))

    def _arrived(self, result: Result) -> Arrival:
        """Take a result in. Raises FrameError for one that answers nothing that was asked."""
        found = result.epoch, [timing.stage for timing in result.timings[: self.num_stages + 1]]
        expected = self.epoch, list(range(self.num_stages))
        node = self.peers[-1].name if self.peers else ""
        if result.step != next(iter(self._sent), None) or found != expected:
            raise FrameError(
                f"expected a result of a step in flight, the oldest, (epoch, stages passed) {expected}, "
                f"got {found} of step {result.step}",
                node=node,
            )
        sent = self._sent.pop(result.step)
        check_result(result, sent.asked, self.spec.vocab_size, node, sent.alternatives)
        if (result.samples or result.guesses) and self.on_token is not None:
            self.on_token()
            self.on_token = None
        self._patience.done(sent.kind)
        self._last_result = time.monotonic()
        arrival = Arrival(result, time.monotonic_ns(), sent.num_rows, self._last_result - sent.at)
        if sent.num_rows:
            stages_s = [(timing.sampled - timing.started) / 1e9 for timing in result.timings]
            self.costs.observe(sent.num_rows, stages_s, arrival.took_s, was_alone=sent.is_alone)
        return arrival

    def _left_s(self) -> float:
        """Seconds until the oldest frame is to be looked after; with nothing in flight, until it is asked again."""
        if not self._sent:
            return _ASK_AGAIN_S
        oldest = self._oldest()
        is_new = not self._patience.is_known(oldest.kind) and not oldest.is_said_to_compile
        return max(0.0, (_COMPILES_S if is_new else self._allowed_s(oldest)) - self._silence_s(oldest))

    async def _look_after_oldest(self) -> None:
        """Say that it compiles, where it may. Raises what is wrong once it has taken longer than it can take."""
        if not self._sent:
            return
        oldest = self._oldest()
        silence_s = self._silence_s(oldest)
        if silence_s >= self._allowed_s(oldest):
            raise await self._diagnose(silence_s)
        if silence_s >= _COMPILES_S and not oldest.is_said_to_compile and not self._patience.is_known(oldest.kind):
            oldest.is_said_to_compile = True
            self._say("compiling: the first step of its kind on this chain, which may take a minute")

    def _oldest(self) -> Sent:
        return next(iter(self._sent.values()))

    def _allowed_s(self, sent: Sent) -> float:
        return self._patience.allowed_s(sent.kind, self.costs.passage_s(sent.num_rows))

    def _silence_s(self, sent: Sent) -> float:
        """How long this frame, the oldest, has brought no result while this process was there to see it."""
        return time.monotonic() - max(self._last_result, sent.at, self._stillness.woke_at)

    async def _start(self) -> None:
        assert self._own.shard is not None
        send, wire, watched = None, PLAIN, []
        if self.peers:
            link = self.peers[0].link(self.epoch, 0, self.plan.assignments[0].name)
            self._stack.push_async_callback(link.close)
            await link.wait_open()
            watched.append(link.wait_lost())
            send, wire = link.send, link.wire
        watched += [*map(self._pump, self.peers), self._stillness.watch()]
        engine = Engine(self._own.shard, 0, self.spec.dtype, checks_finite=self.deployment.check_finite)
        self._stage = Stage(engine, self._own.thread, self.epoch, send, wire)
        self._stack.push_async_callback(self._stage.stop)
        self._stage.start(*watched)

    async def _pump(self, peer: Peer) -> None:
        assert self._stage is not None
        async for result in peer.results(partial(self._begin_draining, peer)):
            self._stage.deliver(result)

    def _begin_draining(self, peer: Peer) -> None:
        if self.can_spare(peer.name):
            assert self._stage is not None
            self._stage.fail(StageLost("is about to end", node=peer.name))
            return
        self._say(f"{self.draining}; what runs may end, for at most ten seconds")
        if self.on_draining is not None:
            self.on_draining()

    async def _warm_up(self, progress: Progress) -> None:
        """One row and a chunk of rows through all stages, twice: compiles, pages in, and tells what rows cost.

        While requests wait, a single row only: that every stage computes.
        """
        prefix_hash = History().prefix_hash(0)
        chunk = Window(slot=0, prefix_hash=prefix_hash, tokens=[0] * min(_WARM_UP_ROWS, self.spec.context), wanted=1)
        row = Window(slot=0, prefix_hash=prefix_hash, tokens=[0], wanted=1)
        windows = (row,) if self._is_awaited else (chunk, chunk, row, row)
        frames = [Frame(opened=[Session(slot=0)])]
        frames += [Frame(windows=[window]) for window in windows]
        frames.append(Frame(closed=[0]))
        for step, frame in enumerate(frames):
            progress("", LoadProgress(phase="warm-up", done=step, total=len(frames)))
            frame.epoch, frame.step = self.epoch, step
            self.send(frame)
            await self.receive()

    async def _diagnose(self, waited_s: float) -> BrigadeError:
        """Who is silent: asked of every node, since whoever waits for a result cannot know."""
        assert self._stage is not None
        replies = await asyncio.gather(*(peer.status(_PROBE_S) for peer in self.peers), return_exceptions=True)
        for peer, reply in zip(self.peers, replies, strict=True):
            if isinstance(reply, BaseException):
                said = (
                    f"no answer at {peer.address} after {waited_s:.1f} s without a result (stopped, hung, or cut off)"
                )
                return NodeSilent(said, node=peer.name)
            if reply.busy_s > waited_s / 2:
                return EngineHung(f"its engine has been at one step for {reply.busy_s:.1f} s", node=peer.name)
        return StageLost(
            f"no result for {waited_s:.1f} s though every worker answers "
            f"(coordinator busy for {self._stage.busy_s:.1f} s; last step {self._stage.last_step})"
        )

    def _attach_request(self, stage: int) -> AttachRequest:
        request = AttachRequest(
            epoch=self.epoch,
            stage=stage,
            num_stages=self.num_stages,
            predecessor_name=self.plan.assignments[stage - 1].name,
            coordinator=self.deployment.coordinator,
            loaded=self.deployment.load_request(stage),
            check_finite=self.deployment.check_finite,
        )
        if stage < len(self.peers):
            successor = self.peers[stage]
            request.successor_name = successor.name
            request.successor, *others = successor.addresses
            request.successor_fallbacks.extend(others)
        return request
