"""Windows across real chains: WeDLM's decoder, the MASK id, and what windows cost."""

from functools import lru_cache
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protos.brigade_pb2 import Cache, Sampling
from tests.integration.conftest import CHUNK, Models, Whole, running
from tests.integration.windows import (
    BIASED,
    COVERING,
    MASK,
    MASKED,
    PROMPT,
    WINDOWS,
    N,
    Recompute,
    all_or_some,
    answer,
    families_and_splits,
    recompute,
)
from worker.compute.shard import Shard
from worker.memory.layer_cache import KVCache
from worker.memory.slot_caches import Caches

# --- WeDLM's decoder ------------------------------------------------------------------------------------------------


@families_and_splits
@all_or_some
async def test_diffusion_fast_is_wedlm_recomputed_from_nothing_at_every_step(
    models: Models, is_all: bool, family: str, layers: tuple[int, ...]
) -> None:
    whole = models(family, **MASKED)
    alone = recompute(whole.folder)
    several = 0
    async with running(whole.folder, layers) as chain:
        for window, threshold in WINDOWS if is_all else WINDOWS[::2] if (family, layers) == COVERING else WINDOWS[::6]:
            expected = expected_wedlm(alone, window, threshold, len(PROMPT) + N)
            found = await answer(chain, "diffusion-fast", window, threshold=threshold)
            assert found.tokens == expected, f"W={window}, tau={threshold}"
            assert found.usage.num_steps <= N + window + 1
            several += found.usage.num_steps < N
    assert several, "thresholds that never fill two at once prove little"


@lru_cache
def expected_wedlm(
    alone: Recompute, window: int, threshold: float, limit: int | None, num_tokens: int = N
) -> list[int]:
    return alone.wedlm(PROMPT, num_tokens, window, threshold, 0.02, limit)


async def test_until_the_answer_ends_nothing_differs_from_wedlms_own_engine(models: Models) -> None:
    """It fuses no prompt, emits a step later and never shortens the window: only the last window can tell."""
    whole = models("qwen3", **MASKED)
    async with running(whole.folder, (1, 3)) as chain:
        for window, threshold in ((2, 0.8), (4, 0.0), (4, 2.0), (8, 0.8)):
            expected = expected_wedlm(recompute(whole.folder), window, threshold, None, 24)
            found = await answer(chain, "diffusion-fast", window, threshold=threshold, num_tokens=24)
            assert found.tokens[: 24 - window] == expected[: 24 - window]


async def test_window_threshold_and_penalty_all_matter_to_the_text(models: Models) -> None:
    """Else equality under all of them would prove little."""
    async with running(models("qwen3", **MASKED).folder, (4,)) as chain:
        texts = [
            tuple((await answer(chain, "diffusion-fast", window, threshold=threshold, penalty=penalty)).tokens)
            for window, threshold, penalty in [(1, 0.4, 0.02), (8, 0.4, 0.02), (8, 2.0, 0.02), (8, 0.4, 0.5)]
        ]
    assert len(set(texts)) == 4


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Caches]]:
    """First layer and caches of every slot that any stage opens."""
    opened: list[tuple[int, Caches]] = []
    make = Shard.make_caches

    def note(shard: Shard, cache: Cache) -> Caches:
        opened.append((shard.start, make(shard, cache)))
        return opened[-1][1]

    monkeypatch.setattr(Shard, "make_caches", note)
    monkeypatch.setattr(KVCache, "close", lambda cache, besides=(): None)  # what was held is looked at afterwards
    return opened


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("diffusion-fast", (2, 1, 1)), ("diffusion", (1, 3)), ("ngram", (4,)), ("diffusion-fast", (4,))],
    ids=str,
)
@pytest.mark.usefixtures("nothing_ahead")
async def test_what_is_committed_is_what_a_plain_prefill_of_the_text_leaves(
    models: Models, held: list[tuple[int, Caches]], kind: str, layers: tuple[int, ...]
) -> None:
    """Keys and values of every layer, whatever windows they came in and whatever was cut again meanwhile."""
    whole = models("qwen3", **MASKED)
    async with running(whole.folder, layers) as chain:
        held.clear()
        tokens = (await answer(chain, kind, 8, threshold=1.5, sampling=BIASED, num_tokens=24)).tokens
    text = [*PROMPT, *tokens]
    plain = make_prompt_cache(whole.reference.model)
    whole.reference.model(mx.array([text]), cache=plain)
    caches = [cache for _, caches in sorted(held, key=lambda opened: opened[0]) for cache in caches.own]
    assert len(caches) == len(plain) == 4
    committed = len(text) - 17  # the last windows may still hold guesses
    for layer, expected in zip(caches, plain, strict=True):
        assert isinstance(layer, KVCache)
        for rows, array in zip(layer.fetch(), (expected.keys, expected.values), strict=True):
            found = np.array(rows[:, :, :committed])
            np.testing.assert_allclose(found, np.array(array[:, :, :committed]), rtol=1e-4, atol=1e-5)


# --- the MASK id ----------------------------------------------------------------------------------------------------


async def test_the_mask_id_in_a_prompt_is_a_token_like_any_other(models: Models) -> None:
    whole = models("qwen3", **MASKED)
    prompt = (*PROMPT[:4], MASK, PROMPT[5], MASK, MASK)
    alone = recompute(whole.folder)
    expected = alone.greedy(prompt, N)
    async with running(whole.folder, (2, 1, 1)) as chain:
        for kind in ("ar", "ngram", "diffusion"):
            assert (await answer(chain, kind, 8 if kind == "diffusion" else None, prompt=prompt)).tokens == expected
        fast = await answer(chain, "diffusion-fast", 8, prompt=prompt, threshold=1.0)
    assert fast.tokens == alone.wedlm(prompt, N, 8, 1.0, 0.02, len(prompt) + N)
    assert expected != alone.greedy([token if token != MASK else 3 for token in prompt], N)


async def test_the_mask_id_is_never_said_however_likely(models: Models) -> None:
    async with running(models("qwen3", **MASKED).folder, (2, 2)) as chain:
        for kind, temperature in product(("ar", "diffusion", "diffusion-fast"), (0.0, 1.0, 100.0)):
            sampling = Sampling(seed=1, temperature=temperature, logit_bias={MASK: 1e6}, logprobs=2)
            found = await answer(chain, kind, None if kind == "ar" else 8, num_tokens=15, sampling=sampling)
            assert MASK not in found.tokens
            assert all(a.token != MASK for sample in found.samples for a in sample.alternatives)


# --- what windows cost ----------------------------------------------------------------------------------------------


async def test_the_chain_learns_what_its_steps_cost(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number of rows, as if each had the chain to itself: `--window auto` chooses by it."""
    seen: list[tuple[int, float]] = []
    async with running(models("qwen3", **MASKED).folder, (2, 1, 1)) as chain:
        steps = chain.costs.steps
        learn = steps.observe

        def note(num_rows: int, seconds: float) -> None:
            seen.append((num_rows, seconds))
            learn(num_rows, seconds)

        monkeypatch.setattr(steps, "observe", note)
        found = await answer(chain, "diffusion", num_tokens=30, sampling=BIASED)
        assert len(seen) >= found.usage.num_steps - 1
        assert all(seconds > 0 for _, seconds in seen)
        sizes = {num_rows for num_rows, _ in seen}  # drafts that no MASK row follows make a step of up to 4 rows
        assert sizes <= {1, 2, 3, 4, 8, 16, 32, 64}
        seen.clear()
        long = await answer(chain, "ar", prompt=PROMPT * 6, num_tokens=2)
        num_frames = -(-len(PROMPT * 6) // CHUNK) + long.usage.num_steps - 1
        assert len(seen) >= num_frames - 1, "chunks that queue behind each other count too, without their waits"


def test_the_answers_of_these_tests_vary(models: Models) -> None:
    """Else equality would prove little."""
    whole: Whole = models("qwen3", **MASKED)
    assert len(set(whole.tokens(PROMPT, N))) > 3
    assert 2 <= len(set(whole.tokens(PROMPT, 20, BIASED))) <= 3
