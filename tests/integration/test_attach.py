"""Who may load and attach, what an error leaves behind, what is loaded only once, and how a node ends."""

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.cluster.peer import COORDINATOR_ID
from coordinator.engine.engine import Engine
from protos.brigade_pb2 import Cache, Frame, Opening
from tests.integration.conftest import (
    CHUNK,
    Models,
    RunningNode,
    Whole,
    answer,
    load_request,
    opened,
    receive,
    send,
    serving,
)
from tests.integration.many import Live, limit_memory, request, tokens_of, until, wait_freed, wait_slots
from tests.integration.many import request as many_request
from tests.integration.test_copies import full_request
from tests.integration.upstream import attach_request, window_of
from tests.tiny import VOCAB, make_model
from worker.compute.shard import Shard
from worker.errors import ModelError, NodeBusy, StageLost
from worker.memory.slot_caches import Caches, LayerCache
from worker.node.hop import Link
from worker.node.lifecycle import WorkerState

PROMPT = tuple((5 * i + 3) % VOCAB for i in range(3 * CHUNK + 2))

References = list[weakref.ref[LayerCache]]


@pytest.fixture
def worker_caches(monkeypatch: pytest.MonkeyPatch) -> References:
    """Weak references to all caches of workers: what is gone is gone."""
    references: References = []
    make: Callable[..., Caches] = Shard.make_caches

    def note(shard: Shard, cache: Cache) -> Caches:
        caches = make(shard, cache)
        references.extend(weakref.ref(each) for each in caches.listed if not shard.is_first)
        return caches

    monkeypatch.setattr(Shard, "make_caches", note)
    return references


# Who may attach


async def test_attaching_to_a_node_that_holds_nothing_or_other_layers_is_refused(models: Models) -> None:
    """Two coordinators may load at the same time: the first to attach must not run on what the other one loaded."""
    folder, other = models("qwen3").folder, models("qwen3", seed=5).folder
    expected = r"^worker node-1: expected to hold layers \[2, 4\) of .*, holds "
    async with serving(1) as [node]:
        with pytest.raises(ModelError, match=rf"{expected}none by now; start again"):
            await node.attach(attach_request(folder))
        for held in (load_request(folder, 1, 3), load_request(other, 2, 4)):
            await node.load(held)
            with pytest.raises(ModelError, match=rf"{expected}\[{held.start}, {held.end}\)"):
                await node.attach(attach_request(folder))


async def test_a_second_coordinator_is_refused_and_the_first_goes_on(models: Models, whole: Whole) -> None:
    async with serving(1) as [node], opened(whole.folder, (2, 2), [node]) as chain:
        before = (await answer(chain, PROMPT, 4)).tokens
        with pytest.raises(NodeBusy, match=r"^worker node-1: already serves another coordinator"):
            await node.load(load_request(whole.folder, 2, 4))
        with pytest.raises(NodeBusy, match=r"^worker node-1: already serves another coordinator"):
            await node.attach(attach_request(models("qwen3").folder))
        assert (await answer(chain, PROMPT, 4)).tokens == before == whole.tokens(PROMPT, 4)


async def test_a_node_loads_while_the_chain_of_the_others_runs(whole: Whole) -> None:
    """It was lost, and is back: the chain goes on without it until it has loaded."""
    async with serving(2) as nodes, opened(whole.folder, (2, 2), nodes[:1]) as chain, Engine(chain) as engine:
        live = Live(engine, many_request(tokens_of(9), 60))
        await live.wait_pieces(1)
        returned = load_request(whole.folder, 1, 4)
        returned.coordinator.id = COORDINATOR_ID
        assert (await nodes[1].load(returned))[-1].phase == "load"
        states = [node.service.worker.state for node in nodes]
        assert states == [WorkerState.ATTACHED, WorkerState.LOADED]
        assert (await live.answer()).tokens == whole.tokens(tokens_of(9), 60)


async def test_a_step_that_outlasts_its_chain_counts_until_it_ends(folder: Path) -> None:
    """Or a node whose engine hangs would be asked to load again at once."""
    hangs, go_on = threading.Event(), threading.Event()
    async with serving(1) as [node], asyncio.timeout(60):
        await node.load(load_request(folder, 2, 4))
        async with node.reached() as peer:
            await peer.attach(attach_request(folder))
            stage = node.service.worker.stage
            assert stage is not None

            def hang() -> None:
                stage.busy_since = time.monotonic()  # as a step does
                hangs.set()
                go_on.wait(60)

            node.thread.post(hang)
            await asyncio.to_thread(hangs.wait, 60)
            peer.detach()
            await until(lambda: node.service.worker.stage is None)
            assert (await peer.status(1.0)).busy_s > 0
            go_on.set()
            await stage.wait_released()
            assert (await peer.status(1.0)).busy_s == 0


async def test_when_the_coordinator_is_gone_its_slots_are_too_and_another_can_attach(
    whole: Whole, worker_caches: References, without_collector: None
) -> None:
    async with serving(2) as nodes:
        async with opened(whole.folder, (1, 1, 2), nodes) as chain:
            await send(chain, Frame(epoch=1, step=51, opened=[Opening(slot=3)], windows=[window_of(PROMPT, 0, 3)]))
            await receive(chain)
            for peer in chain.peers:
                status = await peer.status(5)
                assert (status.slots, status.step) == (1, 51) and status.cache_bytes > 0
            assert any(cache() for cache in worker_caches)
        for loop in (asyncio.get_running_loop(), chain.thread.loop, *(node.thread.loop for node in nodes)):
            await until(partial(has_no_stage, loop))
        await assert_free(nodes, whole, worker_caches)


def has_no_stage(loop: asyncio.AbstractEventLoop) -> bool:
    return not [task for task in asyncio.all_tasks(loop) if "Stage." in task.get_coro().__qualname__]  # type: ignore[union-attr]


async def assert_free(nodes: Sequence[RunningNode], whole: Whole, worker_caches: References) -> None:
    """The nodes notice that their coordinator is gone, and hold no slot and no cache, but still their shards."""
    for node in nodes:
        async with node.reached() as peer, asyncio.timeout(60):
            while (status := await peer.status(5)).slots or status.cache_bytes:  # noqa: ASYNC110 - asked from outside
                await asyncio.sleep(0.01)
        assert status.weight_bytes > 0
    await until(lambda: not any(cache() for cache in worker_caches))
    async with opened(whole.folder, (1, 1, 2), nodes) as chain:
        assert (await answer(chain, PROMPT, 4)).tokens == whole.tokens(PROMPT, 4)


async def test_an_error_in_a_stage_names_its_node_and_leaves_the_nodes_usable(
    whole: Whole, monkeypatch: pytest.MonkeyPatch, worker_caches: References, without_collector: None
) -> None:
    run: Callable[..., mx.array] = Shard.__call__

    def fail(shard: Shard, x: mx.array, *more: Any) -> mx.array:
        if shard.start == 1:
            raise ModelError("no such kernel")
        return run(shard, x, *more)

    async with serving(2) as nodes:
        async with opened(whole.folder, (1, 1, 2), nodes) as chain:
            with monkeypatch.context() as patch:
                patch.setattr(Shard, "__call__", fail)
                with pytest.raises(ModelError, match=r"^worker node-1: no such kernel"):
                    await answer(chain, PROMPT, 3)
        await assert_free(nodes, whole, worker_caches)


# Loading once


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The weight files that anybody opens to read tensors."""
    files: list[str] = []
    read: Callable[..., Any] = mx.load

    def note(file: str, *args: Any, **kwargs: Any) -> Any:
        files.append(Path(file).name)
        return read(file, *args, **kwargs)

    monkeypatch.setattr(mx, "load", note)
    return files


async def test_an_equal_load_reads_nothing_whatever_a_coordinator_knows(tmp_path: Path, files_read: list[str]) -> None:
    folder = make_model(tmp_path / "model", num_files=3)
    async with serving(1) as [node]:
        assert (await node.load(load_request(folder, 2, 4)))[-1].phase == "load"
        for request in (full_request(folder, 2, 4), load_request(folder, 2, 4)):
            files_read.clear()
            [report] = await node.load(request)
            assert report.phase == "kept" and report.done == report.total > 0
            assert files_read == []
        assert (await node.load(load_request(folder, 1, 4)))[-1].done > 0
        assert files_read


async def test_a_file_that_changes_while_being_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model", num_files=2)
    file = sorted(folder.glob("*.safetensors"))[0]
    materialise: Callable[..., None] = Shard.materialise

    def replace_and_read(shard: Shard, progress: Callable[[int], None]) -> None:
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))
        materialise(shard, progress)

    async with serving(1) as [node]:
        with monkeypatch.context() as patch, pytest.raises(ModelError, match=rf"{file.name} was changed"):
            patch.setattr(Shard, "materialise", replace_and_read)
            await node.load(load_request(folder, 2, 4))
        assert (await node.load(load_request(folder, 2, 4)))[-1].phase == "load"


async def test_a_coordinator_that_leaves_while_a_node_gives_back_what_it_held_does_not_break_that_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link to the next node would stay open, and its caches where they are."""
    closing, may_go, closed = threading.Event(), threading.Event(), list[Link]()
    close = Link.close

    async def close_slowly(link: Link) -> None:
        if link.node == "node-2":
            closing.set()
            while not may_go.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.01)
        await close(link)
        closed.append(link)

    monkeypatch.setattr(Link, "close", close_slowly)
    async with serving(2) as nodes, opened(folder, (1, 2, 1), nodes) as chain:
        service, thread = nodes[0].service, nodes[0].thread
        attachment = service.worker.attachment
        assert attachment is not None and attachment.stage is not None
        stage = attachment.stage
        thread.post(partial(stage.fail, StageLost("for a reason of its own")))
        async with asyncio.timeout(60):
            await asyncio.to_thread(closing.wait, 60)
            chain.peers[0].detach()
            await service.worker.wait_detached()
            assert await thread.run(lambda: stage.executor.num_slots) == 0
            may_go.set()
            await until(lambda: any(link.node == "node-2" for link in closed))


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
        await node.load(load_request(folder, 2, 4))
        await node.service.worker.drain()
        with pytest.raises(StageLost, match="worker node-1: is shutting down"):
            await node.load(load_request(folder, 2, 4))
        with pytest.raises(StageLost, match="worker node-1: is shutting down"):
            await node.attach(attach_request(folder))
