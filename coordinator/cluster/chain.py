"""Chain: all stages as one thing that takes frames and gives results. The I/O of the coordinator; no decisions."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from coordinator.cluster.peer import Peer
from coordinator.cluster.together import together
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Plan
from protos.brigade_pb2 import AttachRequest, Frame, LoadProgress, LoadRequest, Result, Session, StatusReply, Window
from worker.compute.engine import Engine, num_rows
from worker.compute.shard import Shard
from worker.errors import BrigadeError, FrameError, StageLost
from worker.memory.history import History
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec
from worker.node.link import Link
from worker.node.loading import load_shard
from worker.node.stage import Stage
from worker.process.mlx_thread import MlxThread

_PATIENCE_S = 6.0  # silence that a step may take beyond its own compute
_FIRST_STEP_S = 60.0  # the first step may compile kernels and page weights in
_PROBE_S = 1.5
_WARM_UP_ROWS = 64

Progress = Callable[[str, LoadProgress], None]


@dataclass
class Sent:
    """A frame in flight."""

    num_rows: int
    at: float  # seconds, monotonic
    is_alone: bool  # so far


@dataclass(frozen=True)
class Arrival:
    """A result, and when it came, nanoseconds on the coordinator's monotonic clock."""

    result: Result
    at: int
    num_rows: int  # of the frame
    took_s: float  # since the frame was sent


class Chain:
    """Stage 0 here, the later stages on the peers. Use as an async context manager."""

    epoch = 1

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, plan: Plan, peers: Sequence[Peer]) -> None:
        self.plan = plan
        self.peers = peers
        self.costs = ChainCosts(1 + len(peers))
        self.last_step = 0
        self.clock_offsets: list[int] = [0] * (1 + len(peers))  # nanoseconds, by stage
        self._checkpoint = checkpoint
        self._spec = spec
        self._stack = AsyncExitStack()
        self.thread = MlxThread()
        self._stage: Stage | None = None
        self._sent: dict[int, Sent] = {}  # frames in flight, oldest first
        self._last_result = 0.0  # seconds, monotonic
        self._row_s = 0.0  # what one row through the whole chain took, alone

    async def __aenter__(self) -> "Chain":
        self._stack.callback(self.thread.close)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def open(self, progress: Progress) -> None:
        """Load every shard, join the stages last to first, and run one row through them.

        Raises:
            BrigadeError: what the first node that cannot take part says.
        """
        shard = await self._load(progress)
        for stage in range(len(self.peers), 0, -1):
            await self.peers[stage - 1].attach(self._attach_request(stage))
            self.clock_offsets[stage] = await self.peers[stage - 1].clock_offset()
        await self._start(Engine(shard, 0, self._spec.dtype))
        await self._warm_up()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def num_stages(self) -> int:
        return 1 + len(self.peers)

    def send(self, frame: Frame) -> None:
        """Hand a frame to stage 0."""
        assert self._stage is not None
        for sent in self._sent.values():
            sent.is_alone = False
        self.last_step = frame.step
        self._sent[frame.step] = Sent(sum(map(num_rows, frame.windows)), time.monotonic(), not self._sent)
        self._stage.submit(frame)

    async def receive(self) -> Arrival:
        """The next result; waits as long as there is nothing in flight.

        Raises:
            StageLost: a node closed, or was silent for longer than its work can take; the message names it.
            BrigadeError: what a stage failed with.
        """
        while True:
            waited_s, patience_s = self._silence_s(), self._patience_s()
            if self._sent and waited_s >= patience_s:
                raise await self._diagnose(waited_s)
            try:
                async with asyncio.timeout(patience_s - waited_s):
                    return await self._next_arrival()
            except TimeoutError:
                continue  # unless a frame has been in flight all the time

    async def statuses(self) -> list[StatusReply]:
        """What every stage holds and has taken, stage 0 first; zeros for a worker that does not say."""
        assert self._stage is not None
        replies = await asyncio.gather(*(peer.status(_PROBE_S) for peer in self.peers), return_exceptions=True)
        theirs = [reply if isinstance(reply, StatusReply) else StatusReply() for reply in replies]
        return [self._stage.status(), *theirs]

    async def _next_arrival(self) -> Arrival:
        assert self._stage is not None
        result = await self._stage.next_result()
        if result.step not in self._sent:
            raise FrameError(f"the last stage answered step {result.step}, which is not in flight")
        sent = self._sent.pop(result.step)
        self._last_result = time.monotonic()
        arrival = Arrival(result, time.monotonic_ns(), sent.num_rows, self._last_result - sent.at)
        if sent.num_rows:
            stages_s = [(timing.sampled - timing.started) / 1e9 for timing in result.timings]
            self.costs.observe(sent.num_rows, stages_s, arrival.took_s, was_alone=sent.is_alone)
        return arrival

    def _silence_s(self) -> float:
        """How long the frames in flight have brought no result."""
        if not self._sent:
            return 0.0
        return time.monotonic() - max(self._last_result, next(iter(self._sent.values())).at)

    def _patience_s(self) -> float:
        rows_in_flight = sum(sent.num_rows for sent in self._sent.values())
        return (_PATIENCE_S if self._row_s else _FIRST_STEP_S) + 2 * self._row_s * rows_in_flight

    async def _load(self, progress: Progress) -> Shard:
        """All shards at once, each node its own; the first failure ends the others."""
        own = self.plan.assignments[0]
        layers = own.start, own.end, self._spec.num_layers
        theirs = [
            peer.load(request, partial(progress, peer.name))
            for peer, request in zip(self.peers, self._load_requests(), strict=True)
        ]
        shard, *_ = await together(
            load_shard(self._checkpoint, *layers, self.thread, partial(progress, own.name)), *theirs
        )
        assert isinstance(shard, Shard)
        return shard

    async def _start(self, engine: Engine) -> None:
        watched = [self._pump(peer) for peer in self.peers]
        send = None
        if self.peers:
            link = Link(self.peers[0].name, self.peers[0].address, self.epoch, 0)
            self._stack.push_async_callback(link.close)
            await link.wait_open()
            watched.append(link.wait_lost())
            send = link.send
        self._stage = Stage(engine, self.thread, self.epoch, send)
        self._stack.push_async_callback(self._stage.stop)
        self._stage.start(*watched)

    async def _pump(self, peer: Peer) -> None:
        assert self._stage is not None
        async for result in peer.results():
            self._stage.deliver(result)

    async def _warm_up(self) -> None:
        """One row and a chunk of rows through all stages, twice: compiles, pages in, and tells what rows cost."""
        prefix_hash = History().prefix_hash(0)
        chunk = Window(slot=0, prefix_hash=prefix_hash, tokens=[0] * min(_WARM_UP_ROWS, self._spec.context), wanted=1)
        row = Window(slot=0, prefix_hash=prefix_hash, tokens=[0], wanted=1)
        frames = [Frame(opened=[Session(slot=0)])]
        frames += [Frame(windows=[window]) for window in (chunk, chunk, row, row)]
        for step, frame in enumerate([*frames, Frame(closed=[0])]):
            frame.epoch, frame.step = self.epoch, step
            self.send(frame)
            arrival = await self.receive()
            if arrival.num_rows == 1:
                self._row_s = arrival.took_s

    async def _diagnose(self, waited_s: float) -> BrigadeError:
        """Who is silent: asked of every node, since whoever waits for a result cannot know."""
        replies = await asyncio.gather(*(peer.status(_PROBE_S) for peer in self.peers), return_exceptions=True)
        for peer, reply in zip(self.peers, replies, strict=True):
            if isinstance(reply, BaseException):
                return StageLost(
                    f"no answer at {peer.address} after {waited_s:.1f} s without a result (stopped, hung, or cut off)",
                    node=peer.name,
                )
            if reply.busy_s > waited_s / 2:
                return StageLost(f"its engine has been at one step for {reply.busy_s:.1f} s", node=peer.name)
        assert self._stage is not None
        return StageLost(
            f"no result for {waited_s:.1f} s though every worker answers "
            f"(coordinator busy for {self._stage.busy_s:.1f} s; last step {self._stage.last_step})"
        )

    def _load_requests(self) -> list[LoadRequest]:
        return [
            LoadRequest(
                model=peer.model or self._checkpoint.name,
                fingerprint=self._checkpoint.fingerprint,
                start=assignment.start,
                end=assignment.end,
                num_layers=self._spec.num_layers,
                dtype=self._spec.dtype,
            )
            for peer, assignment in zip(self.peers, self.plan.assignments[1:], strict=True)
        ]

    def _attach_request(self, stage: int) -> AttachRequest:
        request = AttachRequest(epoch=self.epoch, stage=stage, loaded=self._load_requests()[stage - 1])
        if stage < len(self.peers):
            successor = self.peers[stage]
            request.successor, request.successor_name = successor.address, successor.name
        return request
