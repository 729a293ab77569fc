"""Requests and runners that are given up: nothing waits for ever, and the chain serves the next request."""

import asyncio
import threading
from pathlib import Path

import pytest

from coordinator.engine.engine import Engine
from tests.integration.conftest import Models, opened, running, serving
from tests.integration.many import Live, request, solo, tokens_of, wait_freed
from worker.errors import NodeBusy, StageLost

FOREVER = 400  # tokens


@pytest.mark.parametrize("busy", [pytest.param(0, marks=pytest.mark.matrix), 1])
async def test_a_hundred_cancels_while_a_stage_is_busy_do_not_flood_the_chain(folder: Path, busy: int) -> None:
    release = threading.Event()
    async with (
        serving(1) as [node],
        opened(folder, (2, 2), [node]) as chain,
        asyncio.timeout(20),
        Engine(chain) as engine,
    ):
        live = [Live(engine, request(tokens_of(3, i), FOREVER)) for i in range(100)]
        other = Live(engine, request(tokens_of(3, 101), 100))
        for each in (other, *live):
            await each.wait_pieces(1)
        held = asyncio.create_task((chain.thread, node.thread)[busy].run(lambda: release.wait(8)))
        for each in live:
            each.task.cancel()
        outcomes = await asyncio.gather(*(each.task for each in live), return_exceptions=True)
        release.set()
        await held
        assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
        assert len((await other.answer()).tokens) == 100


@pytest.mark.parametrize("error", [None, KeyError("x")])
async def test_leaving_the_engine_fails_its_requests_and_frees_slots(models: Models, error: Exception | None) -> None:
    async with running(models("qwen3").folder, (2, 2)) as chain:
        live: list[Live] = []
        try:
            async with Engine(chain) as engine:
                live += [Live(engine, request(tokens_of(3, i), FOREVER)) for i in range(3)]
                await live[-1].wait_pieces(2)
                if error:
                    raise error
        except KeyError as raised:
            assert raised is error
        outcomes = await asyncio.wait_for(asyncio.gather(*(each.task for each in live), return_exceptions=True), 3)
        assert {type(outcome) for outcome in outcomes} == {NodeBusy}
        await wait_freed(chain)
        [answer] = await solo(chain, [request(tokens_of(30), 8)])
        assert answer.tokens == models("qwen3").tokens(tokens_of(30), 8)


async def test_an_engine_that_shuts_down_or_has_shut_down_refuses_requests(folder: Path) -> None:
    async with running(folder, (2, 2)) as chain:
        async with Engine(chain) as engine:
            live = Live(engine, request(tokens_of(3), FOREVER))
            await live.wait_pieces(2)
            leaving = asyncio.create_task(engine.__aexit__(None))
            await asyncio.wait([live.task])
            assert not leaving.done()
            with pytest.raises(StageLost, match="has shut down"):
                await asyncio.wait_for(engine.answer(request(tokens_of(4), 3)), 3)
            await leaving
        with pytest.raises(StageLost, match="has shut down"):
            await asyncio.wait_for(engine.answer(request(tokens_of(4), 3)), 3)
        await wait_freed(chain)
