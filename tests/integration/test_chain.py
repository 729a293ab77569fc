"""What the nodes of a chain do for each other, and what they refuse: real gRPC ends, hand-made frames."""

import asyncio
import gc
import math
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from coordinator.peer import Peer
from coordinator.scheduler import Scheduler
from coordinator.session import Session
from protos.brigade_pb2 import (
    DTYPE_BFLOAT16,
    DTYPE_FLOAT32,
    DTYPE_UNSPECIFIED,
    AttachRequest,
    Cache,
    Frame,
    Result,
    Sampling,
    Tensor,
    Window,
)
from protos.brigade_pb2 import Session as Opening
from tests.integration.conftest import (
    CHUNK,
    Models,
    RunningNode,
    answer,
    load,
    load_request,
    opened,
    running,
    serving,
)
from tests.tiny import VOCAB, make_model
from worker.cache import LayerCache
from worker.errors import BrigadeError, CacheMismatch, FrameError, ModelError, NodeBusy
from worker.history import History
from worker.link import Link
from worker.shard import Shard

PROMPT = tuple((5 * i + 3) % VOCAB for i in range(3 * CHUNK + 2))
D = 64

Caches = list[weakref.ref[LayerCache]]


class Upstream:
    """The test as stage 0 before one real worker, which holds the rest of the model."""

    def __init__(self, peer: Peer, link: Link) -> None:
        self._peer = peer
        self._link = link
        self._results = peer.results()

    async def send(self, frame: Frame) -> None:
        await self._link.send(frame)

    async def next_result(self) -> Result:
        async with asyncio.timeout(10):
            return await anext(self._results)

    async def wait_refused(self) -> None:
        """Raises what the worker refuses the hop with."""
        async with asyncio.timeout(10):
            await self._link.wait_lost()


def attach_request(folder: Path) -> AttachRequest:
    """As stage 1 of epoch 1, holding layers [2, 4)."""
    return AttachRequest(epoch=1, stage=1, loaded=load_request(folder, 2, 4))


@asynccontextmanager
async def feeding(folder: Path, epoch: int = 1, stage: int = 0) -> AsyncIterator[Upstream]:
    """A worker that holds layers [2, 4) as stage 1 of epoch 1, and a hop into it that claims `epoch` and `stage`."""
    async with serving(1) as [node]:
        await load(node, load_request(folder, 2, 4))
        async with AsyncExitStack() as stack:
            peer = node.peer()
            stack.push_async_callback(peer.close)
            await peer.attach(attach_request(folder))
            link = Link(node.name, node.address, epoch, stage)
            stack.push_async_callback(link.close)
            await link.wait_open()
            yield Upstream(peer, link)


def frame(step: int, tokens: list[int], before: tuple[int, ...] = (), **changes: Any) -> Frame:
    """A sound frame into stage 1: slot 0 goes on after the tokens `before` by `tokens`."""
    window = window_of((*before, *tokens), len(before))
    sound = Frame(
        epoch=1, step=step, opened=[] if before else [Opening(slot=0)], windows=[window], hidden=zeros(tokens)
    )
    sound.MergeFrom(Frame(**changes))
    return sound


def window_of(tokens: tuple[int, ...], base: int, slot: int = 0) -> Window:
    """The window that feeds `tokens[base:]` and wants the last row's token."""
    prefix_hash = History(tokens).prefix_hash(base)
    return Window(slot=slot, base=base, prefix_hash=prefix_hash, tokens=tokens[base:], wanted=1)


def zeros(tokens: list[int]) -> Tensor:
    return tensor([1, len(tokens), D])


def tensor(shape: list[int], dtype: int = DTYPE_FLOAT32, num_bytes: int | None = None) -> Tensor:
    size = 4 if dtype == DTYPE_FLOAT32 else 2
    return Tensor(dtype=dtype, shape=shape, data=bytes(math.prod(shape) * size if num_bytes is None else num_bytes))


@pytest.fixture
def shard_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first layer, rows) of every forward pass of any shard."""
    calls: list[tuple[int, int]] = []
    run: Callable[..., mx.array] = Shard.__call__

    def count(shard: Shard, x: mx.array, caches: Any, positions: mx.array | None) -> mx.array:
        calls.append((shard.start, x.shape[1]))
        return run(shard, x, caches, positions)

    monkeypatch.setattr(Shard, "__call__", count)
    return calls


@pytest.fixture
def worker_caches(monkeypatch: pytest.MonkeyPatch) -> Caches:
    """Weak references to all caches of workers: what is gone is gone."""
    references: Caches = []
    make: Callable[..., list[LayerCache]] = Shard.make_caches

    def note(shard: Shard, cache: Cache) -> list[LayerCache]:
        caches = make(shard, cache)
        references.extend(weakref.ref(cache) for cache in caches if not shard.is_first)
        return caches

    monkeypatch.setattr(Shard, "make_caches", note)
    return references


@pytest.fixture
def head_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every multiplication by a head, which is the only matrix with a row per vocabulary entry."""
    rows: list[int] = []
    multiply: Callable[..., mx.array] = nn.Linear.__call__

    def count(linear: nn.Linear, x: mx.array) -> mx.array:
        if linear.weight.shape[0] == VOCAB:
            rows.append(math.prod(x.shape[:-1]))
        return multiply(linear, x)

    monkeypatch.setattr(nn.Linear, "__call__", count)
    return rows


# In flight


@pytest.mark.parametrize("layers", [(2, 2), (1, 2, 1)])
async def test_stage_0_starts_the_next_prompt_chunks_before_the_first_result_is_back(
    models: Models, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]
) -> None:
    """The last stage is held until stage 0 has begun the third chunk: were chunks sent one by one, it never would."""
    begun = threading.Event()
    chunks = []
    run: Callable[..., mx.array] = Shard.__call__

    def count(shard: Shard, x: mx.array, caches: Any, positions: mx.array | None) -> mx.array:
        if shard.is_first:
            chunks.append(x.shape[1])
            if len(chunks) == 3:
                begun.set()
        return run(shard, x, caches, positions)

    async with serving(len(layers) - 1) as nodes, opened(models("qwen3").folder, layers, nodes) as chain:
        monkeypatch.setattr(Shard, "__call__", count)
        held = asyncio.create_task(nodes[-1].thread.run(lambda: begun.wait(5)))
        found = await answer(chain, PROMPT, 3)
        assert await held, "the third chunk waited for the result of the first"
        assert chunks[:4] == [8, 8, 8, 2]
        assert found.tokens == models("qwen3").tokens(PROMPT, 3)
        third_began, first_was_back = found.passages[2].timings[0].started, found.passages[0].returned
        assert third_began < first_was_back


async def test_one_session_decodes_one_frame_at_a_time(models: Models) -> None:
    async with running(models("qwen3").folder, (2, 2)) as chain:
        passages = (await answer(chain, (1,), 6)).passages
    assert len(passages) == 6
    for earlier, later in pairwise(passages):
        assert later.timings[0].received >= earlier.returned


async def test_sessions_in_flight_together_each_get_their_own_tokens(models: Models) -> None:
    """Prompts of many chunks and of one row, greedy and sampled, interleaved in one pipe; slots are used again."""
    whole = models("qwen3")
    samplings = [Sampling(), Sampling(seed=1, temperature=1.2), Sampling(repetition_penalty=1.5), Sampling(seed=1)]
    prompts = (PROMPT, PROMPT[20:21], PROMPT[1:], PROMPT[5:])
    wanted = [(prompt, 3 + 2 * i, samplings[i]) for i, prompt in enumerate(prompts)]
    scheduler = Scheduler(max_in_flight=4, chunk=CHUNK)
    sessions = {}
    async with running(whole.folder, (1, 2, 1)) as chain:
        for prompt, num_tokens, sampling in wanted[:2]:
            sessions[prompt] = Session(prompt, num_tokens)
            scheduler.open(sessions[prompt], sampling)
        late = iter(wanted[2:])
        while any(session.finish_reason is None for session in sessions.values()):
            while (frame := scheduler.schedule()) is not None:
                await chain.send(frame)
            for session, _ in scheduler.commit((await chain.receive()).result):
                if session.finish_reason is not None:
                    scheduler.close(session)
                    for prompt, num_tokens, sampling in late:
                        sessions[prompt] = Session(prompt, num_tokens)
                        scheduler.open(sessions[prompt], sampling)
                        break
    assert len(sessions) == 4 and {session.slot for session in sessions.values()} == {0, 1}
    for prompt, num_tokens, sampling in wanted:
        assert sessions[prompt].generated == whole.tokens(prompt, num_tokens, sampling)


async def test_a_node_says_how_long_its_engine_has_been_busy_while_it_is(models: Models) -> None:
    release = threading.Event()
    async with serving(1) as [node], opened(models("qwen3").folder, (2, 2), [node]) as chain:
        held = asyncio.create_task(node.thread.run(lambda: release.wait(5)))
        window = window_of(PROMPT, 0)
        await chain.send(Frame(epoch=1, step=50, opened=[Opening(slot=0)], windows=[window]))
        async with asyncio.timeout(4):
            while not (status := await chain.peers[0].status(5)).busy_s:
                pass
        assert (status.step, status.slots) == (2, 0)  # the warm-up's
        release.set()
        assert await held
        await chain.receive()
        status = await chain.peers[0].status(5)
        assert (status.busy_s, status.step, status.slots) == (0, 50, 1)


async def test_every_stage_records_when_it_had_each_frame(models: Models) -> None:
    async with running(models("qwen3").folder, (1, 2, 1)) as chain:
        passages = (await answer(chain, PROMPT, 3)).passages
    for passage in passages:
        assert [timing.stage for timing in passage.timings] == [0, 1, 2]
        moments = [
            moment
            for t in passage.timings
            for moment in (t.received, t.started, t.computed, t.sampled, t.sent)
        ] + [passage.returned]  # one process, one clock  # fmt: skip
        assert moments == sorted(moments)


@pytest.mark.parametrize("layers", [(4,), (2, 2), (1, 2, 1)])
async def test_only_rows_whose_token_is_wanted_reach_the_head(
    models: Models, head_rows: list[int], layers: tuple[int, ...]
) -> None:
    async with running(models("qwen3").folder, layers) as chain:
        head_rows.clear()
        await answer(chain, PROMPT, 5)
    assert head_rows == [1, 1, 1, 1, 1]


async def test_several_wanted_rows_are_each_sampled_from_their_own_prefix(models: Models, head_rows: list[int]) -> None:
    """A window may ask for any of its trailing rows; those before them are not computed to logits."""
    whole = models("qwen3")
    async with running(whole.folder, (2, 2)) as chain:
        head_rows.clear()
        window = window_of(PROMPT[:7], 0)
        window.wanted = 3
        sampling = Sampling(seed=5, temperature=1.5, repetition_penalty=1.5, frequency_penalty=1.0)
        opening = Opening(slot=0, sampling=sampling)
        await chain.send(Frame(epoch=1, step=50, opened=[opening], windows=[window]))
        samples = (await chain.receive()).result.samples
    assert head_rows == [3]
    assert [sample.token for sample in samples] == [whole.tokens(PROMPT[:n], 1, sampling)[0] for n in (5, 6, 7)]


async def test_several_windows_of_one_frame_do_not_see_each_other(models: Models) -> None:
    whole = models("qwen3")
    prompts = (PROMPT[:7], PROMPT[9:12], PROMPT[20:21])
    windows = [window_of(prompt, 0, slot) for slot, prompt in enumerate(prompts)]
    async with running(whole.folder, (1, 2, 1)) as chain:
        await chain.send(Frame(epoch=1, step=50, opened=[Opening(slot=s) for s in range(3)], windows=windows))
        samples = (await chain.receive()).result.samples
    assert [(s.slot, s.token) for s in samples] == [(i, whole.tokens(p, 1)[0]) for i, p in enumerate(prompts)]


# The rule of the cache


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
async def test_a_window_cuts_what_lies_beyond_its_base_on_every_stage(models: Models, family: str) -> None:
    """Feed a draft, reject it, feed other tokens: the answer is that of the other tokens alone."""
    whole = models(family)
    kept, rejected, other = PROMPT[:6], (90, 91, 92), (17, 18)
    async with running(whole.folder, (1, 2, 1)) as chain:
        await chain.send(Frame(epoch=1, step=50, opened=[Opening(slot=0)], windows=[window_of((*kept, *rejected), 0)]))
        await chain.receive()
        await chain.send(Frame(epoch=1, step=51, windows=[window_of((*kept, *other), len(kept))]))
        found = (await chain.receive()).result.samples[0].token
    assert found == whole.tokens((*kept, *other), 1)[0]
    assert found != whole.tokens((*kept, *rejected, *other), 1)[0]


async def test_a_sliding_layer_that_has_let_go_of_rows_refuses_a_base_that_needs_them(models: Models) -> None:
    """Its cache keeps 256 rows, then only the window's 8: going back by more than it can must not pass unnoticed."""
    whole = models("gemma3_text")
    tokens = tuple((3 * i + i * i) % VOCAB for i in range(257))
    async with running(whole.folder, (2, 2)) as chain:
        await chain.send(Frame(epoch=1, step=50, opened=[Opening(slot=0)], windows=[window_of(tokens[:256], 0)]))
        await chain.receive()
        await chain.send(Frame(epoch=1, step=51, windows=[window_of(tokens, 256)]))
        await chain.receive()
        await chain.send(Frame(epoch=1, step=52, windows=[window_of(tokens, 256)]))  # the same again is possible
        assert (await chain.receive()).result.samples[0].token == whole.tokens(tokens, 1)[0]
        await chain.send(Frame(epoch=1, step=53, windows=[window_of(tokens[:252], 251)]))
        with pytest.raises(CacheMismatch, match="251"):
            await chain.receive()


async def test_a_recurrent_layer_refuses_to_go_back(models: Models) -> None:
    async with running(models("qwen3_5").folder, (2, 2)) as chain:
        await chain.send(Frame(epoch=1, step=50, opened=[Opening(slot=0)], windows=[window_of(PROMPT[:6], 0)]))
        await chain.receive()
        await chain.send(Frame(epoch=1, step=51, windows=[window_of(PROMPT[:6], 4)]))
        with pytest.raises(CacheMismatch, match="recurrent layer cannot be cut to 4 tokens: its state is at 6"):
            await chain.receive()


async def test_a_wrong_prefix_hash_is_refused_before_anything_is_computed(
    models: Models, shard_calls: list[tuple[int, int]]
) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [5, 6, 7]))
        assert len((await worker.next_result()).samples) == 1
        assert shard_calls == [(2, 3)]
        await worker.send(frame(2, [8], before=(5, 6, 9)))
        with pytest.raises(
            CacheMismatch, match=r"worker node-1: .*slot 0 was to continue at 3 tokens .*another prefix"
        ):
            await worker.next_result()
        assert shard_calls == [(2, 3)]


async def test_a_slot_that_lacks_the_prefix_is_refused_before_anything_is_computed(
    models: Models, shard_calls: list[tuple[int, int]]
) -> None:
    """A restarted worker never goes on from an empty cache."""
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [8], before=(5, 6, 9), opened=[Opening(slot=0)]))
        with pytest.raises(CacheMismatch, match=r"worker node-1: .*slot 0 was to continue at 3 tokens .*only 0 tokens"):
            await worker.next_result()
    assert shard_calls == []


async def test_a_slot_opened_again_starts_empty(models: Models) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [5, 6, 7]))
        await worker.next_result()
        await worker.send(frame(2, [8], before=(5, 6, 7), opened=[Opening(slot=0)]))
        with pytest.raises(CacheMismatch, match="only 0 tokens"):
            await worker.next_result()


async def test_a_closed_slot_takes_no_more_windows(models: Models) -> None:
    async with feeding(models("qwen3").folder) as worker:
        await worker.send(frame(1, [5, 6, 7]))
        await worker.next_result()
        await worker.send(frame(2, [8], before=(5, 6, 7), closed=[0]))
        with pytest.raises(FrameError, match=r"worker node-1: .*slot 0 is not open"):
            await worker.next_result()


# Frames and hops that are refused

REFUSED = {
    "another width": (
        tensor([1, 3, D // 2]),
        r"\[1, 3, 64\] float32 from stage 0, got \[1, 3, 32\] float32 \(step 1\)",
    ),
    "other rows": (tensor([1, 2, D]), r"\[1, 3, 64\] float32 from stage 0, got \[1, 2, 64\] float32 \(step 1\)"),
    "another rank": (tensor([3, D]), r"\[1, 3, 64\] float32 from stage 0, got \[3, 64\] float32 \(step 1\)"),
    "another dtype": (
        tensor([1, 3, D], DTYPE_BFLOAT16),
        r"\[1, 3, 64\] float32 from stage 0, got \[1, 3, 64\] bfloat16 \(step 1\)",
    ),
    "no dtype": (
        tensor([1, 3, D], DTYPE_UNSPECIFIED),
        r"float32 from stage 0, got \[1, 3, 64\] unspecified \(step 1\)",
    ),
    "an unknown dtype": (tensor([1, 3, D], 9), r"float32 from stage 0, got \[1, 3, 64\] .*9 \(step 1\)"),
    "no hidden states": (Tensor(), r"\[1, 3, 64\] float32 from stage 0, got \[\] unspecified \(step 1\)"),
    "bytes missing": (tensor([1, 3, D], num_bytes=700), r"768 bytes for \[1, 3, 64\], got 700"),
    "bytes to spare": (tensor([1, 3, D], num_bytes=769), r"768 bytes for \[1, 3, 64\], got 769"),
}


@pytest.mark.parametrize(("hidden", "message"), REFUSED.values(), ids=REFUSED)
async def test_hidden_states_of_another_shape_or_dtype_are_refused(
    models: Models, shard_calls: list[tuple[int, int]], hidden: Tensor, message: str
) -> None:
    async with feeding(models("qwen3").folder) as worker:
        odd = frame(1, [5, 6, 7])
        odd.hidden.CopyFrom(hidden)
        await worker.send(odd)
        with pytest.raises(FrameError, match=f"^worker node-1: expected .*{message}"):
            await worker.next_result()
    assert shard_calls == []


@pytest.mark.parametrize(("rows", "wanted"), [(0, 0), (0, 1), (3, 4)])
async def test_a_window_without_rows_or_with_fewer_than_it_wants_is_refused(
    models: Models, shard_calls: list[tuple[int, int]], rows: int, wanted: int
) -> None:
    async with feeding(models("qwen3").folder) as worker:
        odd = frame(1, list(range(rows)))
        odd.windows[0].wanted = wanted
        await worker.send(odd)
        expected = rf"^worker node-1: expected at least {max(1, wanted)} tokens, got {rows} .*slot 0 \(step 1\)"
        with pytest.raises(FrameError, match=expected):
            await worker.next_result()
    assert shard_calls == []


async def test_a_frame_of_another_epoch_is_refused(models: Models, shard_calls: list[tuple[int, int]]) -> None:
    async with feeding(models("qwen3").folder) as worker:
        stale = frame(7, [5, 6, 7])
        stale.epoch = 2
        await worker.send(stale)
        with pytest.raises(FrameError, match=r"^worker node-1: expected .*epoch 1, got epoch 2 \(step 7\)"):
            await worker.wait_refused()
    assert shard_calls == []


@pytest.mark.parametrize(("epoch", "stage"), [(1, 1), (1, 5), (2, 0), (0, 0)])
async def test_a_hop_from_the_wrong_stage_or_epoch_is_refused(models: Models, epoch: int, stage: int) -> None:
    message = rf"^worker node-1: expected a hop of .*'1', '0'.*got .*'{epoch}', '{stage}'"
    with pytest.raises(FrameError, match=message):
        async with feeding(models("qwen3").folder, epoch, stage):
            pytest.fail("the hop was taken")


async def test_a_hop_into_a_node_that_is_not_attached_is_refused(models: Models) -> None:
    async with serving(1) as [node]:
        await load(node, load_request(models("qwen3").folder, 2, 4))
        link = Link(node.name, node.address, 1, 0)
        try:
            with pytest.raises(FrameError, match=r"^worker node-1: is not part of a chain"):
                await link.wait_open()
        finally:
            await link.close()


# Who may attach


async def test_attaching_to_a_node_that_holds_nothing_is_refused(models: Models) -> None:
    async with serving(1) as [node]:
        with pytest.raises(
            ModelError, match=r"^worker node-1: expected to hold layers \[2, 4\) of .*, holds none by now; start again"
        ):
            await attach_and_leave(node, attach_request(models("qwen3").folder))


async def test_attaching_to_other_layers_than_are_loaded_is_refused(models: Models) -> None:
    async with serving(1) as [node]:
        await load(node, load_request(models("qwen3").folder, 1, 3))
        with pytest.raises(ModelError, match=r"^worker node-1: expected to hold layers \[2, 4\) of .*, holds \[1, 3\)"):
            await attach_and_leave(node, attach_request(models("qwen3").folder))


async def attach_and_leave(node: RunningNode, request: AttachRequest) -> None:
    peer = node.peer()
    try:
        await peer.attach(request)
    finally:
        await peer.close()


async def test_a_second_coordinator_is_refused_and_the_first_goes_on(models: Models) -> None:
    whole = models("qwen3")
    async with serving(1) as [node], opened(whole.folder, (2, 2), [node]) as chain:
        before = (await answer(chain, PROMPT, 4)).tokens
        with pytest.raises(NodeBusy, match=r"^worker node-1: already serves another coordinator"):
            await load(node, load_request(whole.folder, 2, 4))
        with pytest.raises(NodeBusy, match=r"^worker node-1: already serves another coordinator"):
            await attach_and_leave(node, attach_request(models("qwen3").folder))
        assert (await answer(chain, PROMPT, 4)).tokens == before == whole.tokens(PROMPT, 4)


async def test_when_the_coordinator_is_gone_its_slots_are_too_and_another_can_attach(
    models: Models, worker_caches: Caches
) -> None:
    whole = models("qwen3")
    async with serving(2) as nodes:
        async with opened(whole.folder, (1, 1, 2), nodes) as chain:
            await chain.send(Frame(epoch=1, step=51, opened=[Opening(slot=3)], windows=[window_of(PROMPT, 0, 3)]))
            await chain.receive()
            for peer in chain.peers:
                status = await peer.status(5)
                assert (status.slots, status.step) == (1, 51) and status.cache_bytes > 0
        assert any(cache() for cache in worker_caches)
        for node in nodes:
            await wait_idle(node)
        assert not [task for task in asyncio.all_tasks() if "Stage." in task.get_coro().__qualname__]
        gc.collect()
        assert not any(cache() for cache in worker_caches)
        async with opened(whole.folder, (1, 1, 2), nodes) as chain:
            assert (await answer(chain, PROMPT, 4)).tokens == whole.tokens(PROMPT, 4)


async def wait_idle(node: RunningNode) -> None:
    """Until the node has noticed that its coordinator is gone: it holds no slot and no cache, but still its shard."""
    peer = node.peer()
    try:
        async with asyncio.timeout(5):
            while (status := await peer.status(5)).slots or status.cache_bytes:  # noqa: ASYNC110 - asked from outside
                await asyncio.sleep(0.01)
    finally:
        await peer.close()
    assert status.weight_bytes > 0


async def test_a_shard_of_another_model_that_was_loaded_meanwhile_is_refused(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two coordinators load at the same time: the first to attach must not run on what the other one loaded."""
    mine, other = models("qwen3"), models("qwen3", seed=5)
    attach: Callable[..., Any] = Peer.attach

    async def attach_late(peer: Peer, request: AttachRequest) -> None:
        await load(node, load_request(other.folder, 2, 4))
        await attach(peer, request)

    monkeypatch.setattr(Peer, "attach", attach_late)
    async with serving(1) as [node]:
        with pytest.raises(BrigadeError):
            async with opened(mine.folder, (2, 2), [node]):
                pass


@pytest.mark.parametrize("failing", [1, 2])
async def test_an_error_in_a_stage_names_its_node_and_leaves_the_nodes_usable(
    models: Models, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    whole = models("qwen3")
    run: Callable[..., mx.array] = Shard.__call__

    def fail(shard: Shard, x: mx.array, caches: Any, positions: mx.array | None) -> mx.array:
        if shard.start == failing:
            raise ModelError("no such kernel")
        return run(shard, x, caches, positions)

    async with serving(2) as nodes:
        async with opened(whole.folder, (1, 1, 2), nodes) as chain:
            with monkeypatch.context() as patch:
                patch.setattr(Shard, "__call__", fail)
                with pytest.raises(ModelError, match=f"^worker node-{failing}: no such kernel"):
                    await answer(chain, PROMPT, 3)
        for node in nodes:
            await wait_idle(node)
        async with opened(whole.folder, (1, 1, 2), nodes) as chain:
            assert (await answer(chain, PROMPT, 4)).tokens == whole.tokens(PROMPT, 4)


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


async def test_the_same_load_again_reads_nothing(tmp_path: Path, files_read: list[str]) -> None:
    folder = make_model(tmp_path / "model", num_files=3)
    async with serving(1) as [node]:
        assert (await load(node, load_request(folder, 2, 4)))[-1].phase == "load"
        assert files_read
        files_read.clear()
        assert await load(node, load_request(folder, 2, 4)) == []
        assert files_read == []
        assert (await load(node, load_request(folder, 1, 4)))[-1].done > 0
        assert files_read


async def test_a_weight_file_that_changed_is_read_again(tmp_path: Path, files_read: list[str]) -> None:
    """The same headers and other values: nothing but the time of its last change tells."""
    folder = make_model(tmp_path / "model", num_files=2, seed=0)
    other = make_model(tmp_path / "other", num_files=2, seed=1)
    async with serving(1) as [node]:
        await load(node, load_request(folder, 2, 4))
        before = await digests(node)
        for file in folder.glob("*.safetensors"):
            file.write_bytes((other / file.name).read_bytes())
            os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))
        files_read.clear()
        await load(node, load_request(folder, 2, 4))
        after = await digests(node)
    assert files_read
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)


async def digests(node: RunningNode) -> dict[str, str]:
    peer = node.peer()
    try:
        return await peer.digests()
    finally:
        await peer.close()
