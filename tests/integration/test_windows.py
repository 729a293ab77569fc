"""Windows across real chains: what a row sees and draws, verified drafts, WeDLM's decoder, and what windows cost."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protos.brigade_pb2 import Cache, Opening, Sampling, Window
from tests.integration.conftest import CHUNK, Layers, Models, running
from tests.integration.windows import (
    BIASED,
    MASK,
    MASKED,
    PROMPT,
    SAMPLINGS,
    SPLITS,
    Bench,
    N,
    Recompute,
    answer,
    assert_same_samples,
    logprobs,
    recompute,
    window_of,
)
from tests.tiny import VOCAB
from worker.compute.sampling import Sampler
from worker.compute.shard import Shard
from worker.memory.kv_cache import KVCache
from worker.memory.slot_caches import Caches

all_or_some = pytest.mark.parametrize(
    "is_all", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["some", "all"]
)
COVERING = ("qwen3", (2, 1, 1))  # the family and the split on which everything is tried
SAMPLE = (COVERING, ("llama", (1, 3)))
families_and_splits = pytest.mark.parametrize(
    ("family", "layers"),
    [
        pytest.param(
            family,
            layers,
            id=f"{family}-{'+'.join(map(str, layers))}",
            marks=() if (family, layers) in SAMPLE else pytest.mark.matrix,
        )
        for layers in SPLITS
        for family in ("qwen3", "qwen2", "llama")
    ],
)

# --- what a row sees, and what is drawn from it -----------------------------------------------------------------------

TEXT = PROMPT[:6]
AHEAD = [(8, 40), (9, 33)]  # filled tokens at positions behind the masks at 6 and 7


def reordered(ahead: Sequence[tuple[int, int]], masks: Sequence[int], num_padding: int = 0) -> Window:
    """Two known tokens, tokens filled ahead, and MASK rows, behind TEXT[:4]."""
    at = [4, 5, *(position for position, _ in ahead), *masks, *range(90, 90 + num_padding)]
    tokens = [*TEXT[4:], *(token for _, token in ahead)]
    return window_of(
        tokens, 4, TEXT, wanted=len(tokens), masks=len(masks) + num_padding, guessed=len(masks), positions=at
    )


def distance(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """How far each row [N, V] is from the other at most; the MASK's minus infinity aside."""
    return np.abs(rows[:, :MASK] - others[:, :MASK]).max(axis=1)


@families_and_splits
async def test_each_reordered_row_is_the_whole_models(models: Models, family: str, layers: Layers) -> None:
    whole = models(family, **MASKED)
    window = reordered(AHEAD, [6, 7, 10])
    rows = [*TEXT[:4], *window.tokens, *[MASK] * 3]
    logits = recompute(whole.folder).logits(rows, [*range(4), *window.positions])
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    async with running(whole.folder, layers) as chain:
        samples, guesses = await Bench(chain).rows(window, TEXT[:4])
    assert np.isneginf(samples[:, MASK]).all() and np.isneginf(guesses[:, MASK]).all()
    np.testing.assert_allclose(np.concatenate([samples, guesses]), expected[4:], rtol=1e-4, atol=1e-4)


async def test_a_token_filled_ahead_changes_what_is_guessed_before_it(models: Models) -> None:
    """The point of the reordering: a MASK sees what stands behind it, a filled row sees no MASK."""
    async with running(models("qwen3", **MASKED).folder, (1, 3)) as chain:
        bench = Bench(chain)
        samples, guesses = await bench.rows(reordered(AHEAD, [6, 7]), TEXT[:4])
        other_samples, other_guesses = await bench.rows(reordered([(8, 40), (9, 34)], [6, 7]), TEXT[:4])
        assert (distance(other_guesses, guesses) > 1e-2).all()
        np.testing.assert_allclose(other_samples[:3], samples[:3], atol=2e-5)  # rows before the changed one
        swapped_samples, swapped = await bench.rows(reordered(AHEAD, [7, 6]), TEXT[:4])
        np.testing.assert_allclose(swapped_samples, samples, atol=2e-5)
        assert distance(swapped[::-1], guesses).max() > 1e-2, "the order of MASK rows matters"
        _, moved = await bench.rows(reordered([(8, 40), (20, 33)], [6, 7]), TEXT[:4])
        assert distance(moved, guesses).max() > 1e-3, "positions matter"


@pytest.mark.parametrize("layers", SPLITS, ids=str)
async def test_neither_more_masks_nor_a_prompt_change_what_a_row_says(models: Models, layers: Layers) -> None:
    """Padding is neutral, and so is every further MASK for the tokens and masks before it."""
    async with running(models("qwen3", **MASKED).folder, layers) as chain:
        bench = Bench(chain)
        few = await bench.rows(reordered(AHEAD, [6, 7]), TEXT[:4])
        for window in (reordered(AHEAD, [6, 7], num_padding=26), reordered(AHEAD, [6, 7, 10, 11, 12])):
            samples, guesses = await bench.rows(window, TEXT[:4])
            np.testing.assert_allclose(samples, few[0], atol=2e-5)
            np.testing.assert_allclose(guesses[:2], few[1], atol=2e-5)
        fused = await bench.rows(window_of(TEXT, 0, wanted=1, masks=8, guessed=8))
        apart = await bench.rows(window_of(TEXT[5:], 5, TEXT, wanted=1, masks=8, guessed=8), TEXT[:5])
        for both in zip(fused, apart, strict=True):
            np.testing.assert_allclose(*both, atol=5e-5)


async def test_a_row_draws_with_the_key_of_the_place_that_its_token_would_take(models: Models) -> None:
    """A token row draws for the next place and a MASK row for its own: where both agree they draw the same token."""
    sampling = Sampling(seed=11, temperature=5.0, logprobs=1 + VOCAB)
    window = reordered(AHEAD, [6, 7, 10])
    drawn_for = [at + (row < len(window.tokens)) for row, at in enumerate(window.positions)]
    async with running(models("qwen3", **MASKED).folder, (1, 3)) as chain:
        bench = Bench(chain)
        await bench.send([window_of(TEXT[:4], 0)], [Opening(slot=0, sampling=sampling)])
        result = await bench.send([window])
    samples = [*result.samples, *result.guesses]
    drawn = Sampler(sampling)(mx.array(logprobs(samples), mx.float32), drawn_for, [], [0] * len(samples))
    assert [sample.token for sample in samples] == drawn.tokens.tolist()
    assert len({sample.token for sample in samples}) > 3


# --- verified drafts --------------------------------------------------------------------------------------------------


@families_and_splits
@all_or_some
async def test_verified_windows_give_the_tokens_and_logprobs_of_one_token_decoding(
    models: Models, is_all: bool, family: str, layers: Layers
) -> None:
    """Greedy and sampled, with untrained weights; and in fewer steps where guesses hold."""
    whole = models(family, **MASKED)
    async with running(whole.folder, layers) as chain:
        for name, sampling in SAMPLINGS.items():
            if not is_all and (family, layers) != COVERING and name not in ("greedy", "biased"):
                continue
            expected = await answer(chain, "ar", sampling=sampling)
            if name == "greedy":
                assert expected.tokens == whole.tokens(PROMPT, N) == recompute(whole.folder).greedy(PROMPT, N)
            some = {"greedy": (1, 4, None), "biased": (2, 4, 16, None)}.get(name, (4,))
            windows = (1, 2, 4, 16, None) if is_all else some
            for kind, window in [("ngram", None), *(("diffusion", W) for W in windows)]:
                if not is_all and (family, layers) != COVERING and window not in (None, 4):
                    continue
                found = await answer(chain, kind, window, sampling=sampling)
                assert_same_samples(found, expected, f"{name} {kind} {window}")
                assert found.usage.num_steps <= expected.usage.num_steps == N
                if name == "biased" and window in (4, 16):
                    assert found.usage.num_steps < N, "no draft ever held"


@pytest.mark.parametrize("layers", [(2, 1, 1), pytest.param((1, 3), marks=pytest.mark.matrix)], ids=str)
async def test_drafts_and_diffusion_work_with_sliding_windows(models: Models, layers: Layers) -> None:
    """Long beyond the window of 8, and longer than it in one step."""
    whole = models("gemma3_text", **MASKED)
    prompt, num_tokens = PROMPT * 3, 16
    async with running(whole.folder, layers) as chain:
        for sampling in (Sampling(), BIASED, SAMPLINGS["penalties"]):
            more: dict[str, Any] = {"prompt": prompt, "num_tokens": num_tokens, "sampling": sampling}
            expected = await answer(chain, "ar", **more)
            assert expected.tokens == whole.tokens(prompt, num_tokens, sampling)
            assert_same_samples(await answer(chain, "ngram", **more), expected, "ngram")
            if sampling is SAMPLINGS["penalties"]:
                continue
            for window in (4, 16, None) if sampling is BIASED else (16,):
                found = await answer(chain, "diffusion", window, **more)
                assert found.tokens == expected.tokens
                assert found.usage.num_steps <= num_tokens  # auto makes no MASK rows where none pays
                assert found.usage.num_steps < num_tokens or sampling is not BIASED or window is None


async def test_the_same_seed_gives_the_same_text_of_diffusion_fast_on_every_split(models: Models) -> None:
    """Drawn by (seed, position): the split, the chunk and a second time change nothing."""
    folder = models("qwen3", **MASKED).folder
    sampling = Sampling(seed=9, temperature=1.0, top_p=0.95)
    texts = set()
    for layers, chunk in [((4,), 8), ((4,), 64), ((1, 3), 8), ((2, 1, 1), 16)]:
        async with running(folder, layers) as chain:
            found = await answer(chain, "diffusion-fast", 8, threshold=1.0, sampling=sampling, chunk=chunk)
            texts.add(tuple(found.tokens))
    assert len(texts) == 1
    async with running(folder, (4,)) as chain:
        sampling.seed = 10
        other = await answer(chain, "diffusion-fast", 8, threshold=1.0, sampling=sampling)
    assert tuple(other.tokens) not in texts


# --- WeDLM's decoder -----------------------------------------------------------------------------------------------


WINDOWS = [*product((1, 2, 4, 8, 16), (0.0, 0.2, 0.4, 0.8, 3.0))]  # MASK rows, threshold


@families_and_splits
@all_or_some
async def test_diffusion_fast_is_wedlm_recomputed_from_nothing_at_every_step(
    models: Models, is_all: bool, family: str, layers: Layers
) -> None:
    whole = models(family, **MASKED)
    alone = recompute(whole.folder)
    several = 0
    async with running(whole.folder, layers) as chain:
        for window, threshold in WINDOWS if is_all else WINDOWS[::3] if (family, layers) == COVERING else WINDOWS[::6]:
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


async def test_sampling_window_threshold_and_penalty_all_matter_to_the_text(models: Models) -> None:
    """Else equality under all of them would prove little."""
    whole = models("qwen3", **MASKED)
    assert len(set(whole.tokens(PROMPT, N))) > 3 and 2 <= len(set(whole.tokens(PROMPT, 20, BIASED))) <= 3
    async with running(whole.folder, (4,)) as chain:
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
    models: Models, held: list[tuple[int, Caches]], kind: str, layers: Layers
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


# --- the MASK id ---------------------------------------------------------------------------------------------------


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


# --- what windows cost ---------------------------------------------------------------------------------------------


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
