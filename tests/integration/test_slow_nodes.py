"""A node that is merely slow stays in the chain; one whose engine hangs does not."""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from coordinator.cluster.chain import Chain
from protos.brigade_pb2 import Frame, StatusReply
from tests.integration.conftest import Models, receive, send
from tests.integration.many import tokens_of, until
from tests.integration.test_epochs import hasty, loaded
from tests.integration.upstream import window_of
from worker.compute.batching import LaneWindow
from worker.compute.shard import Shard
from worker.errors import EngineHung

SILENCE_S = "coordinator.cluster.step_timeouts._SILENCE_S"
ROW = Frame(epoch=1, step=51, windows=[window_of(tokens_of(1), 0)])


async def test_a_chain_whose_chunks_take_longer_than_a_silence_opens(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker takes long for each chunk of the warm-up, the second one as the first; both waits leave seconds."""
    forward, chunks = Shard.__call__, list[int]()

    def slowly(shard: Shard, x: mx.array, places: Sequence[LaneWindow], *more: mx.array | None) -> mx.array:
        if shard.is_last and x.shape[1] > 1:
            chunks.append(x.shape[1])
            monkeypatch.setattr(SILENCE_S, 1.5)
            time.sleep(1.6)  # at work
        elif shard.is_last:
            monkeypatch.setattr(SILENCE_S, 6.0)
        return forward(shard, x, places, *more)

    monkeypatch.setattr(Shard, "__call__", slowly)
    async with loaded(models("qwen3").folder, (2, 2)) as cluster:
        await cluster.open()
    assert chunks == [64, 64]


def says(chain: Chain, monkeypatch: pytest.MonkeyPatch, busy_s: Callable[[int], float]) -> list[float]:
    """Have the worker say for how long its engine has been at its step; what it said, answer by answer."""
    said = list[float]()

    async def status(within_s: float) -> StatusReply:
        said.append(busy_s(len(said)))
        return StatusReply(busy_s=said[-1])

    monkeypatch.setattr(chain.peers[0], "status", status)
    return said


async def test_an_engine_that_began_only_just_now_is_waited_for(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have used up the time before: each engine has its own."""
    async with hasty(models, monkeypatch, []) as (chain, release):

        def busy_s(times: int) -> float:
            if times == 2:
                monkeypatch.setattr(SILENCE_S, 6.0)
                release()
            return 0.2

        said = says(chain, monkeypatch, busy_s)
        await send(chain, ROW)
        assert (await receive(chain)).result.step == 51
        assert len(said) >= 3


async def test_an_engine_that_has_been_at_its_step_for_too_long_is_named(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hasty(models, monkeypatch, []) as (chain, _):
        said = says(chain, monkeypatch, lambda times: (0.2, 9.0)[times])
        await send(chain, ROW)
        with pytest.raises(EngineHung, match=r"^worker node-1: its engine has been at one step for 9\.0 s$"):
            await receive(chain)
        assert said == [0.2, 9.0]


async def test_a_result_that_comes_while_nodes_are_asked_is_taken(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hasty(models, monkeypatch, []) as (chain, release):

        async def status(within_s: float) -> StatusReply:
            release()
            await until(lambda: chain.still_since is None)
            return StatusReply()

        monkeypatch.setattr(chain.peers[0], "status", status)
        await send(chain, ROW)
        assert (await receive(chain)).result.step == 51
