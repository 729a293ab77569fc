"""What the stages of a chain do for each other: real gRPC ends, hand-made frames."""

import asyncio
import math
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from protos.brigade_pb2 import Frame, Opening, Sampling
from tests.integration.conftest import CHUNK, Layers, Models, Whole, answer, opened, receive, running, send, serving
from tests.integration.upstream import window_of
from tests.tiny import VOCAB
from worker.compute.shard import Shard

PROMPT = tuple((5 * i + 3) % VOCAB for i in range(3 * CHUNK + 2))


@pytest.fixture
def head_rows(monkeypatch: pytest.MonkeyPatch, nothing_ahead: None) -> list[int]:
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
    models: Models, monkeypatch: pytest.MonkeyPatch, layers: Layers
) -> None:
    """The last stage is held until stage 0 has begun the third chunk: were chunks sent one by one, it never would."""
    begun = threading.Event()
    chunks = []
    run: Callable[..., mx.array] = Shard.__call__

    def count(shard: Shard, x: mx.array, *more: Any) -> mx.array:
        if shard.is_first:
            chunks.append(x.shape[1])
            if len(chunks) == 3:
                begun.set()
        return run(shard, x, *more)

    async with serving(len(layers) - 1) as nodes, opened(models("qwen3").folder, layers, nodes) as chain:
        monkeypatch.setattr(Shard, "__call__", count)
        held = asyncio.create_task(nodes[-1].thread.run(lambda: begun.wait(60)))
        found = await answer(chain, PROMPT, 3)
        assert await held, "the third chunk waited for the result of the first"
        assert chunks[:4] == [8, 8, 8, 2]
        assert found.tokens == models("qwen3").tokens(PROMPT, 3)
        third_began, first_was_back = found.passages[2].timings[0].started, found.passages[0].returned
        assert third_began < first_was_back


async def test_a_node_says_how_long_its_engine_has_been_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    run: Callable[..., mx.array] = Shard.__call__

    def held(shard: Shard, x: mx.array, *more: Any) -> mx.array:
        assert shard.is_first or release.wait(60)
        return run(shard, x, *more)

    async with serving(1) as [node], opened(folder, (2, 2), [node]) as chain:
        warmed_up = (await chain.peers[0].status(5)).step
        monkeypatch.setattr(Shard, "__call__", held)
        window = window_of(PROMPT, 0)
        await send(chain, Frame(epoch=1, step=50, opened=[Opening(slot=0)], windows=[window]))
        async with asyncio.timeout(60):
            while not (status := await chain.peers[0].status(5)).busy_s:
                pass
        assert status.step == warmed_up < 50
        release.set()
        await receive(chain)
        status = await chain.peers[0].status(5)
        assert (status.busy_s, status.step, status.slots) == (0, 50, 1)


async def test_every_stage_records_when_it_had_each_frame_and_one_session_decodes_one_at_a_time(folder: Path) -> None:
    async with running(folder, (1, 2, 1)) as chain:
        passages = (await answer(chain, PROMPT, 5)).passages
    for passage in passages:
        assert len(passage.timings) == 3
        moments = [
            moment
            for t in passage.timings
            for moment in (t.received, t.started, t.computed, t.sampled, t.sent)
        ] + [passage.returned]  # one process, one clock  # fmt: skip
        assert moments == sorted(moments)
    chunks, steps = passages[:4], passages[4:]
    assert len(steps) == 4
    for earlier, later in pairwise([chunks[-1], *steps]):
        assert later.timings[0].received >= earlier.returned


@pytest.mark.parametrize("layers", [(4,), (1, 2, 1)])
async def test_only_wanted_rows_reach_the_head(folder: Path, head_rows: list[int], layers: Layers) -> None:
    async with running(folder, layers) as chain:
        head_rows.clear()
        await answer(chain, PROMPT, 5)
    assert head_rows == [1, 1, 1, 1, 1]


async def test_several_wanted_rows_are_each_sampled_from_their_own_prefix(whole: Whole, head_rows: list[int]) -> None:
    """A window may ask for any of its trailing rows; those before them are not computed to logits."""
    async with running(whole.folder, (2, 2)) as chain:
        head_rows.clear()
        window = window_of(PROMPT[:7], 0)
        window.wanted = 3
        sampling = Sampling(seed=5, temperature=1.5, repetition_penalty=1.5, frequency_penalty=1.0)
        opening = Opening(slot=0, sampling=sampling)
        await send(chain, Frame(epoch=1, step=50, opened=[opening], windows=[window]))
        samples = (await receive(chain)).result.samples
    assert head_rows == [3]
    assert [sample.token for sample in samples] == [whole.tokens(PROMPT[:n], 1, sampling)[0] for n in (5, 6, 7)]


# The rule of the cache


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
async def test_a_window_cuts_what_lies_beyond_its_base_on_every_stage(models: Models, family: str) -> None:
    """Feed a draft, reject it, feed other tokens: the answer is that of the other tokens alone."""
    whole = models(family)
    kept, rejected, other = PROMPT[:6], (90, 91, 92), (17, 18)
    async with running(whole.folder, (1, 2, 1)) as chain:
        await send(chain, Frame(epoch=1, step=50, opened=[Opening(slot=0)], windows=[window_of((*kept, *rejected), 0)]))
        await receive(chain)
        await send(chain, Frame(epoch=1, step=51, windows=[window_of((*kept, *other), len(kept))]))
        found = (await receive(chain)).result.samples[0].token
    assert found == whole.tokens((*kept, *other), 1)[0]
    assert found != whole.tokens((*kept, *rejected, *other), 1)[0]
