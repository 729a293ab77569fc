"""Answers that keep to a grammar, on random weights that by themselves would say anything."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.decoding.decode import Decode
from coordinator.engine.bounded import GrammarTrials
from coordinator.engine.engine import Engine
from coordinator.engine.grammars import json_grammar, lark_grammar, regex_grammar
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.output import Answer
from coordinator.sessions.request import RequestSpec
from tests.cluster.models import VOCAB, make_talker
from tests.integration.conftest import running
from tests.integration.test_epochs import loaded
from worker.errors import InputError, StageLost

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "size", "counts", "is_new"],
    "additionalProperties": False,
}
DECODES = [Decode("ar"), Decode("ngram"), Decode("diffusion", window=4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("grammars") / "model", mask_token_id=VOCAB - 1)


def ask(grammar: str, **more: Any) -> RequestSpec:
    return RequestSpec("Tell me of a fox, as JSON: ", max_tokens=120, grammar=grammar, **more)


def require_valid(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "size", "counts", "is_new"]
    assert len(found["name"]) <= 6 and found["size"] in ("small", "large") and isinstance(found["is_new"], bool)
    assert len(found["counts"]) <= 3 and all(0 <= count <= 99 for count in found["counts"])


@pytest.mark.parametrize(
    "num_answers", [2, pytest.param(10, marks=pytest.mark.long), pytest.param(34, marks=pytest.mark.matrix)]
)
@pytest.mark.parametrize("decode", DECODES, ids=lambda decode: decode.kind)
@pytest.mark.parametrize("layers", [(4,), (1, 3)], ids=str)
async def test_every_answer_is_valid_json_of_its_schema(
    folder: Path, layers: tuple[int, ...], decode: Decode, num_answers: int
) -> None:
    """The first one greedy, the others drawn at a high temperature."""
    frontend = await InputProcessor.read(str(folder))
    async with running(folder, layers) as chain, Engine(chain, inputs=frontend) as engine:
        for seed in range(num_answers):
            sampling = {"seed": seed, "temperature": 1.5 * (seed > 0)}
            task = await frontend.make_request(ask(json_grammar(SCHEMA), sampling=sampling, decode=decode))
            answer = await engine.answer(task)
            assert answer.finish_reason == "stop"
            require_valid(answer.text)


async def tokens_alone(folder: Path, asks: list[RequestSpec]) -> list[list[int]]:
    frontend = await InputProcessor.read(str(folder))
    async with running(folder, (2, 2)) as chain, Engine(chain, inputs=frontend) as engine:
        return [(await engine.answer(await frontend.make_request(each))).tokens for each in asks]


async def test_every_lossless_decoder_says_the_same_under_a_grammar_alone_and_beside_others(folder: Path) -> None:
    sampling = {"seed": 5, "temperature": 1.2, "repetition_penalty": 1.1}
    asks = [ask(json_grammar(SCHEMA), sampling=sampling, decode=decode) for decode in DECODES]
    free = RequestSpec("Once upon a time", max_tokens=30, sampling=sampling, decode=Decode("ar"))
    [first, *others, unbound] = await tokens_alone(folder, [*asks, free])
    assert others == [first, first]
    frontend = await InputProcessor.read(str(folder))
    async with running(folder, (1, 2, 1)) as chain, Engine(chain, inputs=frontend) as engine:
        tasks = [await frontend.make_request(each) for each in [*asks, free]]
        answers = await asyncio.gather(*(engine.answer(task) for task in tasks))
    assert [answer.tokens for answer in answers] == [first, first, first, unbound]


async def test_a_matcher_is_made_again_from_the_tokens_when_a_chain_is_lost(folder: Path) -> None:
    each = ask(json_grammar(SCHEMA), sampling={"seed": 3, "temperature": 1.0}, decode=Decode("ar"))
    [expected] = await tokens_alone(folder, [each])
    frontend, answer = await InputProcessor.read(str(folder)), Answer()
    async with loaded(folder, (2, 2)) as cluster, Engine(await cluster.open(), when_lost=cluster.open) as engine:
        async for piece in engine.generate(await frontend.make_request(each)):
            answer.add(piece)
            if len(answer.tokens) == len(expected) // 2:
                engine.chain._stage.fail(StageLost("is gone"))  # type: ignore[union-attr]
    assert answer.tokens == expected and answer.usage.num_recoveries == 1


async def test_regular_expressions_and_lark_grammars_hold_too(folder: Path) -> None:
    frontend = await InputProcessor.read(str(folder))
    lark = 'start: greeting " " /[a-z]{2,5}/ "!"\ngreeting: "hello" | "good day"'
    async with running(folder, (2, 2)) as chain, Engine(chain, inputs=frontend) as engine:
        for grammar, pattern in ((regex_grammar(r"[0-9]{3}-[A-F]{1,9}"), r"[0-9]{3}-[A-F]{1,9}"),
                                 (lark_grammar(lark), r"(hello|good day) [a-z]{2,5}!")):  # fmt: skip
            task = await frontend.make_request(ask(grammar, sampling={"seed": 1, "temperature": 0.8}))
            answer = await engine.answer(task)
            assert answer.finish_reason == "stop" and re.fullmatch(pattern, answer.text)


@pytest.mark.parametrize(
    ("grammar", "more", "field"),
    [
        (regex_grammar("(a"), {}, "response_format"),
        (lark_grammar("start: nothing_of_that_name"), {}, "response_format"),
        (json_grammar({"type": "nope"}), {}, "response_format"),
        (json_grammar(SCHEMA), {"decode": Decode("diffusion-fast")}, "decode"),
        (json_grammar(SCHEMA), {"ignore_eos": True}, "response_format"),
    ],
)
async def test_what_cannot_be_kept_to_is_refused(folder: Path, grammar: str, more: dict[str, Any], field: str) -> None:
    frontend = await InputProcessor.read(str(folder))
    with pytest.raises(InputError) as refused:
        await frontend.make_request(ask(grammar, **more))
    assert refused.value.field == field and "\n" not in refused.value.message


async def test_a_model_without_a_fast_tokenizer_has_no_grammars(folder: Path, tmp_path: Path) -> None:
    frontend = await InputProcessor.read(str(folder))
    frontend._trials = GrammarTrials(tmp_path, VOCAB, sorted(frontend.eos))
    with pytest.raises(InputError, match=r"response_format: grammars need a tokenizer\.json"):
        await frontend.make_request(ask(json_grammar()))
