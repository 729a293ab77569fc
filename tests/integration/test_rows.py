"""What a row of a window sees, and what is drawn from it."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from protos.brigade_pb2 import Opening, Sampling
from tests.integration.conftest import Models, running
from tests.integration.windows import (
    AHEAD,
    MASK,
    MASKED,
    TEXT,
    Bench,
    distance,
    families_and_splits,
    log_softmax,
    logprobs,
    recompute,
    reordered,
    rotated,
    splits,
    window_of,
)
from tests.tiny import VOCAB
from worker.compute.sampling import Sampler
from worker.compute.shard import WindowRope


@families_and_splits
async def test_each_row_of_a_reordered_window_is_what_the_whole_model_makes_of_it(
    models: Models, family: str, layers: tuple[int, ...]
) -> None:
    whole = models(family, **MASKED)
    window = reordered(AHEAD, [6, 7, 10])
    rows = [*TEXT[:4], *window.tokens, *[MASK] * 3]
    expected = log_softmax(recompute(whole.folder).logits(rows, [*range(4), *window.positions]))
    async with running(whole.folder, layers) as chain:
        samples, guesses = await Bench(chain).rows(window, TEXT[:4])
    assert np.isneginf(samples[:, MASK]).all() and np.isneginf(guesses[:, MASK]).all()
    np.testing.assert_allclose(np.concatenate([samples, guesses]), expected[4:], rtol=1e-4, atol=1e-4)


@splits
async def test_mask_rows_behind_a_row_change_nothing_about_it(models: Models, layers: tuple[int, ...]) -> None:
    """Padding is neutral, and so is every further MASK for the tokens and masks before it."""
    async with running(models("qwen3", **MASKED).folder, layers) as chain:
        bench = Bench(chain)
        few = await bench.rows(reordered(AHEAD, [6, 7]), TEXT[:4])
        for window in (reordered(AHEAD, [6, 7], num_padding=26), reordered(AHEAD, [6, 7, 10, 11, 12])):
            more = await bench.rows(window, TEXT[:4])
            np.testing.assert_allclose(more[0], few[0], atol=2e-5)
            np.testing.assert_allclose(more[1][:2], few[1], atol=2e-5)


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


@splits
async def test_a_prompt_fused_with_its_first_window_is_the_prompt_and_then_the_window(
    models: Models, layers: tuple[int, ...]
) -> None:
    async with running(models("qwen3", **MASKED).folder, layers) as chain:
        bench = Bench(chain)
        fused = await bench.rows(window_of(TEXT, 0, wanted=1, masks=8, guessed=8))
        split_ = await bench.rows(window_of(TEXT[5:], 5, TEXT, wanted=1, masks=8, guessed=8), TEXT[:5])
    np.testing.assert_allclose(fused[0], split_[0], atol=5e-5)
    np.testing.assert_allclose(fused[1], split_[1], atol=5e-5)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}])  # fmt: skip
def test_a_position_per_row_rotates_each_row_as_it_would_be_rotated_there(scaling: dict[str, Any] | None) -> None:
    own = initialize_rope(16, 10000.0, False, scaling, 512)
    rope = WindowRope(own)
    mx.random.seed(0)
    x = mx.random.normal((1, 3, 5, 16))
    positions = [9, 10, 6, 250, 8]
    found = rope(x, mx.array(positions))
    assert found.shape == x.shape
    for row, position in enumerate(positions):
        np.testing.assert_allclose(found[:, :, row : row + 1], own(x[:, :, row : row + 1], offset=position), atol=1e-5)
    np.testing.assert_allclose(rope(x, mx.arange(7, 12)), rope(x, 7), atol=1e-5)
    np.testing.assert_allclose(rope(x, mx.arange(5)), own(x), atol=1e-5)
    if scaling is None:
        np.testing.assert_allclose(found, rotated(x, mx.array(positions), 10000.0), atol=2e-5)


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
