"""Nodes that are lost, and streams that go on all the same: with the tokens, and the text, of the unfailed run."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest

from coordinator.cluster.chain import Chain
from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.cluster.peer import Peer
from coordinator.cluster.roster import Roster
from coordinator.cluster.runner import Runner
from coordinator.cluster.supervisor import Supervisor
from coordinator.decoding.decode import Decode
from coordinator.planning.plan import Node, plan
from coordinator.planning.recovery import Limits
from coordinator.sessions.answer import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tests.integration.conftest import NETWORK, Models, running
from tests.integration.many import Live, request, solo, tokens_of
from tests.integration.windows import MASKED
from worker.config import Cluster, Coordinator, Worker
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.node.log import Log
from worker.node.relay import add_node
from worker.node.service import NodeService
from worker.process.mlx_thread import MlxThread

LAYERS = (1, 2, 1)
ROOMY = 1 << 40


@dataclass
class Place:
    """Where a worker runs, or has run: `stop` and `start` are those of its process, on the same port."""

    name: str
    port: int = 0
    service: NodeService | None = None
    _thread: MlxThread | None = None
    _server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._thread, self._server = MlxThread(), NETWORK.server()
        self.service = NodeService(self.name, self._thread, NETWORK, log=Log(self.name, None))
        add_node(self.service, self._server)
        self.port = NETWORK.listen(self._server, self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            await self._server.stop(None)
            self._thread.close()
            self._server = None


@dataclass
class Rig:
    """A supervised cluster of nodes in this process."""

    places: list[Place]
    supervisor: Supervisor
    said: list[str]
    openings: list[Callable[[Chain], object]] = field(default_factory=list)  # called in turn as chains are opened

    def runner(self) -> Runner:
        return Runner(self.supervisor.chain, when_lost=self.supervisor.reopen)


@asynccontextmanager
async def supervised(
    folder: Path, limits: Limits, layers: Sequence[int] = LAYERS, memory: int = ROOMY, context: int = 128
) -> AsyncIterator[Rig]:
    checkpoint = open_folder(folder)
    spec = describe(checkpoint)
    said: list[str] = []
    async with AsyncExitStack() as stack:
        places = [Place(f"node-{i}") for i in range(1, len(layers))]
        for place in places:
            await place.start()
            stack.push_async_callback(place.stop)
        peers = [Peer(place.name, place.address, NETWORK) for place in places]
        workers = tuple(Worker(name=place.name, address=place.address, memory=memory) for place in places)
        cluster = Cluster(coordinator=Coordinator(memory=memory), workers=workers)
        roster = await stack.enter_async_context(Roster(peers, cluster))
        own = await stack.enter_async_context(OwnNode())
        nodes = [Node(name, memory) for name in ("coordinator", *(place.name for place in places))]
        deployment = Deployment(checkpoint, spec, plan(spec, nodes, context, layers), peers)
        supervisor = Supervisor(own, roster, deployment, limits, say=said.append)
        await stack.enter_async_context(supervisor)
        await supervisor.open()
        yield Rig(places, supervisor, said)


COMES_BACK = Limits(rejoin_s=20, recovery_s=30)
IS_GONE = Limits(rejoin_s=0, recovery_s=30)

PENALISED = Sampling(seed=5, temperature=0.9, repetition_penalty=1.3)
DECODES = [Decode(), Decode("ngram"), Decode("diffusion", 8), Decode("diffusion-fast", 8)]
ASKED = [
    request(tokens_of(5 + 9 * i, i), 24, decode, sampling=sampling)
    for i, decode in enumerate(DECODES)
    for sampling in (Sampling(), Sampling(seed=7, temperature=0.8), PENALISED)
]
FORKED = [request((*tokens_of(40, 7), i), 16) for i in range(2)]  # one begins as a copy of the other


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models("qwen3", **MASKED).folder


_expected: dict[str, list[Answer]] = {}


async def unfailed(folder: Path, asked: Sequence[Request]) -> list[Answer]:
    key = f"{folder} {asked}"
    if key not in _expected:
        async with running(folder, LAYERS) as chain:
            _expected[key] = await solo(chain, asked)
    return _expected[key]


async def lose(rig: Rig, which: int, *, comes_back: bool) -> None:
    await rig.places[which].stop()
    if comes_back:
        await rig.places[which].start()


def assert_equal(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in expected]


@pytest.mark.parametrize("after", [0, 1, 10, 23])
@pytest.mark.parametrize("limits", [COMES_BACK, IS_GONE], ids=["comes back", "is planned around"])
async def test_every_stream_is_that_of_the_unfailed_run(folder: Path, limits: Limits, after: int) -> None:
    """Every decoder, greedy, sampled and penalised, in lanes and forked: a worker is lost at several moments."""
    asked = [*ASKED, *FORKED]
    expected = await unfailed(folder, asked)
    async with supervised(folder, limits) as rig, rig.runner() as runner:
        live = [Live(runner, each) for each in asked]
        await live[0].wait_pieces(after)
        await lose(rig, after % 2, comes_back=limits is COMES_BACK)
        found = [await each.answer() for each in live]
        assert_equal(found, expected)
        assert rig.supervisor.num_recoveries == 1
        assert {each.usage.num_recoveries for each in found} <= {0, 1}
        layers = list(LAYERS) if limits is COMES_BACK else [2, 2]
        assert rig.supervisor.chain.plan.layers == layers
        told = [line for line in rig.said if "the stream stood still for" in line]
        assert len(told) == 1 and told[0].startswith(f"worker node-{after % 2 + 1}: ")
