"""A cluster whose nodes' speeds are known: who makes it no faster is left out, and takes over where a node is lost."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.cluster import open as open_module
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.open import cluster_over, open_chain
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.engine.engine import Engine
from coordinator.planning.recovery import Limits
from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed, NodeSpeed, Survey
from tests.integration.conftest import NETWORK, Models, answer
from tests.integration.many import Live, request, tokens_of, until
from tests.integration.test_recovery import Place
from worker.config import ClusterConfig, CoordinatorConfig, WorkerConfig
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import describe

PROMPT = tokens_of(9, 3)
LAYER_MS = {"coordinator": 2.0, "slow": 9.0, "fast": 1.0}


@pytest.fixture(autouse=True)
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the nodes were different machines that have measured themselves."""

    async def known_speeds(
        options: ClusterOptions, checkpoint: Checkpoint, peers: list[Peer], known: Survey = NO_SPEEDS
    ) -> Survey:
        measured = {"coordinator", *(peer.name for peer in peers), *known.speeds}
        num_kinds = len(describe(checkpoint).kinds)
        speeds = {
            name: NodeSpeed((((1, ms),),) * num_kinds, ((1, 8 * ms),), 1)
            for name, ms in LAYER_MS.items()
            if name in measured
        }
        return Survey(speeds, {"slow": LinkSpeed(0.1), "fast": LinkSpeed(0.1)})

    monkeypatch.setattr(open_module, "known_speeds", known_speeds)


@asynccontextmanager
async def workers() -> AsyncIterator[list[Place]]:
    async with AsyncExitStack() as stack:
        places = [Place("fast"), Place("slow")]
        for place in places:
            await place.start()
            stack.push_async_callback(place.stop)
        yield places


def options(folder: Path, places: list[Place], own: int | None = None, memory: int = 1 << 40) -> ClusterOptions:
    """`own` is the memory of the coordinator, `memory` that of the others."""
    listed = tuple(WorkerConfig(name=place.name, address=(place.address,), memory=memory) for place in places)
    cluster = ClusterConfig(coordinator=CoordinatorConfig(memory=own or 1 << 40), workers=listed, order="free")
    return ClusterOptions(cluster, str(folder), None, 128, limits=Limits(rejoin_s=0, recovery_s=20))


@asynccontextmanager
async def opened(given: ClusterOptions, missing: Sequence[str] = ()) -> AsyncIterator[Cluster]:
    checkpoint = open_folder(Path(given.model))
    peers = [Peer(worker.name, worker.addresses, NETWORK) for worker in given.cluster.workers]
    there = [peer for peer in peers if peer.name not in missing]
    async with (
        Nodes(peers, given.cluster) as nodes,
        cluster_over(nodes, there, given, checkpoint, describe(checkpoint), 128, missing=missing) as cluster,
    ):
        yield cluster


def held(cluster: Cluster) -> dict[str, int]:
    return {each.name: each.end - each.start for each in cluster.chain.plan.assignments}


def room_for_one(folder: Path) -> int:
    """Memory for one layer beside the embedding, and its cache."""
    spec = describe(open_folder(folder))
    return spec.shard_bytes(0, 1) + spec.reserved_bytes(0, 1, 128)


async def test_a_worker_that_makes_it_no_faster_is_left_out(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    folder = models("qwen3").folder
    async with workers() as places, opened(options(folder, places, own=room_for_one(folder))) as cluster:
        assert held(cluster) == {"coordinator": 1, "fast": 3} and cluster.missing == []
        assert (await answer(cluster.chain, PROMPT, 8)).tokens == models("qwen3").tokens(PROMPT, 8)
    assert "without slow, which would not make it faster" in capsys.readouterr().err


async def test_the_costs_of_prompt_chunks_begin_with_what_the_nodes_measured(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(options: ClusterOptions, checkpoint: Checkpoint, *rest: object) -> Survey:
        layer, head = ((1, 1.0), (512, 1000.0)), ((1, 8.0), (512, 8.0))
        speed = NodeSpeed((layer,) * len(describe(checkpoint).kinds), head, 1)
        return Survey({name: speed for name in LAYER_MS}, {"slow": LinkSpeed(0.1), "fast": LinkSpeed(0.1)})

    monkeypatch.setattr(open_module, "known_speeds", measured)
    folder = models("qwen3").folder
    async with workers() as places, opened(options(folder, places, own=room_for_one(folder))) as cluster:
        counts = [each.end - each.start for each in cluster.chain.plan.assignments]
        assert cluster.chain.costs.stages_s(512) == pytest.approx(counts, rel=0.1)


@pytest.mark.parametrize(
    ("has_room", "then"), [(False, {"coordinator": 1, "slow": 3}), (True, {"coordinator": 4})], ids=["tight", "roomy"]
)
async def test_a_worker_that_was_left_out_takes_over_if_that_helps(
    models: Models, has_room: bool, then: dict[str, int]
) -> None:
    """Where it does not, the others go on by themselves, as is fastest then, too."""
    whole = models("qwen3")
    own = None if has_room else room_for_one(whole.folder)
    async with workers() as places, opened(options(whole.folder, places, own=own)) as cluster:
        assert held(cluster) == {"coordinator": 1, "fast": 3}
        async with Engine(cluster.chain, when_lost=cluster.reopen) as engine:
            live = Live(engine, request(PROMPT, 16))
            await live.wait_pieces(3)
            await places[0].stop()
            assert (await live.answer()).tokens == whole.tokens(PROMPT, 16)
        assert held(cluster) == then and cluster.missing == ["fast"]


async def test_workers_change_places_where_that_is_faster(models: Models) -> None:
    """Both are needed, and the head takes long on the slow one: it is last only if it has to be."""
    folder = models("qwen3").folder
    spec = describe(open_folder(folder))
    room = spec.shard_bytes(2, 4) + spec.reserved_bytes(2, 4, 128)
    async with (
        workers() as places,
        opened(options(folder, places, own=room_for_one(folder), memory=room)) as cluster,
    ):
        assert list(held(cluster))[1:] == ["slow", "fast"]
        assert (await answer(cluster.chain, PROMPT, 8)).tokens == models("qwen3").tokens(PROMPT, 8)


async def test_what_is_measured_is_measured_on_several_nodes(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` and `verify` are about a chain, even where one node would be faster alone."""
    monkeypatch.setitem(LAYER_MS, "coordinator", 0.5)
    folder = models("qwen3").folder
    checkpoint = open_folder(folder)
    async with workers() as places, open_chain(options(folder, places), checkpoint, describe(checkpoint), 128) as chain:
        assert [each.name for each in chain.plan.assignments] == ["coordinator", "fast"]


async def test_a_worker_that_was_missing_at_the_start_is_measured_before_it_joins(models: Models) -> None:
    """By bytes all three would have layers; by speed the slow one is no help any more."""
    folder = models("qwen3").folder
    async with workers() as places:
        await places[0].stop()
        async with opened(options(folder, places, own=room_for_one(folder)), missing=["fast"]) as cluster:
            assert held(cluster) == {"coordinator": 1, "slow": 3} and cluster.missing == ["fast"]
            async with Engine(cluster.chain, when_lost=cluster.reopen) as engine:
                await places[0].start()
                await until(lambda: "fast" in held(cluster))
                assert held(cluster) == {"coordinator": 1, "fast": 3}
                assert (await engine.answer(request(PROMPT, 8))).tokens == models("qwen3").tokens(PROMPT, 8)


async def test_a_split_that_replaces_the_given_layers_while_a_worker_is_missing_is_reported(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = models("qwen3").folder
    async with workers() as places:
        await places[0].stop()
        given = options(folder, places, own=room_for_one(folder)).with_layers((1, 1, 2))
        async with opened(given, missing=["fast"]) as cluster:
            assert held(cluster) == {"coordinator": 1, "slow": 3}
    assert (
        "layers 1,1,2 need every node, and fast is missing: split as coordinator [0, 1), slow [1, 4) until it joins\n"
    ) in capsys.readouterr().err
