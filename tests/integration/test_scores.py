"""How likely given tokens are: the model's own figures, however it is split and whatever happens to the chain."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from coordinator.engine.engine import Engine
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request, check_request
from protos.brigade_pb2 import Frame, Sampling
from tests.integration.conftest import Models, Whole, running
from tests.integration.many import frames as frames
from tests.integration.many import request, tokens_of
from tests.integration.test_epochs import loaded
from worker.errors import InputError, StageLost

PROMPT = tokens_of(150)
CHUNK = 64  # rows, so that a prompt goes in several chunks
CLOSE = 1e-5  # nats


def scored(prompt: Sequence[int], begin: int = 1, num_alternatives: int = 0, **more: int) -> Request:
    sampling = Sampling(logprobs=1 + num_alternatives)
    return Request(tuple(prompt), 1, sampling, score_from=begin, **more)  # type: ignore[arg-type]


def expected(model: Whole, prompt: Sequence[int]) -> mx.array:
    """Log-probabilities [N - 1, V] of what follows each token but the last, by mlx-lm in one pass."""
    logits = model.reference.model(mx.array([prompt[:-1]]))[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def require_equal(found: Answer, model: Whole, prompt: Sequence[int], begin: int = 1) -> None:
    logprobs = expected(model, prompt)
    own = [logprobs[at - 1, prompt[at]].item() for at in range(begin, len(prompt))]
    assert [score.token.token for score in found.scores] == list(prompt[begin:])
    assert [score.token.logprob for score in found.scores] == pytest.approx(own, abs=CLOSE)
    greedy = [mx.argmax(logprobs[at - 1]).item() == prompt[at] for at in range(begin, len(prompt))]
    assert [score.is_greedy for score in found.scores] == greedy


@pytest.mark.parametrize(
    ("family", "layers"),
    [("qwen3", (4,)), ("qwen3", (1, 3)), ("qwen3", (1, 2, 1)), ("gemma3_text", (1, 2, 1)), ("qwen3_5", (1, 3))],
    ids=str,
)
async def test_scores_are_those_of_the_whole_model(models: Models, family: str, layers: tuple[int, ...]) -> None:
    model = models(family)
    async with running(model.folder, layers) as chain, Engine(chain) as engine:
        require_equal(await engine.answer(scored(PROMPT), chunk=CHUNK), model, PROMPT)


async def test_greedy_tokens_are_known_as_such_and_come_with_alternatives(models: Models) -> None:
    model = models("qwen3")
    prompt = (*tokens_of(5), *model.tokens(tokens_of(5), 8))
    async with running(model.folder, (2, 2)) as chain, Engine(chain) as engine:
        found = await engine.answer(scored(prompt, 5, num_alternatives=3))
    require_equal(found, model, prompt, 5)
    assert all(score.is_greedy for score in found.scores) and len(found.scores) == 8
    logprobs = expected(model, prompt)
    for at, score in enumerate(found.scores, 5):
        best = mx.argsort(-logprobs[at - 1])[:3].tolist()
        assert [other.token for other in score.token.alternatives] == best
        assert score.token.alternatives[0].logprob == pytest.approx(score.token.logprob)


async def test_what_is_kept_of_others_is_used_up_to_where_scores_begin(models: Models, frames: list[Frame]) -> None:
    model = models("qwen3")
    async with running(model.folder, (2, 2)) as chain, Engine(chain) as engine:
        await engine.answer(request(PROMPT, 2))
        begin = 100
        found = await engine.answer(scored(PROMPT, begin))
        assert found.usage.num_reused == begin - 1
        require_equal(found, model, PROMPT, begin)
        assert (await engine.answer(scored(PROMPT))).usage.num_reused == 0


async def test_a_prompt_is_scored_together_with_its_answer_or_without_any(models: Models) -> None:
    model = models("qwen3")
    plain = request(PROMPT, 6)
    async with running(model.folder, (2, 2)) as chain, Engine(chain) as engine:
        alone = await engine.answer(plain)
        both = await engine.answer(replace(plain, score_from=1))
        none = await engine.answer(replace(plain, score_from=1, max_tokens=0, eos=frozenset(alone.tokens)))
    assert both.tokens == alone.tokens and len(alone.tokens) == 6
    for found in (both, none):
        require_equal(found, model, PROMPT)
    assert (none.tokens, none.text, none.finish_reason, none.usage.num_generated) == ([], "", "length", 0)


async def test_scores_stand_beside_streams_in_one_frame(models: Models) -> None:
    model = models("qwen3")
    async with running(model.folder, (1, 2, 1)) as chain, Engine(chain) as engine:
        beside = engine.generate(request(tokens_of(9, 3), 40))
        told = [token.token for token in (await anext(beside)).tokens]
        require_equal(await engine.answer(scored(PROMPT)), model, PROMPT)
        told += [token.token async for piece in beside for token in piece.tokens]
    assert told == model.tokens(tokens_of(9, 3), 40)


async def test_each_score_comes_once_though_chains_are_lost(models: Models) -> None:
    model = models("qwen3")
    answer = Answer()
    async with (
        loaded(model.folder, (1, 2, 1)) as cluster,
        Engine(await cluster.open(), when_lost=cluster.open) as engine,
    ):
        async for piece in engine.generate(scored(PROMPT), chunk=CHUNK):
            answer.add(piece)
            if len(answer.scores) == CHUNK:
                engine.chain._stage.fail(StageLost("is gone"))  # type: ignore[union-attr]
    assert answer.usage.num_recoveries == 1
    require_equal(answer, model, PROMPT)


@pytest.mark.parametrize(("begin", "prompt"), [(0, (1, 2)), (2, (1, 2)), (1, (1,))])
async def test_what_follows_nothing_has_no_score(models: Models, begin: int, prompt: tuple[int, ...]) -> None:
    async with running(models("qwen3").folder, (4,)) as chain:
        with pytest.raises(InputError, match="at least two tokens"):
            check_request(scored(prompt, begin), chain.spec)
