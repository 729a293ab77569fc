"""What a node holds: within the plan's figures, kept by layers, and released when it is unused."""

import asyncio
import io
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from coordinator.cluster.deployment import Deployment, OwnCopy, OwnNode
from coordinator.cluster.local import LocalWorker
from coordinator.decoding.decode_options import make_cache_choice
from coordinator.engine.engine import Engine
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from protos.brigade_pb2 import Coordinator, LoadProgress
from tests.integration.conftest import Models, RunningNode, Whole, answer, load_request, opened, running, serving
from tests.integration.many import request, tokens_of, until
from tests.integration.upstream import attach_request
from tests.tiny import make_model
from worker.compute.shard import Shard
from worker.errors import ModelError, NodeBusy, StageLost
from worker.model.checkpoint import open_folder
from worker.model.contents import contents_of
from worker.model.describe import describe
from worker.node import lifecycle
from worker.node.lifecycle import WorkerState
from worker.platform.mlx_memory import give_back, memory_held
from worker.platform.threads import MlxThread

PROMPT = (1, 2, 3)


def shard_of(node: RunningNode) -> weakref.ref[Shard]:
    assert node.service.worker.shard is not None
    return weakref.ref(node.service.worker.shard)


async def unload(node: RunningNode, coordinator: str) -> None:
    async with node.reached() as peer:
        await peer.unload(Coordinator(id=coordinator, name=coordinator))


async def test_a_worker_keeps_to_what_the_plan_gives_it_whether_it_loads_or_keeps(folder: Path) -> None:
    give_back()  # what another test of this process has been held to
    usual = mx.get_memory_limit()
    request = load_request(folder, 2, 4)
    async with serving(1) as [node]:
        for memory_bytes, phase in ((123 << 20, "load"), (234 << 20, "kept"), (0, "kept"), (123 << 20, "kept")):
            request.memory_bytes = memory_bytes
            assert (await node.load(request))[-1].phase == phase
            assert mx.get_memory_limit() == (memory_bytes or usual)
        await unload(node, request.coordinator.id)
        assert mx.get_memory_limit() == usual


async def test_the_peak_is_that_of_the_latest_request(whole: Whole) -> None:
    async with serving(1) as [node], opened(whole.folder, (2, 2), [node]) as chain:
        large_bytes, held = 64 << 20, mx.get_active_memory()  # what other tests of this process hold, too
        mx.eval(large := mx.zeros(large_bytes, dtype=mx.uint8))
        del large
        assert min(status.peak_memory_bytes for status in await chain.statuses()) > large_bytes
        await answer(chain, PROMPT, 3)
        own, theirs = await chain.statuses()
        for status in (own, theirs):
            assert status.active_memory_bytes <= status.peak_memory_bytes < held + large_bytes
            assert status.active_memory_bytes >= status.weight_bytes


async def test_a_shard_is_held_in_use_let_go_and_read_again(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = models("qwen3"), io.StringIO()
    references = []
    async with serving(1, out=out) as [node], node.service.worker.keep_alive(0.02):
        for _ in range(2):
            async with opened(whole.folder, (2, 2), [node]) as chain:
                references.append(shard_of(node))
                assert (await answer(chain, PROMPT, 3)).tokens == whole.tokens(PROMPT, 3)
                assert references[-1]() is not None
            del chain
            await until(lambda: references[-1]() is None)
        assert node.service.worker.shard is None
        monkeypatch.setattr(lifecycle, "RESERVED_S", 0.02)  # nobody attaches what is loaded now
        await node.load(load_request(whole.folder, 2, 4))
        await until(lambda: node.service.worker.shard is None)
        with pytest.raises(StageLost, match=r"^worker node-1: has released its layers meanwhile"):
            await node.attach(attach_request(whole.folder))
    assert out.getvalue().count(": unused for 0.02 s; the next load reads it again\n") == 3


async def test_what_is_loaded_is_held_for_its_coordinator_until_that_has_let_go_of_it(models: Models) -> None:
    """It waits for workers that load more slowly."""
    whole, out = models("qwen3"), io.StringIO()
    request = load_request(whole.folder, 2, 4)
    request.coordinator.CopyFrom(Coordinator(id="one", name="one"))
    async with serving(1, out=out) as [node], node.service.worker.keep_alive(0.001):
        await node.load(request)
        with pytest.raises(NodeBusy, match="loaded its layers for another coordinator"):
            await unload(node, "another")
        assert node.service.worker.is_reserved and shard_of(node)() is not None
        async with opened(whole.folder, (2, 2), [node]):
            with pytest.raises(NodeBusy, match="already serves another coordinator"):
                await unload(node, "another")
            assert shard_of(node)() is not None
        await until(lambda: node.service.worker.shard is None)
        await node.load(request)
        await unload(node, "one")
        assert node.service.worker.shard is None
    assert out.getvalue().count("kept layers") == 1


@pytest.mark.parametrize("loads", [False, True])
async def test_memory_is_given_back_or_needed_only_once_the_step_of_a_left_chain_holds_none(
    models: Models, loads: bool, monkeypatch: pytest.MonkeyPatch, without_collector: None
) -> None:
    folder, other = models("qwen3").folder, models("llama").folder
    held, computes, go_on = list[bool](), threading.Event(), threading.Event()
    async with serving(1) as [node], asyncio.timeout(60):
        await node.load(load_request(folder, 2, 4))
        shard = shard_of(node)

        def noted(call: Callable[..., Any], *args: Any) -> Any:
            held.append(shard() is not None)
            return call(*args)

        for name in ("give_back", "load_shard"):
            monkeypatch.setattr(lifecycle, name, partial(noted, getattr(lifecycle, name)))
        async with node.reached() as peer:
            await peer.attach(attach_request(folder))
            node.thread.post(lambda: (computes.set(), go_on.wait(60)))  # as a step does
            await asyncio.to_thread(computes.wait, 60)
            peer.detach()
            await node.service.worker.wait_detached()
            needing = asyncio.create_task(node.load(load_request(other, 2, 4)) if loads else unload(node, ""))
            await asyncio.sleep(0.1)  # by now it waits for that step
            go_on.set()
            await needing
    assert held[0] is False


async def test_reservations_end_with_time_layers_or_failed_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or another coordinator could not unload the worker for hours."""
    request, wrong = load_request(folder, 2, 4), load_request(folder, 2, 4)
    request.coordinator.id = wrong.coordinator.id = "one"
    wrong.num_layers = 5
    async with serving(1) as [node]:
        for has_loaded in (False, True):
            if has_loaded:
                await node.load(request)
                assert node.service.worker.is_reserved
            with pytest.raises(ModelError, match=r"its copy of .* has 4"):
                await node.load(wrong)
            assert not node.service.worker.is_reserved
        await unload(node, "another")
        await node.load(request)
        await unload(node, "one")
        assert not node.service.worker.is_reserved
        await node.load(request)
        assert node.service.worker.is_reserved
        monkeypatch.setattr(lifecycle, "RESERVED_S", 0.0)
        await node.load(request)
        await unload(node, "another")
        assert node.service.worker.state is WorkerState.EMPTY


# --- what is kept ---------------------------------------------------------------------------------------------------


def tensors_of(node: RunningNode) -> dict[str, mx.array]:
    assert node.service.worker.shard is not None
    return dict(node.service.worker.shard.tensors)


@pytest.mark.parametrize("embeds_last", [False, True])  # True: a draft head reads the embedding there
async def test_a_node_keeps_the_layers_that_it_has_when_it_is_given_others(folder: Path, embeds_last: bool) -> None:
    request = load_request(folder, 1, 3)
    async with serving(1) as [node]:
        await node.load(request)
        before = tensors_of(node)
        request.start, request.end, request.embeds_last = 2, 4, embeds_last
        await node.load(request)
        after = tensors_of(node)
    assert {name.split(".")[2] for name in before if before[name] is after.get(name)} == {"2"}
    assert ("model.embed_tokens.weight" in after) == embeds_last


@pytest.mark.parametrize("is_other_model", [True, False], ids=["another model", "other files"])
async def test_nothing_is_kept_of_another_model_or_changed_files(tmp_path: Path, is_other_model: bool) -> None:
    folder = make_model(tmp_path / "model")
    async with serving(1) as [node]:
        await node.load(load_request(folder, 1, 3))
        before = tensors_of(node)
        changed = make_model(tmp_path / "other" if is_other_model else folder, seed=2)
        request = load_request(changed, 2, 4)
        request.contents.CopyFrom(contents_of(open_folder(changed)))
        await node.load(request)
        after = tensors_of(node)
    assert before.keys() & after.keys()
    assert not any(after[name] is before[name] for name in before.keys() & after.keys())


# --- nodes on this machine ------------------------------------------------------------------------------------------


def deployment_of(folder: Path) -> Deployment:
    checkpoint = open_folder(folder)
    spec = describe(checkpoint)
    return Deployment(checkpoint, plan(spec, [Node("coordinator", 1 << 40)], NO_SPEEDS, Objective(128)), [])


async def test_a_shard_is_kept_only_for_the_checkpoint_that_it_is_of(tmp_path: Path) -> None:
    one, other = (deployment_of(make_model(tmp_path / str(seed), seed=seed)) for seed in (1, 2))
    assert one.plan.layers == other.plan.layers
    phases: list[str] = []

    def note(node: str, report: LoadProgress) -> None:
        if report.phase == "kept" or phases[-1:] != [report.phase]:
            phases.append(report.phase)

    async with OwnNode() as own:
        for deployment in (one, one, other, other):
            await own.load(deployment, note)
    assert phases == ["load", "kept", "load", "kept"]


async def test_a_coordinator_mixes_no_layers_with_those_of_files_that_were_changed_meanwhile(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    whole = deployment_of(folder)
    async with OwnNode() as own:
        await own.load(whole)
        make_model(folder, seed=2)
        await own.load(whole)  # it reads nothing
        spec, nodes = whole.spec, [Node(name, 1 << 40) for name in ("coordinator", "mini")]
        fewer = plan(spec, nodes, NO_SPEEDS, Objective(128, layers=(2, 2)))
        with pytest.raises(ModelError, match="was changed"):
            await own.load(replace(whole, plan=fewer))
    with pytest.raises(ModelError, match="was changed"):
        await OwnCopy.of(whole.checkpoint)


async def test_a_coordinator_takes_nothing_of_a_file_that_is_changed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = deployment_of(make_model(tmp_path / "model"))
    materialise: Callable[..., None] = Shard.materialise

    def replace_and_read(shard: Shard, progress: Callable[[int], None]) -> None:
        make_model(tmp_path / "model", seed=2)
        materialise(shard, progress)

    monkeypatch.setattr(Shard, "materialise", replace_and_read)
    async with OwnNode() as own:
        with pytest.raises(ModelError, match="was changed"):
            await own.load(deployment)
        assert own.shard is None


async def test_a_thread_that_others_use_too_outlives_the_node() -> None:
    with closing(MlxThread()) as thread:
        async with OwnNode(thread):
            pass
        assert await thread.run(lambda: 3) == 3
    async with OwnNode() as own:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        await own.thread.run(lambda: 3)


@pytest.mark.parametrize("search_path", [None, ":"])
async def test_a_worker_of_our_own_runs_no_code_of_the_folder_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search_path: str | None
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not what was meant')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if search_path is not None:
        monkeypatch.setenv("PYTHONPATH", search_path)
    worker = await LocalWorker.start("worker-1", "demo")
    await worker.stop()


@pytest.mark.parametrize("kind", ["full", pytest.param("int8", marks=pytest.mark.long)])
async def test_prompt_chunks_shrink_as_attention_takes_more_memory(models: Models, kind: str) -> None:
    cache = make_cache_choice(kind, None)
    config = {"num_attention_heads": 32, "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 2048}
    folder = models("qwen3", config=config).folder
    asked, peaks, found = request(tokens_of(600), 2, cache=cache), [], []
    for memory_bytes in (1 << 40, 8 << 20):
        async with running(folder, (1, 1), is_measured=True) as chain:
            nodes = [replace(node, memory_bytes=memory_bytes) for node in chain.plan.assignments]
            chain.plan = replace(chain.plan, assignments=nodes)
            async with Engine(chain) as engine:
                held = memory_held().active
                found.append((await engine.answer(asked, chunk=2048)).tokens)
                peaks.append(memory_held().peak - held)
    assert found[0] == found[1]
    assert peaks[1] < 2 * 8 << 20 < peaks[0] / 3  # two stages are in this process
