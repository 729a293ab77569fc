"""A worker at several addresses: a cable that is pulled and plugged in again, and two processes of one name."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.planning.recovery import Limits
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, serving
from tests.integration.many import Live, request, tokens_of, until
from tests.integration.test_recovery import COMES_BACK, IS_GONE, Place, Rig, assert_equal, supervised, unfailed
from tests.integration.upstream import attach_request
from tools.proxy import Proxy
from tools.worker_process import free_port
from worker.config import MOST_ADDRESSES
from worker.errors import FrameError, StageLost
from worker.node.network import dial

pytestmark = pytest.mark.usefixtures("in_turns")

ASKED = request(tokens_of(5), 60)


class Cables:
    """Two ways to node-2, and one to all others."""

    def __init__(self) -> None:
        self.first = self.second = Proxy("unused:0")

    @asynccontextmanager
    async def reaching(self, place: Place) -> AsyncIterator[Sequence[str]]:
        if place.name != "node-2":
            yield [place.address]
            return
        self.first, self.second = Proxy(place.address), Proxy(place.address)
        async with self.first.serving(), self.second.serving():
            yield [self.first.address, self.second.address]

    @asynccontextmanager
    async def directly(self, place: Place) -> AsyncIterator[Sequence[str]]:
        """Nothing is between: the port of a process that has ended refuses connections."""
        yield [place.address, place.address.replace("127.0.0.1", "localhost")]


async def lose_chain(rig: Rig) -> None:
    """A chain is lost for another reason; return once the next one is open."""
    before = rig.cluster.num_recoveries
    rig.cluster.chain.peers[0].detach()
    await until(lambda: rig.cluster.num_recoveries > before)


@pytest.mark.parametrize("limits", [COMES_BACK, IS_GONE], ids=["is awaited", "is not awaited"])
async def test_a_stream_goes_on_over_the_second_cable_and_the_next_chain_over_the_first_again(
    folder: Path, limits: Limits
) -> None:
    """The hop from node-1, too: were it only the coordinator that finds node-2, there would be no chain."""
    [expected] = await unfailed(folder, [ASKED])
    cables = Cables()
    async with supervised(folder, limits, reaching=cables.reaching) as rig, rig.engine() as engine:
        last = rig.cluster.chain.peers[1]
        assert last.address == cables.first.address
        live = Live(engine, ASKED)
        await live.wait_pieces(5)
        cables.first.is_blackhole = True
        assert_equal([await live.answer()], [expected])
        assert last.address == cables.second.address
        assert rig.cluster.chain.plan.layers == [1, 2, 1]
        cables.first.is_blackhole = False
        await lose_chain(rig)
        assert last.address == cables.first.address
        assert_equal([await engine.answer(ASKED)], [expected])


async def test_an_ended_process_costs_no_wait_at_any_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.cluster.cluster.ASK_S", 20.0)
    cables = Cables()
    async with supervised(folder, IS_GONE, reaching=cables.directly) as rig, asyncio.timeout(18):
        await rig.places[1].stop()
        await rig.cluster.reopen(StageLost("closed the connection", node="node-2"))
        assert rig.cluster.chain.plan.layers == [2, 2]


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_hop_is_opened_at_the_address_that_answers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    """The first is silent, the next refuses connections, the third is the one."""
    monkeypatch.setattr("worker.node.network.REACH_S", 60.0)
    network_of = Certificates(tmp_path).of if is_encrypted else lambda name: NETWORK
    silent, refusing = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    dead = [f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, refusing)]
    refusing.close()
    async with serving(2, network_of=network_of) as nodes, AsyncExitStack() as stack:
        stack.callback(silent.close)
        peers = [node.peer(network_of("coordinator")) for node in nodes]
        first, last = (attach_request(folder) for _ in nodes)
        for stage, (peer, each) in enumerate(zip(peers, (first, last), strict=True), 1):
            stack.push_async_callback(peer.close)
            each.stage, each.num_stages = stage, 3
            each.loaded.start, each.loaded.end = 2 * stage - 2, 2 * stage
        first.loaded.start, last.predecessor_name = 1, "node-1"
        first.successor_name, first.successor = "node-2", dead[0]
        first.successor_fallbacks.extend([dead[1], nodes[1].address])
        for peer, each in zip(peers, (first, last), strict=True):
            await peer.load(each.loaded, lambda report: None)
        await peers[1].attach(last)
        async with asyncio.timeout(30):  # it waits less long than for one that may be silent
            await peers[0].attach(first)


@pytest.mark.parametrize("count", [0, MOST_ADDRESSES + 1])
async def test_a_worker_dials_as_many_addresses_as_a_configuration_can_have(count: int) -> None:
    with pytest.raises(FrameError, match=rf"^expected 1 to 8 addresses of node-2, got {count}$"):
        await dial(NETWORK, "node-2", ["127.0.0.1:9"] * count)


async def test_of_two_processes_with_one_name_the_newer_takes_part_and_the_older_is_fenced(folder: Path) -> None:
    [expected] = await unfailed(folder, [ASKED])
    newer = Place("node-2")

    @asynccontextmanager
    async def reaching(place: Place) -> AsyncIterator[Sequence[str]]:
        newer.port = newer.port or free_port()
        yield [place.address, newer.address] if place.name == "node-2" else [place.address]

    async with supervised(folder, COMES_BACK, reaching=reaching) as rig, rig.engine() as engine:
        older, last = rig.places[1], rig.cluster.chain.peers[1]
        live = Live(engine, ASKED)
        await live.wait_pieces(5)
        await newer.start()
        try:
            assert last.address == older.address, "the running chain goes on as it is"
            await lose_chain(rig)
            assert last.address == newer.address
            assert_equal([await live.answer()], [expected])
            assert older.service is not None and older.service.num_slots == 0
            await older.service.worker.wait_detached()
            await lose_chain(rig)
            said = [line for line in rig.said if line.startswith("worker node-2: two processes have this name; ")]
            assert said == [
                f"worker node-2: two processes have this name; the one at {newer.address}, which was started later, "
                f"takes part: end the one at {older.address}"
            ]
            assert_equal([await engine.answer(ASKED)], [expected])
        finally:
            await newer.stop()
