"""Drafts on models with recurrent layers, whose states are cut inside their last window: the tokens of `ar`."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine
from protos.brigade_pb2 import Sampling
from tests.integration.conftest import Pass, running
from tests.integration.many import request, together, tokens_of
from tests.integration.many import two_lanes as two_lanes
from tests.integration.windows import BIASED, SAMPLINGS, answer, assert_same_samples
from tools.model_types.make import make_type

CASES = [  # the sampling, tokens of the answer, and the most steps for them
    (SAMPLINGS["greedy"], 16, 16),
    (SAMPLINGS["penalties"], 16, 16),
    (SAMPLINGS["biased"], 40, 27),  # of three tokens: some drafts hold, some do not
    (Sampling(logit_bias={17: 40.0}, logprobs=2), 40, 14),
]
IRREGULAR = ("qwen3_next", "falcon_h1", "mamba", "mamba2")  # their text of three tokens seldom repeats itself
PROMPT = tokens_of(27)
OTHERS = ("qwen3_next", "nemotron_h", "falcon_h1", "jamba", "mamba", "mamba2", "rwkv7", "kimi_linear", "lfm2")
hybrids = pytest.mark.parametrize(
    "name", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS)]
)


@hybrids
@pytest.mark.parametrize(
    "layers", [*(pytest.param(each, marks=pytest.mark.matrix) for each in ((6,), (3, 3))), (2, 2, 2)], ids=str
)
async def test_drafts_from_the_text_give_the_tokens_and_logprobs_of_one_token_decoding(
    tmp_path: Path, name: str, layers: tuple[int, ...]
) -> None:
    async with running(make_type(tmp_path / name, name), layers) as chain:
        for how, num_tokens, most_steps in CASES:
            more: dict[str, Any] = {"prompt": PROMPT, "num_tokens": num_tokens, "sampling": how}
            expected = await answer(chain, "ar", **more)
            found = await answer(chain, "ngram", num_drafts=15, **more)  # whatever steps cost here
            assert_same_samples(found, expected, f"{name} {how}")
            assert found.usage.num_steps <= (
                num_tokens - 1 if how == SAMPLINGS["biased"] and name in IRREGULAR else most_steps
            )


@pytest.mark.usefixtures("two_lanes")
@hybrids
async def test_drafts_held_and_failed_in_lanes_change_no_token(tmp_path: Path, passes: list[Pass], name: str) -> None:
    bias = dict(BIASED.logit_bias)
    requests = [
        request(tokens_of(11, 1), 14),
        request(tokens_of(6, 4) * 5, 24, Decode("ngram"), logit_bias=bias),
        request(tokens_of(25, 7), 18, Decode("ngram"), seed=3, temperature=1.0, logit_bias=bias),
        request(tokens_of(9, 2) * 3, 12, Decode("ngram")),
        request(tokens_of(19, 6), 18, seed=2, temperature=0.7),
    ]
    async with running(make_type(tmp_path / name, name), (2, 3, 1)) as chain:
        alone = [
            await answer(chain, "ar", prompt=each.prompt, num_tokens=each.max_tokens, sampling=each.sampling)
            for each in requests
        ]
        found = await together(chain, requests)
    assert [each.tokens for each in found] == [each.tokens for each in alone]
    assert any(len(each.rows) > 1 and max(each.rows) > 1 for each in passes), "no drafts in a lane"


async def test_a_conversation_goes_on_inside_the_last_drafts_of_an_answer(tmp_path: Path) -> None:
    bias = dict(BIASED.logit_bias)
    async with running(make_type(tmp_path / "qwen3_5", "qwen3_5"), (2, 4)) as chain:
        for seed in (1, 2):
            async with Engine(chain) as engine:
                first = request(tokens_of(9, seed) * 3, 30 + seed, Decode("ngram"), logit_bias=bias)
                text = (*first.prompt, *(await engine.answer(first)).tokens)
                follow_up = request((*text, 7, 8, 9), 12, Decode("ngram"))
                found = await engine.answer(follow_up)
            expected = await answer(chain, "ar", prompt=follow_up.prompt, num_tokens=12, sampling=Sampling())
            assert found.tokens == expected.tokens
            assert found.usage is not None and found.usage.num_reused >= len(text) - 1


async def test_a_prompt_of_one_token_begins_beside_others(tmp_path: Path) -> None:
    """N-grams remember the last tokens: fewer of them, as long as there are no more."""
    requests = [request(tokens_of(length, length), 8) for length in (9, 1, 2)]
    async with running(make_type(tmp_path / "ngram", "longcat_flash_ngram"), (2, 4)) as chain:
        alone = [await answer(chain, "ar", prompt=each.prompt, num_tokens=8, sampling=Sampling()) for each in requests]
        found = await together(chain, requests)
    assert [each.tokens for each in found] == [each.tokens for each in alone]
