"""Answers that keep to a grammar, on random weights that would say anything, and how grammars are compiled."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine, collect
from coordinator.engine.grammars import json_grammar, lark_grammar, regex_grammar
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.output import Answer
from coordinator.sessions.request import RequestSpec
from protos.brigade_pb2 import Grammar
from tests.cluster.models import VOCAB, make_talker
from tests.integration.conftest import Layers, load_request, running, serving
from tests.integration.test_epochs import answer_over_a_loss
from tests.integration.test_scores import resident
from worker.compute import grammar as grammars
from worker.errors import FrameError, InputError, ModelError, SamplingError

SCHEMA = {  # short names: nearly every byte of an answer is a token
    "type": "object",
    "properties": {
        "n": {"type": "string", "maxLength": 6},
        "s": {"enum": ["small", "large"]},
        "c": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        "b": {"type": "boolean"},
    },
    "required": ["n", "s", "c", "b"],
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
    assert list(found) == ["n", "s", "c", "b"]
    assert len(found["n"]) <= 6 and found["s"] in ("small", "large") and isinstance(found["b"], bool)
    assert len(found["c"]) <= 2 and all(0 <= count <= 99 for count in found["c"])


async def answers_alone(folder: Path, layers: Layers, asks: list[RequestSpec]) -> list[Answer]:
    async with resident(folder, layers) as model:
        return [await model.answer(await model.prepare(each)) for each in asks]


@pytest.mark.parametrize("layers", [pytest.param((4,), marks=pytest.mark.matrix), (1, 3)], ids=str)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 34), marks=pytest.mark.matrix)], ids=str)
async def test_every_answer_of_every_lossless_decoder_is_the_same_valid_json_of_its_schema(
    folder: Path, layers: Layers, seeds: range
) -> None:
    """The first one greedy, the others drawn at a high temperature."""
    async with resident(folder, layers) as model:
        for seed in seeds:
            sampling = {"seed": seed, "temperature": 1.5 * (seed > 0)}
            decodes = DECODES if layers == (1, 3) else DECODES[2 * seed % 3 :][:1]
            asks = [ask(json_grammar(SCHEMA), sampling=sampling, decode=decode) for decode in decodes]
            first, *others = [await model.answer(await model.prepare(each)) for each in asks]
            assert first.finish_reason == "stop"
            require_valid(first.text)
            assert [(each.tokens, each.text) for each in others] == [(first.tokens, first.text)] * len(others)


@pytest.mark.parametrize(
    ("layers", "sampling"),
    [((4,), {"temperature": 0.0}), ((1, 3), {"seed": 3, "temperature": 1.5, "repetition_penalty": 1.1})],
)
async def test_a_drafter_drafts_by_the_grammar(folder: Path, layers: Layers, sampling: dict[str, Any]) -> None:
    inputs, counts = await InputProcessor.read(cluster_options(None, str(folder), draft_model=str(folder))), (3, 15)
    async with running(folder, layers, drafter=folder) as chain, Engine(chain, inputs=inputs) as engine:
        decodes = [Decode("ar"), *(Decode("draft", num_drafts=count) for count in counts)]
        asks = [ask(json_grammar(SCHEMA), sampling=sampling, decode=decode) for decode in decodes]
        first, *others = [await engine.answer(await inputs.make_request(each)) for each in asks]
    require_valid(first.text)
    for count, other in zip(counts, others, strict=True):
        assert other.tokens == first.tokens
        assert other.usage.num_steps == 1 + -(-(len(first.tokens) - 1) // (count + 1))


async def test_under_a_grammar_an_answer_beside_others_is_what_it_is_alone(folder: Path) -> None:
    sampling = {"seed": 5, "temperature": 1.2, "repetition_penalty": 1.1}
    asks = [ask(json_grammar(SCHEMA), sampling=sampling, decode=decode) for decode in DECODES]
    free = RequestSpec("Once upon a time", max_tokens=30, sampling=sampling, decode=Decode("ar"))
    alone = await answers_alone(folder, (2, 2), [asks[0], free])
    async with resident(folder, (1, 2, 1)) as model:
        tasks = [await model.prepare(each) for each in [*asks, free]]
        answers = await asyncio.gather(*map(model.answer, tasks))
    assert [answer.tokens for answer in answers] == [*[alone[0].tokens] * 3, alone[1].tokens]


async def test_a_matcher_is_made_again_from_the_tokens_when_a_chain_is_lost(folder: Path) -> None:
    each = ask(json_grammar(SCHEMA), sampling={"seed": 3, "temperature": 1.0}, decode=Decode("ar"))
    [alone] = await answers_alone(folder, (2, 2), [each])
    asked = await (await InputProcessor.read(cluster_options(None, str(folder)))).make_request(each)
    found = await answer_over_a_loss(folder, (2, 2), asked, len(alone.tokens) // 2)
    assert found.tokens == alone.tokens


async def test_regular_expressions_and_lark_grammars_hold_too(folder: Path) -> None:
    lark = 'start: greeting " " /[a-z]{2,5}/ "!"\ngreeting: "hello" | "good day"'
    grammars = {
        r"[0-9]{3}-[A-F]{1,9}": regex_grammar(r"[0-9]{3}-[A-F]{1,9}"),
        "(hello|good day) [a-z]{2,5}!": lark_grammar(lark),
    }
    asks = [ask(grammar, sampling={"seed": 1, "temperature": 0.8}) for grammar in grammars.values()]
    for pattern, answer in zip(grammars, await answers_alone(folder, (2, 2), asks), strict=True):
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
    frontend = await InputProcessor.read(cluster_options(None, str(folder)))
    with pytest.raises(InputError) as refused:
        await frontend.make_request(ask(grammar, **more))
    assert refused.value.field == field and "\n" not in refused.value.message


NUMBER = RequestSpec("Count: ", max_tokens=9, grammar=regex_grammar("[0-9]{3,5}"))


async def said(model: Engine, ask: RequestSpec) -> str:
    [deltas] = await collect(model, [await model.prepare(ask)])
    return "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("layers", [(4,), (1, 3)], ids=str)
async def test_a_grammar_that_compiles_for_long_holds_up_no_other_session(
    folder: Path, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled on the last stage before another session has had its whole answer."""
    compiles, may_go_on = asyncio.Event(), threading.Event()
    loop, compiled = asyncio.get_running_loop(), grammars.Grammars.compile
    async with resident(folder, layers) as model:

        def slowly(self: grammars.Grammars, grammar: Grammar) -> LLMatcher:
            loop.call_soon_threadsafe(compiles.set)
            assert may_go_on.wait(20)
            return compiled(self, grammar)

        monkeypatch.setattr(grammars.Grammars, "compile", slowly)
        number = asyncio.create_task(said(model, NUMBER))
        try:
            await compiles.wait()
            assert len(await said(model, RequestSpec("Once", max_tokens=12, ignore_eos=True))) > 0
            assert not number.done()
        finally:
            may_go_on.set()
        assert (await number).isdigit()


async def test_the_vocabulary_is_read_before_the_first_grammar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that takes longer than a client's grammar may."""
    read, tokenizer = list[Any](), grammars.LLTokenizer
    monkeypatch.setattr(grammars, "LLTokenizer", lambda *given, **more: read.append(more) or tokenizer(*given, **more))
    grammars.read_tokenizer.cache_clear()
    async with resident(folder, (1, 3)) as model:
        await model.expect_grammars()
        assert len(read) == 1  # on the last stage, which is in this process; grammars are tried in another one
        assert (await said(model, NUMBER)).isdigit()
        assert len(read) == 1


async def test_a_worker_refuses_grammars_that_it_cannot_compile(folder: Path) -> None:
    async with serving(1) as [node], node.reached() as peer:
        with pytest.raises(ModelError, match="holds no shard"):
            await peer.compile(Grammar(text=regex_grammar("a"), eos=[1]))
        await node.load(load_request(folder, 1, 4))
        with pytest.raises(SamplingError, match="its parser says"):
            await peer.compile(Grammar(text=regex_grammar("(a"), eos=[1]))
        with pytest.raises(FrameError, match="tokens that end an answer"):
            await peer.compile(Grammar(text=regex_grammar("a"), eos=[1] * 65))
