"""Verified drafts across real chains: the tokens and logprobs of one-token decoding."""

from typing import Any

import pytest

from protos.brigade_pb2 import Sampling
from tests.integration.conftest import Models, running
from tests.integration.windows import (
    BIASED,
    COVERING,
    MASKED,
    PROMPT,
    SAMPLINGS,
    N,
    all_or_some,
    answer,
    assert_same_samples,
    families_and_splits,
    recompute,
)


@families_and_splits
@all_or_some
async def test_verified_windows_give_the_tokens_and_logprobs_of_one_token_decoding(
    models: Models, is_all: bool, family: str, layers: tuple[int, ...]
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
async def test_drafts_from_the_text_and_diffusion_work_with_sliding_windows(
    models: Models, layers: tuple[int, ...]
) -> None:
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
