"""A cluster whose nodes' speeds are known: who makes it no faster is left out, and takes over where a node is lost."""

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster import open as open_module
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.open import cluster_over, open_chain
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.engine.engine import Engine
from coordinator.planning.plan import Goal, Plan
from coordinator.planning.planner import plan
from coordinator.planning.recovery import Limits
from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed, NodeSpeed, Survey
from tests.integration.conftest import NETWORK, Whole, answer
from tests.integration.many import Live, request, tokens_of, until
from tests.integration.test_recovery import Place
from worker.config import ClusterConfig, CoordinatorConfig, WorkerConfig
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import describe

pytestmark = pytest.mark.usefixtures("in_turns")

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


def options(
    folder: Path, places: list[Place], own: int | None = None, memory: int = 1 << 40, objective: Goal = "latency"
) -> ClusterOptions:
    """`own` is the memory of the coordinator, of which one layer's is the default, `memory` that of the others."""
    spec = describe(open_folder(folder))
    room_for_one = spec.shard_bytes(0, 1) + spec.reserved_bytes(0, 1, 128)
    listed = tuple(WorkerConfig(name=place.name, address=(place.address,), memory=memory) for place in places)
    cluster = ClusterConfig(coordinator=CoordinatorConfig(memory=own or room_for_one), workers=listed, order="free")
    return ClusterOptions(
        cluster, str(folder), None, 128, objective=objective, limits=Limits(rejoin_s=0, recovery_s=20)
    )


@asynccontextmanager
async def workers() -> AsyncIterator[list[Place]]:
    async with AsyncExitStack() as stack:
        places = [Place("fast"), Place("slow")]
        for place in places:
            await place.start()
            stack.push_async_callback(place.stop)
        yield places


@asynccontextmanager
async def opened(
    folder: Path, *, is_fast_missing: bool = False, layers: tuple[int, ...] | None = None, **more: Any
) -> AsyncIterator[tuple[Cluster, Place]]:
    """The cluster, and the fast worker."""
    checkpoint = open_folder(folder)
    async with workers() as places:
        given = options(folder, places, **more)
        given = given.with_layers(layers) if layers else given
        peers = [Peer(worker.name, worker.addresses, NETWORK) for worker in given.cluster.workers]
        missing = []
        if is_fast_missing:
            missing.append("fast")
            await places[0].stop()
        there = peers[len(missing) :]
        async with (
            Nodes(peers, given.cluster) as nodes,
            cluster_over(nodes, there, given, checkpoint, missing=missing) as cluster,
        ):
            yield cluster, places[0]


def held(cluster: Cluster) -> dict[str, int]:
    return {each.name: each.end - each.start for each in cluster.chain.plan.assignments}


async def test_a_worker_that_makes_it_no_faster_is_left_out(whole: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    async with opened(whole.folder) as (cluster, _):
        assert held(cluster) == {"coordinator": 1, "fast": 3} and cluster.missing == []
        assert (await answer(cluster.chain, PROMPT, 8)).tokens == whole.tokens(PROMPT, 8)
    assert "without slow, which would not make it faster" in capsys.readouterr().err
    async with opened(whole.folder, own=1 << 40, memory=1000) as (cluster, _):
        assert held(cluster) == {"coordinator": 4}
    assert "without fast and slow, for lack of memory" in capsys.readouterr().err


async def test_costs_of_chunks_begin_with_what_nodes_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(options: ClusterOptions, checkpoint: Checkpoint, *rest: object) -> Survey:
        layer, head = ((1, 1.0), (512, 1000.0)), ((1, 8.0), (512, 8.0))
        speed = NodeSpeed((layer,) * len(describe(checkpoint).kinds), head, 1)
        return Survey(dict.fromkeys(LAYER_MS, speed), {"slow": LinkSpeed(0.1), "fast": LinkSpeed(0.1)})

    monkeypatch.setattr(open_module, "known_speeds", measured)
    async with opened(folder) as (cluster, _):
        assert cluster.chain.costs.stages_s(512) == pytest.approx([*held(cluster).values()], rel=0.1)
    async with opened(folder, layers=(2, 1, 1), own=1 << 40, objective="prompt") as (cluster, _):
        assert cluster.chain.answers_alone
        assert cluster.chain.answer_costs.stages_s(512) == pytest.approx([cluster.chain.spec.num_layers], rel=0.1)


@pytest.mark.parametrize(
    ("own", "then"),
    [({}, {"coordinator": 1, "slow": 3}), ({"own": 1 << 40}, {"coordinator": 4})],
    ids=["tight", "roomy"],
)
async def test_a_left_out_worker_takes_over_if_it_helps(
    whole: Whole, own: dict[str, int], then: dict[str, int]
) -> None:
    """Where it does not, the others go on by themselves, as is fastest then, too."""
    async with opened(whole.folder, **own) as (cluster, fast):
        assert held(cluster) == {"coordinator": 1, "fast": 3}
        async with Engine(cluster.chain, when_lost=cluster.reopen) as engine:
            live = Live(engine, request(PROMPT, 16))
            await live.wait_pieces(3)
            await fast.stop()
            assert (await live.answer()).tokens == whole.tokens(PROMPT, 16)
        assert held(cluster) == then and cluster.missing == ["fast"]


async def test_workers_change_places_where_that_is_faster(whole: Whole) -> None:
    """Both are needed, and the head takes long on the slow one: it is last only if it has to be."""
    spec = describe(open_folder(whole.folder))
    async with opened(whole.folder, memory=spec.shard_bytes(2, 4) + spec.reserved_bytes(2, 4, 128)) as (cluster, _):
        assert list(held(cluster))[1:] == ["slow", "fast"]
        assert (await answer(cluster.chain, PROMPT, 8)).tokens == whole.tokens(PROMPT, 8)


async def test_what_is_measured_is_measured_on_several_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` and `verify` are about a chain, even where one node would be faster alone."""
    monkeypatch.setitem(LAYER_MS, "coordinator", 0.5)
    checkpoint = open_folder(folder)
    async with workers() as places:
        given = options(checkpoint.folder, places, own=1 << 40)
        async with open_chain(given, checkpoint) as chain:
            assert [each.name for each in chain.plan.assignments] == ["coordinator", "fast"]


async def test_a_worker_that_was_missing_at_the_start_is_measured_before_it_joins(whole: Whole) -> None:
    """By bytes all three would have layers; by speed the slow one is no help any more."""
    async with opened(whole.folder, is_fast_missing=True) as (cluster, fast):
        assert held(cluster) == {"coordinator": 1, "slow": 3} and cluster.missing == ["fast"]
        async with Engine(cluster.chain, when_lost=cluster.reopen) as engine:
            await fast.start()
            await until(lambda: "fast" in held(cluster))
            assert held(cluster) == {"coordinator": 1, "fast": 3}
            assert (await engine.answer(request(PROMPT, 8))).tokens == whole.tokens(PROMPT, 8)


async def test_a_split_that_replaces_the_given_layers_while_a_worker_is_missing_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with opened(folder, is_fast_missing=True, layers=(1, 1, 2)) as (cluster, _):
        assert held(cluster) == {"coordinator": 1, "slow": 3}
    assert (
        "layers 1,1,2 need every node, and fast is missing: split as coordinator [0, 1), slow [1, 4) until it joins\n"
    ) in capsys.readouterr().err


async def test_plans_are_searched_for_beside_the_event_loop(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search over many nodes takes seconds."""
    searched: list[bool] = []

    def noted(*arguments: Any) -> Plan:
        searched.append(threading.current_thread() is threading.main_thread())
        return plan(*arguments)

    monkeypatch.setattr("coordinator.planning.planner.plan", noted)
    async with opened(whole.folder) as (cluster, fast):
        num_first = len(searched)
        async with Engine(cluster.chain, when_lost=cluster.reopen) as engine:
            live = Live(engine, request(PROMPT, 16))
            await live.wait_pieces(3)
            await fast.stop()
            await live.answer()
    assert 0 < num_first < len(searched) and not any(searched)
