"""Answers that must call tools, and grammars after thoughts, on random weights that by themselves would do neither."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine
from coordinator.engine.grammars import regex_grammar
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.calls import joined_calls
from coordinator.sessions.output import Answer, Output
from coordinator.sessions.request import Calls, Conversation, RequestSpec
from tests.cluster.callers import CALL_BEGIN, THINK_BEGIN, THINK_END, make_caller
from tests.integration.conftest import running
from tests.integration.test_scores import resident
from tests.tiny import change_json
from worker.errors import InputError

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": function}
    for function in ({"name": "pick", "parameters": SCHEMA}, {"name": "wait"})
)
DECODES = [Decode("ar"), Decode("ngram"), Decode("diffusion", window=4)]
FORCED = Calls(are_forced=True, is_parallel=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caller(tmp_path_factory.mktemp("calls") / "plain", thinks=False)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caller(tmp_path_factory.mktemp("calls") / "thinker", thinks=True)


def ask(seed: int = 0, **more: Any) -> RequestSpec:
    """Drawn at a high temperature unless the seed is 0; thoughts end now and then."""
    sampling = {"seed": seed, "temperature": 1.5 * (seed > 0), "logit_bias": {THINK_END: 5.0 if seed else 50.0}}
    prompt = Conversation(({"role": "user", "content": "Pick a fox."},), TOOLS)
    return replace(RequestSpec(prompt, max_tokens=300, sampling=sampling), **more)


def require_called(delta: Output, *, only: str | None = None) -> None:
    assert delta.finish_reason == "tool_calls" and not delta.content.strip()
    assert delta.tool_calls
    for call in delta.tool_calls:
        arguments = json.loads(call.arguments)
        assert call.name in ((only,) if only else ("pick", "wait"))
        assert arguments == {} or (arguments["size"] in ("small", "large") and 0 <= arguments["count"] <= 99)
        assert bool(arguments) == (call.name == "pick")


async def answered(model: Engine, spec: RequestSpec) -> tuple[list[int], Output]:
    answer, whole = Answer(), Output("", [], 0)
    async for output in model.generate(await model.prepare(spec)):
        answer.add(output)
        whole.content += output.content
        whole.reasoning += output.reasoning
        whole.tool_calls += output.tool_calls
        whole.finish_reason = output.finish_reason
    whole.tool_calls = tuple(joined_calls(whole.tool_calls))
    return answer.tokens, whole


@pytest.mark.parametrize("has_thought", [False, True])
@pytest.mark.parametrize("seeds", [range(1, 2), pytest.param(range(6), marks=pytest.mark.matrix)], ids=str)
async def test_every_answer_is_a_call_and_every_lossless_decoder_makes_the_same_one(
    folder: Path, thinker: Path, has_thought: bool, seeds: range
) -> None:
    thoughts = list[str]()
    async with resident(thinker if has_thought else folder, (1, 3)) as model:
        for seed in seeds:
            found = []
            for decode in DECODES:
                tokens, delta = await answered(model, ask(seed, calls=FORCED, decode=decode))
                require_called(delta)
                assert len(delta.tool_calls) == 1
                thoughts.append(delta.reasoning)
                found.append(tokens)
            assert found == [found[0]] * len(DECODES)
    assert any(thoughts) == has_thought


async def test_the_wanted_tool_is_called_and_several_may_be_where_markers_are_mere_text(tmp_path: Path) -> None:
    async with resident(make_caller(tmp_path / "text", thinks=False, has_markers=False), (2, 2)) as model:
        for seed in range(2):
            for only in ("pick", None):
                _, delta = await answered(model, ask(seed, calls=Calls(are_forced=True, only=only)))
                require_called(delta, only=only)


async def test_after_a_thought_the_answer_keeps_to_its_grammar(thinker: Path) -> None:
    thoughts = list[str]()
    async with resident(thinker, (2, 2)) as model:
        for seed, decode in enumerate(DECODES, 1):
            _, delta = await answered(model, ask(seed, grammar=regex_grammar("[0-9]{2,4}"), decode=decode))
            assert delta.finish_reason == "stop" and delta.content.isdigit() and 2 <= len(delta.content) <= 4
            thoughts.append(delta.reasoning)
    assert any(thoughts)


async def test_a_model_that_was_told_to_think_may_do_so_before_it_answers(folder: Path) -> None:
    told = replace(ask().prompt, template_arguments={"enable_thinking": True})  # type: ignore[type-var]
    bias = {"logit_bias": {THINK_END: 50.0, THINK_BEGIN: 100.0}}
    number = ask(grammar=regex_grammar("[0-9]{2,4}"), sampling=bias)
    async with resident(folder, (2, 2)) as model:
        for each, begins in ((number, ""), (replace(number, prompt=told), "<think></think>")):
            text = (await model.answer(await model.prepare(each))).text
            assert text.startswith(begins) and text.removeprefix(begins).isdigit()


async def test_a_forced_call_needs_an_end_of_sequence_token(folder: Path) -> None:
    frontend = await InputProcessor.read(cluster_options(None, str(folder)))
    with pytest.raises(InputError, match=r"^tool_choice: expected none with ignore_eos"):
        await frontend.make_request(ask(calls=FORCED, ignore_eos=True))


@pytest.mark.parametrize("thinks", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_model_whose_template_knows_no_tools_calls_them_all_the_same(tmp_path: Path, thinks: bool) -> None:
    async with resident(make_caller(tmp_path / "model", thinks=thinks, knows_tools=False), (1, 3)) as model:
        _, delta = await answered(model, ask(1, calls=Calls(are_forced=True)))
        require_called(delta)
        for seed, decode in enumerate(DECODES[:1] if thinks else DECODES[::2], 1):
            bias = {"logit_bias": {THINK_END: 5.0, CALL_BEGIN: 12.0}}  # random weights would rarely call
            spec = ask(seed, decode=decode)
            tokens, delta = await answered(model, replace(spec, sampling={**spec.sampling, **bias}))
            delta.content = ""  # any text may stand before a call
            require_called(delta)
            assert tokens.count(CALL_BEGIN) == len(delta.tool_calls)
        _, delta = await answered(model, ask(1, max_tokens=8))
        assert delta.finish_reason == "length" and not delta.tool_calls, "it may also answer in text"


async def test_a_call_is_forced_where_the_models_own_format_has_no_json(tmp_path: Path) -> None:
    folder = make_caller(tmp_path / "model", thinks=False)
    change_json(folder / "tokenizer_config.json", tool_parser_type="qwen3_coder")
    async with resident(folder, (2, 2)) as model:
        _, delta = await answered(model, ask(1, calls=FORCED))
        require_called(delta)


async def test_tools_whose_calls_no_grammar_can_keep_to_are_offered_without_one(tmp_path: Path) -> None:
    inputs = await InputProcessor.read(
        cluster_options(None, str(make_caller(tmp_path / "model", thinks=False, knows_tools=False)))
    )
    odd = ({"type": "function", "function": {"name": "a b"}},)
    prompt = Conversation(({"role": "user", "content": "Pick a fox."},), odd)
    without = ({"ignore_eos": True}, {"decode": Decode("diffusion-fast")}, {"sampling": {"min_tokens": 2}})
    for spec in (RequestSpec(prompt), *(ask(**each) for each in without)):
        request = await inputs.make_request(spec)
        assert request.not_enforced == ("schema",) and not request.sampling.HasField("grammar")
    with pytest.raises(InputError, match=r"^tools\.0\.function\.name: "):
        await inputs.make_request(RequestSpec(prompt, calls=FORCED))
    own_format = await InputProcessor.read(cluster_options(None, str(make_caller(tmp_path / "own", thinks=False))))
    request = await own_format.make_request(ask(1))
    assert request.not_enforced == ("schema",) and not request.sampling.HasField("grammar")


@pytest.mark.parametrize(("thinks", "seed"), [(False, 0), (True, 3)])
async def test_drafts_of_a_forced_call_change_no_token_and_hold(thinks: bool, seed: int, tmp_path: Path) -> None:
    """The drafter is the model, so all drafts hold where the grammar masks them as it masks the tokens."""
    folder = make_caller(tmp_path / "caller", thinks=thinks)
    inputs = await InputProcessor.read(cluster_options(None, str(folder), draft_model=str(folder)))
    async with running(folder, (1, 3), drafter=folder) as chain, Engine(chain, inputs=inputs) as engine:

        async def outputs(spec: RequestSpec) -> list[Output]:
            return [output async for output in engine.generate(await inputs.make_request(spec))]

        expected = await outputs(ask(seed, calls=FORCED, decode=Decode("ar")))
        tokens = [token for output in expected for token in output.tokens]
        for count in (3, 15):
            found = await outputs(ask(seed, calls=FORCED, decode=Decode("draft", num_drafts=count)))
            assert [token for output in found for token in output.tokens] == tokens, count
            assert found[-1].finish_reason == expected[-1].finish_reason == "tool_calls"
            assert found[-1].num_steps <= 2 + len(tokens) // (count + 1), count
