"""A node that is about to end: running requests finish, waiting ones are refused, kept prefixes cause no delay."""

import asyncio
from pathlib import Path

import pytest

from coordinator.engine.engine import Engine
from tests.integration.conftest import Whole, attach, load, load_request, opened, serving
from tests.integration.many import Live, limit_memory, request, tokens_of, until, wait_freed, wait_slots
from tests.integration.upstream import attach_request
from worker.errors import NodeBusy

LONG = 150  # tokens


@pytest.mark.parametrize("draining", [0, pytest.param(1, marks=pytest.mark.matrix)])
async def test_running_sessions_finish_and_no_other_begins(whole: Whole, draining: int) -> None:
    refusal = rf"^worker node-{draining + 1}: is shutting down and takes no new request"
    async with serving(2) as nodes, opened(whole.folder, (1, 2, 1), nodes) as chain, asyncio.timeout(30):
        limit_memory(chain, LONG + 50)
        async with Engine(chain) as engine:
            running = Live(engine, request(tokens_of(3), LONG))
            waiting = [Live(engine, request(tokens_of(3, i), LONG)) for i in (1, 2)]
            await running.wait_pieces(2)
            drain = asyncio.create_task(nodes[draining].service.worker.drain())
            for each in waiting:
                with pytest.raises(NodeBusy, match=refusal):
                    await each.answer()
            with pytest.raises(NodeBusy, match=refusal):
                await engine.answer(request(tokens_of(3, 3), 3))
            assert not drain.done()
            assert (await running.answer()).tokens == whole.tokens(tokens_of(3), LONG)
            await drain
            await wait_freed(chain)  # and it is not kept for its prefix


@pytest.mark.parametrize("draining", [pytest.param(0, marks=pytest.mark.matrix), 1])
async def test_kept_prefixes_are_let_go_at_once(folder: Path, draining: int) -> None:
    """Nothing else would free them: their coordinator keeps its engine open, and it gets no request."""
    async with serving(2) as nodes, opened(folder, (1, 2, 1), nodes) as chain, Engine(chain) as engine:
        for seed in range(3):
            await engine.answer(request(tokens_of(20, seed), 3))
        await wait_slots(chain, 3)
        async with asyncio.timeout(9):  # less than what a drain may take
            await nodes[draining].service.worker.drain()
        assert nodes[draining].service.num_slots == 0
        await wait_freed(chain)


async def test_an_idle_chain_takes_no_request_either(folder: Path) -> None:
    async with serving(1) as [node], opened(folder, (2, 2), [node]) as chain:
        await node.service.worker.drain()
        await until(lambda: chain.draining)
        async with Engine(chain) as engine:
            with pytest.raises(NodeBusy, match="worker node-1: is shutting down"):
                await engine.answer(request(tokens_of(3), 3))


async def test_a_node_that_drains_takes_neither_a_load_nor_a_place_in_a_chain(folder: Path) -> None:
    async with serving(1) as [node]:
        await load(node, load_request(folder, 2, 4))
        await node.service.worker.drain()
        with pytest.raises(NodeBusy, match="worker node-1: is shutting down"):
            await load(node, load_request(folder, 2, 4))
        with pytest.raises(NodeBusy, match="worker node-1: is shutting down"):
            await attach(node, attach_request(folder))
