"""Nodes that come and go, and a chain over them that checks every frame as its stages would. No sockets, no MLX."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.cluster import cluster, local, nodes
from coordinator.cluster.deployment import Deployment, OwnCopy
from coordinator.cluster.progress import NodeProgress
from coordinator.cluster.step_timeouts import ArrivedResult, Sent
from coordinator.planning.costs import ChainCosts
from protos.brigade_pb2 import DTYPE_BFLOAT16, Frame, HelloReply, StatusReply
from tests.unit.fake_chain import FakeChain
from tests.unit.virtual_time import SameThread
from worker.compute.header import Asked, num_rows
from worker.errors import ConfigError, EngineHung, NodeBusy, NodeLeaving, StageLost
from worker.model.cache_spec import Memory
from worker.model.model_spec import LayerSpec, ModelSpec

STEP_S = 0.05
JOIN_S = 0.05
LOOK_S = 0.25
SILENT_S = 2.0  # after which a stopped node is noticed, by keepalive
HUNG_S = 7.5  # after which a hung engine is
FIRST_S = 60.0  # likewise in the first steps of a chain, which may compile
DRAIN_S = 10.0
POISON = 49  # a prompt that begins with it ends the last node's process whenever it is fed

SPEC = ModelSpec(
    name="tiny", family="qwen3", layers=(LayerSpec(1000, (Memory(None, 1, 1, 0, 1),)),) * 4, embed_bytes=0,
    head_bytes=0, tied=False, hidden_size=8, vocab_size=50, context=200, dtype=DTYPE_BFLOAT16,
)  # fmt: skip


@dataclass
class Place:
    """A node, whether or not a process runs there now."""

    name: str
    world: "World"
    num_starts: int = 1
    is_up: bool = True
    is_stopped: bool = False
    is_hung: bool = False
    is_draining: bool = False
    is_foreign: bool = False  # it shows a certificate of another authority
    load_s: float = 0.0
    num_loads: int = 0
    epoch: int = 0  # the last that this process took part in
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def answers(self) -> bool:
        return self.is_up and not self.is_stopped

    @property
    def is_sound(self) -> bool:
        return self.answers and not self.is_hung and not self.is_draining and self.load_s < 1

    def start(self) -> None:
        """Another process, if none runs."""
        if not self.is_up:
            self.num_starts += 1
            self.is_up, self.epoch, self.ended = True, 0, asyncio.Event()
            self.is_stopped = self.is_hung = self.is_draining = False

    def end(self) -> None:
        if self.is_up:
            self.is_up = False
            self.ended.set()
            self.world.tell(self, StageLost("closed the connection", node=self.name))

    def drain(self) -> None:
        if self.answers and not self.is_draining:
            self.is_draining = True
            asyncio.get_running_loop().call_later(DRAIN_S, self._drained, self.num_starts)
            for chain in list(self.world.chains):
                chain.drain(self)

    def _drained(self, num_starts: int) -> None:
        if self.num_starts == num_starts:
            self.end()


class FakePeer:
    """The process that runs at a place now, as the coordinator knows it."""

    def __init__(self, place: Place) -> None:
        self.name, self.address, self.model = place.name, "192.168.1.7:50070", None
        self.place = place
        self.is_draining = False

    async def hello(self, within_s: float = 5.0) -> HelloReply:
        until = time.monotonic() + within_s
        while not self.place.answers:
            if time.monotonic() >= until:
                raise StageLost("nothing answers", node=self.name)
            await asyncio.sleep(0.05)
        if self.place.is_foreign:
            raise ConfigError("its certificate is of another authority", node=self.name)
        return HelloReply(node=self.name, incarnation=f"{self.name} {self.place.num_starts}", memory_bytes=1)

    async def status(self, within_s: float) -> StatusReply:
        if not self.place.answers:
            raise StageLost("nothing answers", node=self.name)
        return StatusReply(busy_s=7.0 if self.place.is_hung else 0.0)

    async def load(self) -> None:
        place, process = self.place, self.place.num_starts
        until = time.monotonic() + place.load_s
        with place.world.loading():
            silent_s = 0.0
            while time.monotonic() < until or not place.answers:
                silent_s = 0.0 if place.answers else silent_s + LOOK_S
                if not place.is_up or place.num_starts != process or silent_s >= SILENT_S:
                    raise StageLost("closed the connection", node=self.name)
                await asyncio.sleep(min(LOOK_S, max(0.01, until - time.monotonic())))
        place.num_loads += 1
        if place.is_draining:
            raise StageLost("is shutting down", node=self.name)

    def detach(self) -> None:
        pass

    async def close(self) -> None:
        pass


class FakeOwn:
    """Stage 0: has all layers at once, and passes the world on to its chains."""

    def __init__(self, world: "World") -> None:
        self.world = world

    async def load(self, deployment: Deployment, progress: Any) -> None:
        pass


async def load_worker(deployment: Deployment, stage: int, known: OwnCopy, progress: NodeProgress) -> None:
    await deployment.peers[stage - 1].load()  # type: ignore[call-arg]


async def nothing_known(checkpoint: Any) -> Any:
    return None


class WorldChain:
    """What a cluster takes for a chain, and a runner."""

    def __init__(
        self,
        own: FakeOwn,
        deployment: Deployment,
        epoch: int = 1,
        *,
        costs: ChainCosts | None = None,
        answer_costs: ChainCosts | None = None,
        is_awaited: bool = False,
        can_spare: Callable[[str], bool] = lambda name: False,
        say: Any = None,
    ) -> None:
        self.thread = SameThread()
        self.world, self.plan, self.epoch, self.spec = own.world, deployment.plan, epoch, deployment.spec
        self.peers: Any = deployment.peers
        self.num_stages = 1 + len(self.peers)
        self.clock_offsets = [0] * self.num_stages
        self.costs = costs or ChainCosts(self.num_stages)
        self.answer_costs = answer_costs or self.costs
        self.answers_alone = False
        self.prefixes = None
        self.held_slots: dict[int, Any] = {}
        self.last_step = 0
        self.can_spare = can_spare
        self.begins_draining = asyncio.Event()
        self.retires = asyncio.Event()
        self.has_token = asyncio.Event()
        self._stages = FakeChain(epoch)
        self._sent_at: deque[float] = deque()
        self._idle_since = time.monotonic()
        self._failure: StageLost | None = None
        self._news = asyncio.Event()

    async def __aenter__(self) -> "WorldChain":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.world.chains.discard(self)

    async def open(self, progress: Any = None, most_still_s: float | None = None) -> None:
        self.world.chains.add(self)
        for peer in reversed(self.peers):
            place, peer.is_draining = peer.place, False
            if not place.answers:
                await asyncio.sleep(SILENT_S if place.is_up else 0)
                raise StageLost("did not join the chain", node=place.name)
            if place.is_draining:
                raise StageLost("is shutting down", node=place.name)
            assert self.epoch > place.epoch, "an epoch is accepted twice"
            place.epoch = self.epoch
            await asyncio.sleep(JOIN_S)
        hung = [peer for peer in self.peers if peer.place.is_hung]
        if hung and self._failure is None:
            await self._wait_news(FIRST_S if most_still_s is None else min(FIRST_S, most_still_s))
            self.lose(EngineHung("its engine has been at one step", node=hung[0].name))
        if self._failure is not None:
            raise self._failure
        assert self.epoch not in self.world.epochs
        self.world.epochs.append(self.epoch)

    @property
    def still_since(self) -> float | None:
        return self._sent_at[0] if self._sent_at else None

    @property
    def idle_s(self) -> float:
        return 0.0 if self._sent_at else time.monotonic() - self._idle_since

    def retire(self, error: StageLost) -> None:
        self.lose(error)

    @property
    def draining(self) -> NodeBusy | None:
        names = (peer.name for peer in self.peers if peer.is_draining and not self.can_spare(peer.name))
        return next((NodeBusy("is shutting down and takes no new request", node=name) for name in names), None)

    def has(self, place: Place) -> bool:
        return any(peer.place is place for peer in self.peers)

    def lose(self, error: StageLost) -> None:
        self._failure = self._failure or error
        self._news.set()

    def drain(self, place: Place) -> None:
        for peer in self.peers:
            if peer.place is place:
                peer.is_draining = True
                if self.can_spare(place.name):
                    self.lose(NodeLeaving("is about to end", node=place.name))
                else:
                    self.begins_draining.set()

    def keep_slots(self, numbers: set[int]) -> None:
        assert not numbers, "no stage outlives a chain here"

    def send(self, frame: Frame) -> None:
        assert not self._stages.frames or frame.step == self.last_step + 1
        self._stages.send(frame)
        self.last_step = frame.step
        self._sent_at.append(time.monotonic())
        self._news.set()
        if self.peers and any(w.base == 0 and w.tokens[0] == POISON for w in frame.windows):
            asyncio.get_running_loop().call_later(STEP_S / 2, self.peers[-1].place.end)

    async def receive(self) -> ArrivedResult:
        while self._failure is None:
            stuck = [peer for peer in self.peers if peer.place.is_hung or not peer.place.answers]
            left_s = 5.0
            if self._sent_at:
                passed_s = time.monotonic() - self._sent_at[0]
                if not stuck and passed_s >= STEP_S - 1e-6:
                    return self._arrived()
                left_s = (HUNG_S if stuck else STEP_S) - passed_s
                if left_s <= 1e-6:
                    kind = EngineHung if stuck[0].place.is_hung else StageLost
                    raise kind("no result", node=stuck[0].name)
            await self._wait_news(left_s)
        raise self._failure

    async def _wait_news(self, within_s: float) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def _arrived(self) -> ArrivedResult:
        sent_at = self._sent_at.popleft()
        self._idle_since = time.monotonic()
        frame, _ = self._stages.in_flight[0]
        result = self._stages.receive()
        if result.samples:
            self.has_token.set()
        num_sent_rows = sum(map(num_rows, frame.windows))
        sent = Sent(num_sent_rows, 0, Asked({}), frozenset(), sent_at, is_alone=True)
        return ArrivedResult(result, time.monotonic_ns(), sent)

    def learn(self, arrival: ArrivedResult) -> None:
        pass


class FakeLocal:
    """A worker process of our own, at a place of this name."""

    def __init__(self, place: Place) -> None:
        self.name, self.address, self._place = place.name, "192.168.1.7:50070", place
        self.model = self.draft_model = None

    async def wait_ended(self) -> str:
        await self._place.ended.wait()
        return "was ended"

    def kill(self) -> None:
        self._place.end()

    async def stop(self) -> None:
        self._place.end()


class World:
    """All places, all chains, and every epoch that was opened."""

    def __init__(self, names: str) -> None:
        self.places = {name: Place(name, self) for name in names}
        self.chains: set[WorldChain] = set()
        self.epochs: list[int] = []
        self.loaded_s = 0.0  # for how long any node has loaded
        self._num_loading = 0
        self._loading_since = 0.0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A node loads meanwhile."""
        self._loading_since = self._loading_since if self._num_loading else time.monotonic()
        self._num_loading += 1
        try:
            yield
        finally:
            self._num_loading -= 1
            if not self._num_loading:
                self.loaded_s += time.monotonic() - self._loading_since

    def tell(self, place: Place, error: StageLost) -> None:
        for chain in self.chains:
            if chain.has(place):
                chain.lose(error)

    def stop(self, place: Place) -> None:
        """As by SIGSTOP; noticed after a while, unless it goes on before."""
        place.is_stopped = True

        def notice() -> None:
            if place.is_stopped:
                self.tell(place, StageLost("stopped answering", node=place.name))

        asyncio.get_running_loop().call_later(SILENT_S, notice)

    async def start_local(self, name: str, model: str | None = None, draft_model: str | None = None) -> FakeLocal:
        await asyncio.sleep(0.3)
        self.places[name].start()
        return FakeLocal(self.places[name])

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """In place of processes, connections and chains."""

        class Started:
            start = staticmethod(self.start_local)

        patch.setattr(cluster, "Chain", WorldChain)
        patch.setattr(cluster, "load_worker", load_worker)
        patch.setattr(cluster, "run_in_thread", SameThread().run)
        patch.setattr(cluster, "is_overloaded", lambda: False)
        patch.setattr(OwnCopy, "of", nothing_known)
        patch.setattr(local, "LocalWorker", Started)
        patch.setattr(nodes, "Peer", lambda name, addresses, network: FakePeer(self.places[name]))
