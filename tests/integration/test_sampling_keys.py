"""Randomness is keyed by (seed, position): nothing but the seed and the tokens so far decides the next token."""

import pytest

from protos.brigade_pb2 import Sampling
from tests.integration.conftest import Models, answer, running
from tests.tiny import VOCAB

PROMPT = tuple((11 * i + 5) % VOCAB for i in range(19))
NUM_TOKENS = 12


def sampling(seed: int) -> Sampling:
    """Hot, so that nearly every draw depends on its key."""
    return Sampling(seed=seed, temperature=2.0, top_p=0.99)


async def test_another_seed_gives_other_tokens_and_earlier_samples_change_nothing(models: Models) -> None:
    seeds = (0, 1, 2, 7, 1 << 32, (1 << 64) - 1)
    async with running(models("qwen3").folder, (2, 2)) as chain:
        answers = [tuple((await answer(chain, PROMPT, NUM_TOKENS, sampling(seed))).tokens) for seed in seeds]
        again = (await answer(chain, PROMPT, NUM_TOKENS, sampling(seeds[0]))).tokens
    assert len(set(answers)) == len(seeds)
    assert tuple(again) == answers[0]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5"])
async def test_a_session_replayed_from_its_tokens_goes_on_with_the_same_tokens(models: Models, family: str) -> None:
    """How a failure is survived: prompt and answer so far, fed as a prompt to other nodes."""
    folder = models(family).folder
    async with running(folder, (1, 2, 1)) as chain:
        tokens = (await answer(chain, PROMPT, NUM_TOKENS, sampling(3))).tokens
    async with running(folder, (3, 1)) as chain:
        for lost_at in (1, 5, NUM_TOKENS - 1):
            replayed = await answer(chain, (*PROMPT, *tokens[:lost_at]), NUM_TOKENS - lost_at, sampling(3))
            assert replayed.tokens == tokens[lost_at:]


async def test_the_same_context_one_position_later_draws_with_another_key(models: Models) -> None:
    """A key per position, not one per session: a flat distribution does not give one token again and again."""
    flat = Sampling(seed=7, temperature=100.0)
    async with running(models("qwen3").folder, (2, 2)) as chain:
        tokens = (await answer(chain, PROMPT, NUM_TOKENS, flat)).tokens
    assert len(set(tokens)) > NUM_TOKENS / 2
