"""A worker that is lost before there has been any chain: it is lost like any other, but for what would last."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.cluster.chain import Chain
from coordinator.cluster.peer import Peer
from coordinator.cluster.step_timeouts import ArrivedResult
from coordinator.planning.recovery import Limits
from protos.brigade_pb2 import AttachRequest
from tests.integration.conftest import Whole
from tests.integration.many import request, tokens_of
from tests.integration.test_recovery import COMES_BACK, IS_GONE, Place, supervised
from worker.errors import ModelError, StageLost
from worker.node import lifecycle
from worker.node.loading import GivenUp, load_shard
from worker.platform.threads import run_in_thread


class Loss:
    """Node-2 is lost at one moment of the first try, for good or to be started again."""

    def __init__(self, limits: Limits) -> None:
        self.has_begun = asyncio.Event()
        self._place: Place | None = None
        self._comes_back = limits is COMES_BACK

    @asynccontextmanager
    async def reaching(self, place: Place) -> AsyncIterator[Sequence[str]]:
        self._place = place  # the last is node-2
        yield [place.address]

    async def happen(self) -> None:
        if not self.has_begun.is_set():
            self.has_begun.set()
            await self.lose()

    async def lose(self) -> None:
        assert self._place is not None
        await self._place.stop()
        if self._comes_back:
            await self._place.start()


async def assert_recovers(whole: Whole, loss: Loss, limits: Limits) -> None:
    async with (
        asyncio.timeout(20),
        supervised(whole.folder, limits, reaching=loss.reaching) as rig,
        rig.engine() as engine,
    ):
        assert loss.has_begun.is_set()
        assert rig.cluster.chain.plan.layers == ([1, 2, 1] if limits is COMES_BACK else [2, 2])
        [line] = rig.said
        how = "with the same nodes" if limits is COMES_BACK else "without node-2"
        assert line.startswith("worker node-2: ") and f"; going on {how}" in line
        assert "the stream" not in line, "there was none"
        assert (await engine.answer(request(tokens_of(5), 8))).tokens == whole.tokens(tokens_of(5), 8)


@pytest.mark.parametrize("limits", [COMES_BACK, IS_GONE], ids=["comes back", "is planned around"])
async def test_a_worker_lost_while_it_loads(whole: Whole, limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Loss(limits)

    async def stuck(checkpoint: Any, start: int, *rest: Any) -> Any:
        if start < 3 or loss.has_begun.is_set():
            return await load_shard(checkpoint, start, *rest)
        loss.has_begun.set()
        await run_in_thread(rest[3].wait)  # nobody waits for the load any more
        raise GivenUp

    async def lose() -> None:
        await loss.has_begun.wait()
        await loss.lose()

    monkeypatch.setattr(lifecycle, "load_shard", stuck)
    losing = asyncio.create_task(lose())
    await assert_recovers(whole, loss, limits)
    await losing


class LettingGo(Loss):
    """Node-2 lets its layers go: others may have loaded for longer than it keeps what is unused."""

    async def lose(self) -> None:
        assert self._place is not None and self._place.service is not None
        await self._place.service.worker.release_tensors("unused for 300 s")


@pytest.mark.parametrize("kind", [Loss, LettingGo])
async def test_a_worker_that_no_longer_holds_its_layers_when_it_joins_reads_them_again(
    whole: Whole, kind: type[Loss], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks what the coordinator expects; that would be lasting of a process that had never held it."""
    loss, attach = kind(COMES_BACK), Peer.attach

    async def attach_late(peer: Peer, request: AttachRequest) -> None:
        await loss.happen()
        await attach(peer, request)

    monkeypatch.setattr(Peer, "attach", attach_late)
    await assert_recovers(whole, loss, COMES_BACK)


def lose_in_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> Loss:
    loss, receive, main = Loss(IS_GONE), Chain.receive, asyncio.get_running_loop()

    async def receive_late(chain: Chain) -> ArrivedResult:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(loss.happen(), main))
        return await receive(chain)

    monkeypatch.setattr(Chain, "receive", receive_late)
    return loss


async def test_a_worker_that_is_lost_in_the_warm_up(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    await assert_recovers(whole, lose_in_the_warm_up(monkeypatch), IS_GONE)


async def test_no_time_for_a_recovery_means_none_for_the_first_try(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = lose_in_the_warm_up(monkeypatch)
    with pytest.raises(StageLost, match=r"^worker node-2: "):
        async with supervised(whole.folder, Limits(0, 0), reaching=loss.reaching):
            pass


async def test_what_would_last_ends_the_first_try_at_once(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise ModelError("its config.json differs")

    monkeypatch.setattr(lifecycle, "check_load_request", refuse)
    async with asyncio.timeout(10):
        with pytest.raises(ModelError, match=r"^worker node-[12]: its config.json differs$"):
            async with supervised(whole.folder, COMES_BACK):
                pass
