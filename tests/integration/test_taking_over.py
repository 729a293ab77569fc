"""A node and its one coordinator: that one may come again at once, no other may; and who stands where in a chain."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.cluster.peer import COORDINATOR_ID, Peer
from protos.brigade_pb2 import Alternative, AttachRequest, Coordinator, Report, Result, ResultsRequest, Sample
from protos.brigade_pb2_grpc import HopStub
from tests.integration.conftest import NETWORK, RunningNode, Whole, answer, load_request, opened, serving
from tests.integration.many import until
from tests.integration.upstream import attach_request
from tests.tiny import VOCAB
from tools.worker_process import address_with_hops
from worker.errors import FrameError, NodeBusy, StageLost
from worker.node.hop import results
from worker.node.network import hop_address

PROMPT = tuple((5 * i + 3) % VOCAB for i in range(20))
ME = Coordinator(id=COORDINATOR_ID, name="max")
HUGE = Result(step=1, samples=[Sample(alternatives=[Alternative(token=7, logprob=0.5)] * 200_000)])


def attaching(folder: Path, epoch: int = 1, coordinator: Coordinator = ME) -> AttachRequest:
    request = attach_request(folder)
    request.epoch = epoch
    request.coordinator.CopyFrom(coordinator)
    return request


@asynccontextmanager
async def attached(
    node: RunningNode, folder: Path, epoch: int = 1, coordinator: Coordinator = ME
) -> AsyncIterator[Peer]:
    """A node that holds layers [2, 4) and belongs to a chain of this process that is no longer used."""
    await node.load(load_request(folder, 2, 4))
    async with node.reached() as peer:
        await peer.attach(attaching(folder, epoch, coordinator))
        yield peer


@pytest.mark.parametrize("unread", [0, 40])
async def test_the_same_coordinator_opens_its_chain_again_over_its_own_attachment(whole: Whole, unread: int) -> None:
    """Even where the old stream is stuck, because it is not read: forty results of 2 MB are more than gRPC takes."""
    async with serving(1) as [node], attached(node, whole.folder) as old, AsyncExitStack() as stack:
        stage = node.service.worker.stage
        assert stage is not None
        hops = await stack.enter_async_context(NETWORK.channel(node.name, hop_address(node.address)))
        reports = HopStub(hops).Results(ResultsRequest(epoch=1, coordinator_id=COORDINATOR_ID))
        await node.thread.run(partial(stage.deliver, HUGE))
        await reports.read()  # the call has reached the old stage
        for _ in range(unread):
            await node.thread.run(partial(stage.deliver, HUGE))
        async with opened(whole.folder, (2, 2), [node]) as chain:
            assert (await answer(chain, PROMPT, 4)).tokens == whole.tokens(PROMPT, 4)
            if not unread:
                with pytest.raises(StageLost, match=r"^worker node-1: was attached again by the same coordinator"):
                    await old.watch()
                with pytest.raises(grpc.RpcError, match="left the chain"):
                    await reports.read()
            assert (await answer(chain, PROMPT, 4)).tokens == whole.tokens(PROMPT, 4)


async def test_it_may_do_so_in_the_same_epoch_or_a_later_one_and_not_in_an_earlier_one(folder: Path) -> None:
    async with serving(1) as [node], attached(node, folder, epoch=5) as old:
        with pytest.raises(FrameError, match=r"^worker node-1: expected epoch 5 or a later one, got 4"):
            await node.attach(attaching(folder, 4))
        for other in (Coordinator(id="another", name="max"), Coordinator(name="max")):
            with pytest.raises(NodeBusy, match=r"^worker node-1: already serves another coordinator"):
                await node.attach(attaching(folder, 6, other))
        late = asyncio.ensure_future(old.watch())
        await asyncio.wait([late], timeout=0.05)
        assert not late.done()
        await node.attach(attaching(folder, 5))
        with pytest.raises(StageLost, match="attached again"):
            await late
        await node.attach(attaching(folder, 6))
    async with serving(1) as [node], attached(node, folder, coordinator=Coordinator()):
        with pytest.raises(NodeBusy):  # two coordinators that say no name are not the same
            await node.attach(attaching(folder, coordinator=Coordinator()))


async def test_it_may_do_so_while_the_node_still_tries_to_reach_the_next_stage(whole: Whole) -> None:
    request = attaching(whole.folder)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        request.loaded.CopyFrom(load_request(whole.folder, 1, 3))
        request.successor, request.successor_name = address_with_hops(silent.getsockname()[1]), "air"
        request.num_stages = 3
        async with serving(1) as [node]:
            await node.load(request.loaded)
            first = asyncio.create_task(node.attach(request))
            await until(lambda: node.service.worker.attachment)
            async with opened(whole.folder, (2, 2), [node]) as chain:
                assert (await answer(chain, PROMPT, 4)).tokens == whole.tokens(PROMPT, 4)
                with pytest.raises(StageLost, match="attached again"):
                    await first


@pytest.mark.parametrize(
    ("layers", "stage", "successor", "message"),
    [
        ((2, 4), 1, "127.0.0.1:9", r"expected no next stage after layers \[2, 4\) of 4, got 127.0.0.1:9"),
        ((1, 3), 1, "", r"expected a next stage after layers \[1, 3\) of 4, got none"),
        ((1, 3), 2, "127.0.0.1:9", r"expected no next stage after stage 2 of 3, got 127.0.0.1:9"),
        ((2, 4), 1, "", r"expected a next stage after stage 1 of 3, got none"),
        ((2, 4), 0, "", r"expected a stage after the first of 3, got stage 0"),
        ((2, 4), 3, "", r"expected a stage after the first of 3, got stage 3"),
    ],
)
async def test_a_shard_in_the_wrong_place_of_the_chain_is_refused(
    folder: Path, layers: tuple[int, int], stage: int, successor: str, message: str
) -> None:
    loaded = load_request(folder, *layers)
    async with serving(1) as [node]:
        await node.load(loaded)
        with pytest.raises(FrameError, match=f"^worker node-1: {message}$"):
            await node.attach(AttachRequest(epoch=1, stage=stage, num_stages=3, loaded=loaded, successor=successor))


@pytest.mark.parametrize("of_prompts", [False, True])
async def test_results_are_reported_only_to_the_coordinator_that_has_attached_the_node_and_of_its_epoch(
    folder: Path, *, of_prompts: bool
) -> None:
    found: list[Report] = []

    async def report(epoch: int = 5, coordinator_id: str = COORDINATOR_ID) -> None:
        asked = NETWORK, node.name, node.address, epoch, coordinator_id
        await results(*asked, lambda report, data: found.append(report), of_prompts=of_prompts)

    async def refused(**asked: Any) -> str:
        with pytest.raises(FrameError) as caught:
            await report(**asked)
        assert not found
        return str(caught.value)

    async with serving(1) as [node], asyncio.timeout(60):
        assert (await refused()).startswith("worker node-1: is not part of a chain")
        async with attached(node, folder, epoch=5):
            expected = "worker node-1: expected its coordinator to ask for the results of epoch 5"
            assert await refused(epoch=4) == await refused(epoch=6) == expected
            assert await refused(coordinator_id="another") == await refused(coordinator_id="") == expected
            reporting = asyncio.create_task(report())
            _, waiting = await asyncio.wait([reporting], timeout=0.05)
            assert waiting == {reporting}
        with pytest.raises(StageLost, match=r"^worker node-1: left the chain$"):
            await reporting
