"""The cluster under random losses, in virtual time: streams go on as they were, and everything ends."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from coordinator.cluster.chain import Chain
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.deployment import Deployment
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.recovery_record import Recovered
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.recovery import Limits
from coordinator.planning.speeds import NO_SPEEDS
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tests.unit.cluster.fake_network import POISON, SPEC, FakeLocal, FakeOwn, FakePeer, World
from tests.unit.fake_chain import plain_answer, prompt_of
from tests.unit.fuzz import fuzzed
from tests.unit.virtual_time import VirtualTime
from worker.config import ClusterConfig, CoordinatorConfig, WorkerConfig
from worker.errors import BrigadeError, NodeBusy, StageLost

LIMITS = Limits(rejoin_s=2, recovery_s=20)
MEMORY = 4000  # two nodes hold the model, and three sessions beside it
TURNS_S = 1.5  # what may be counted of a load that has just ended
SETTLED_S = 15.0  # after which sound nodes must be a chain again
LONGEST_S = 3 * (LIMITS.recovery_s + 3 * 200)  # three losses, in each of which every node loads for so long
NODES = "abc"  # the last is our own: it is started again
KINDS = [Decode(), Decode("ngram"), Decode("diffusion", 4), Decode("diffusion-fast", 4)]


class Cluster3:
    """A cluster in virtual time, and the requests that it was given."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.time = VirtualTime()
        self.patch = pytest.MonkeyPatch()
        self.asked: dict[asyncio.Task[Answer], Request] = {}
        self.last_fault = self.time.now
        self.has_faults = False
        self.said: list[str] = []
        self.recovered: list[Recovered] = []
        self._stack = AsyncExitStack()
        self.time.run(self._open())

    async def _open(self) -> None:
        self.world = World(NODES)
        self.world.install(self.patch)
        workers = tuple(WorkerConfig(name=name, address="192.168.1.7:50070", memory=MEMORY) for name in NODES)
        config = ClusterConfig(coordinator=CoordinatorConfig(memory=MEMORY), workers=workers)
        peers: Any = [FakePeer(place) for place in self.world.places.values()]
        nodes = await self._stack.enter_async_context(Nodes(peers, config))
        own_workers: Any = [FakeLocal(self.world.places[NODES[-1]])]
        network: Any = None
        nodes.keep(own_workers, network, lambda line: None)
        there = [Node(name, MEMORY) for name in ("coordinator", *NODES)]
        none: Any = None
        self.patch.setattr("coordinator.cluster.deployment.describe", lambda checkpoint: SPEC)
        deployment = Deployment(none, plan(SPEC, there, NO_SPEEDS, Objective(100)), peers)
        own: Any = FakeOwn(self.world)
        opening = Cluster(own, nodes, deployment, self.limits, say=self.said.append, on_recovered=self.recovered.append)
        self.cluster = await self._stack.enter_async_context(opening)
        chain = await self.cluster.open()
        self.runner = await self._stack.enter_async_context(Engine(chain, when_lost=self._reopen))

    async def _reopen(self, error: BrigadeError) -> Chain:
        """As the cluster does it, within the time that it has."""
        began, loaded_s = self.time.now, self.world.loaded_s
        try:
            return await self.cluster.reopen(error)
        except StageLost:
            steady_s = self.time.now - self.last_fault
            assert not (self.is_sound and steady_s > SETTLED_S), f"given up, though all is well for {steady_s} s"
            raise
        finally:
            loaded_s = self.world.loaded_s - loaded_s  # which no recovery counts
            assert self.time.now - began - loaded_s <= self.limits.recovery_s + TURNS_S

    @property
    def members(self) -> list[str]:
        return self.cluster.chain.plan.names

    @property
    def all_answered(self) -> bool:
        return all(task.done() and task.exception() is None for task in self.asked)

    @property
    def is_sound(self) -> bool:
        return all(place.is_sound for place in self.world.places.values()) and not self.has_poison

    @property
    def has_poison(self) -> bool:
        return any(POISON in request.prompt for request in self.asked.values())

    def submit(self, request: Request, wait_s: float | None = None) -> None:
        async def begin() -> None:
            self.asked[asyncio.create_task(self.runner.answer(request, chunk=8))] = request

        self.time.run(begin())
        self.wait(wait_s)

    def act(self, fault: Any, *arguments: Any, wait_s: float | None = None) -> None:
        """Something happens to a node, and so much time passes."""

        async def happen() -> None:
            fault(*arguments)

        self.last_fault, self.has_faults = self.time.now, True
        self.time.run(happen())
        self.wait(wait_s)

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        self.time.run(work)
        self.last_fault = self.last_fault if self.is_sound else self.time.now

    def wait(self, seconds: float | None) -> None:
        if seconds is not None:
            self.run(asyncio.sleep(seconds))
            self.check()

    def check(self) -> None:
        """Whoever has an answer has the one of the unfailed run; whoever has none was told why."""
        for task, request in self.asked.items():
            if not task.done():
                continue
            error = task.exception()
            if error is None:
                assert task.result().tokens == expected(request)
            elif isinstance(error, BrigadeError):
                self._check_reason(error, request)
            else:
                raise error

    def _check_reason(self, error: BrigadeError, request: Request) -> None:
        """Who loses no node and asks for nothing that ends one gets an answer."""
        assert self.has_faults or POISON in request.prompt, error
        reasons = ("given up: the chain was lost 3 times", "does not fit on the nodes", " within ")
        assert isinstance(error, NodeBusy) or any(reason in error.message for reason in reasons), error

    def end(self) -> None:
        """Everybody is answered or told why, in bounded time; then nothing is left."""
        try:
            self.time.run(self._wait_ended())
            self.check()
            self.time.run(self._stack.aclose())
        finally:
            left = self.time.close()
            self.patch.undo()
        assert not left

    async def _wait_ended(self) -> None:
        if self.asked:
            _, pending = await asyncio.wait(self.asked, timeout=LONGEST_S * (1 + len(self.asked)))
            assert not pending, "a request neither ends nor fails"


def expected(request: Request) -> list[int]:
    seed = request.sampling.seed if request.sampling.temperature else 0
    return plain_answer(request.prompt, request.max_tokens, request.eos, seed)


@st.composite
def requests(draw: st.DrawFn, poison: bool | None = None) -> Request:
    """Some begin alike; one that is poison ends a node whenever it is fed."""
    is_poison = draw(st.booleans()) if poison is None else poison
    length, seed = draw(st.sampled_from([1, 9, 40])), draw(st.integers(0, 1))
    rest = (*(token % POISON for token in prompt_of(length, seed)), draw(st.integers(0, 5)))
    prompt = (POISON, *rest) if is_poison else rest
    sampling = Sampling(seed=draw(st.integers(1, 9)), temperature=draw(st.sampled_from([0.0, 0.8])))
    max_tokens, eos = draw(st.sampled_from([1, 20, 60])), draw(st.sampled_from([frozenset[int](), frozenset({3})]))
    return Request(prompt, max_tokens, sampling, draw(st.sampled_from(KINDS)), eos=eos)


PLACES = st.sampled_from(NODES)


class Losses(RuleBasedStateMachine):
    """Nodes are lost, come back, are slow, hang, drain and stop, at any moment of a recovery and of a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster3()

    @precondition(lambda self: len(self.cluster.asked) < 6)
    @rule(request=requests(poison=False))
    def ask(self, request: Request) -> None:
        self.cluster.submit(request)

    @rule(name=PLACES)
    def lose(self, name: str) -> None:
        self.cluster.act(self.cluster.world.places[name].end)

    @rule(name=PLACES)
    def come_back(self, name: str) -> None:
        self.cluster.act(self.cluster.world.places[name].start)

    @rule(name=PLACES)
    def restart(self, name: str) -> None:
        place = self.cluster.world.places[name]
        self.cluster.act(place.end)
        self.cluster.act(place.start)

    @rule(name=PLACES, is_stopped=st.booleans())
    def stop_or_go_on(self, name: str, is_stopped: bool) -> None:
        place = self.cluster.world.places[name]
        if is_stopped:
            self.cluster.act(self.cluster.world.stop, place)
        else:
            self.cluster.act(setattr, place, "is_stopped", False)

    @rule(name=PLACES)
    def hang(self, name: str) -> None:
        self.cluster.act(setattr, self.cluster.world.places[name], "is_hung", True)

    @rule(name=PLACES)
    def drain(self, name: str) -> None:
        self.cluster.act(self.cluster.world.places[name].drain)

    @rule(name=PLACES, load_s=st.sampled_from([0.0, 0.5, 4.0, 200.0]))
    def load_slowly(self, name: str, load_s: float) -> None:
        self.cluster.act(setattr, self.cluster.world.places[name], "load_s", load_s)

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.3, 1.0, 5.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.cluster.wait(seconds)

    def teardown(self) -> None:
        self.cluster.end()


class TestLosses(Losses.TestCase):
    settings = settings(fuzzed(40), stateful_step_count=25, phases=[Phase.generate])  # a short example takes minutes


@fuzzed(12)
@given(st.lists(requests(), min_size=1, max_size=4), st.sampled_from([0.0, 0.2, 2.0]))
def test_requests_that_end_a_node_end_alone(asked: list[Request], pause_s: float) -> None:
    """Whoever asks beside them gets the answer of the unfailed run."""
    cluster = Cluster3()
    for request in asked:
        cluster.submit(request)
        cluster.run(asyncio.sleep(pause_s))
        for place in cluster.world.places.values():
            cluster.time.run(restarted(place.start))
    cluster.time.run(keep_alive(cluster))
    cluster.end()
    for task, request in cluster.asked.items():
        assert (task.exception() is not None) == (POISON in request.prompt)


def test_requests_are_told_when_whoever_opens_the_next_chain_is_cancelled() -> None:
    cluster = Cluster3()

    async def cancelled(error: BrigadeError) -> Chain:
        raise asyncio.CancelledError

    cluster.cluster.reopen = cancelled  # type: ignore[method-assign]
    cluster.submit(Request((1, 2), 20))
    cluster.act(cluster.world.places["a"].end)
    cluster.run(asyncio.sleep(1))
    [task] = cluster.asked
    assert isinstance(task.exception(), StageLost)
    cluster.asked.clear()
    cluster.end()


async def restarted(start: Any) -> None:
    start()


async def keep_alive(cluster: Cluster3) -> None:
    """Somebody starts again whatever ends."""
    for _ in range(400):
        await asyncio.sleep(0.5)
        for place in cluster.world.places.values():
            place.start()
        if all(task.done() for task in cluster.asked):
            return
