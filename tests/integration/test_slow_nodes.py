"""A node that is merely slow stays in the chain (tests/unit/cluster/test_flight.py); others do not."""

import asyncio

import pytest

from protos.brigade_pb2 import Frame, StatusReply
from tests.integration.conftest import Models, answer, opened, receive, send, serving
from tests.integration.many import tokens_of, until
from tests.integration.test_epochs import hasty
from tests.integration.upstream import window_of
from worker.errors import EngineHung, StageLost
from worker.platform import machine

ROW = Frame(epoch=1, step=51, windows=[window_of(tokens_of(1), 0)])


async def test_an_engine_that_has_been_at_its_step_for_too_long_is_named(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[float]()

    async def status(within_s: float) -> StatusReply:
        said.append((0.2, 9.0)[len(said)])
        return StatusReply(busy_s=said[-1])

    async with hasty(models, monkeypatch, []) as (chain, _):
        monkeypatch.setattr(chain.peers[0], "status", status)
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


async def test_a_worker_whose_machine_slept_leaves_the_chain_and_is_free(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept_s = 100.0
    monkeypatch.setattr(machine, "asleep_s", lambda: slept_s)
    monkeypatch.setattr(machine, "_LOOK_EVERY_S", 0.01)
    whole = models("qwen3")
    async with serving(2) as nodes:
        async with opened(whole.folder, (1, 2, 1), nodes) as chain:
            expected = (await answer(chain, tokens_of(6), 5)).tokens
            slept_s += 30
            with pytest.raises(StageLost, match=r"^worker node-[12]: .*(slept for 30 s|ended the hop)"):
                async with asyncio.timeout(60):
                    await receive(chain)
        for node in nodes:
            await until(lambda node=node: not node.service.num_slots)  # type: ignore[misc]
        async with opened(whole.folder, (1, 2, 1), nodes) as chain:
            assert (await answer(chain, tokens_of(6), 5)).tokens == expected == whole.tokens(tokens_of(6), 5)
