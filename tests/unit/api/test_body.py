import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from coordinator.api.anthropic import CountBody, MessagesBody
from coordinator.api.body import read
from coordinator.api.completions import CompletionBody
from coordinator.api.openai import ChatBody
from coordinator.api.responses import ResponsesBody
from coordinator.api.texts import ClassifyBody, DetokenizeBody, ScoreBody, TokenizeBody, classification
from coordinator.cli.bridge import GenerateBody
from coordinator.sessions.output import Scored, Token
from coordinator.sessions.request import Calls, make_sampling
from worker.errors import InputError

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
NUMBERS = (int, float, int | None, float | None)

SCALARS = (
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(min_value=-(10**400), max_value=10**400)
    | st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 1, 1e308, "auto", "none", "full", "rotating", "\ud800"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


WHOLE: dict[type[Any], dict[str, Any]] = {
    ChatBody: HELLO,
    CompletionBody: TEXT,
    CountBody: HELLO,
    MessagesBody: HELLO | {"max_tokens": 5},
    ResponsesBody: {"input": "hi"},
    TokenizeBody: TEXT,
    DetokenizeBody: {"tokens": [1]},
    ScoreBody: TEXT | {"continuations": ["a"]},
    ClassifyBody: TEXT | {"labels": ["a"]},
}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_a_body_holds_is_read_or_refused(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([ChatBody, CompletionBody, TokenizeBody, DetokenizeBody]))
    names = data.draw(st.lists(st.sampled_from(sorted(shape.model_fields)), max_size=4, unique=True))
    with contextlib.suppress(InputError):
        body = read(shape, WHOLE[shape] | {name: data.draw(VALUES) for name in names})
        if isinstance(body, ChatBody | CompletionBody):
            for spec in [body.to_spec()] if isinstance(body, ChatBody) else body.to_specs():
                make_sampling(**spec.sampling)


@pytest.mark.parametrize(
    ("shape", "place"),
    [
        (ChatBody, ("messages",)), (ChatBody, ("messages", 0, "content")), (ChatBody, ("tools",)),
        (ChatBody, ("stop_token_ids",)), (CompletionBody, ("stop",)), (MessagesBody, ("messages",)),
        (MessagesBody, ("system",)), (ResponsesBody, ("input",)), (TokenizeBody, ("tools",)),
        (DetokenizeBody, ("tokens",)), (ClassifyBody, ("labels",)), (ScoreBody, ("continuations",)),
    ],
)  # fmt: skip
def test_of_many_wrong_items_only_the_first_is_described(shape: type[Any], place: tuple[Any, ...]) -> None:
    """To describe each of a million takes seconds, in which no thread runs Python."""
    wrong: Any = [False] * 60
    for part in reversed(place[1:]):
        wrong = [wrong] if part == 0 else {"role": "user", part: wrong}
    with pytest.raises(ValidationError) as refusal:
        shape.model_validate(WHOLE[shape] | {place[0]: wrong})
    assert refusal.value.error_count() < 10  # one of each type of a union


def test_an_object_has_no_more_keys_than_can_be_described_at_once() -> None:
    with pytest.raises(InputError, match="expected at most 65536 keys"):
        read(ChatBody, HELLO | {"logit_bias": dict.fromkeys(map(str, range(65537)), "x")})


RESULT = {"type": "tool_result", "tool_use_id": "t"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text"}]
LOOK = {"type": "function", "function": {"name": "look"}}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (ChatBody, {"messages": []}, "messages"),
    (ChatBody, {"messages": None}, "messages"),
    (ChatBody, {"messages": [{"role": "wizard"}]}, "messages.0.role"),
    (ChatBody, said({"text": 5}), "messages.0.content.0.type"),
    (ChatBody, said(*PARTS), "messages.0.content.1"),
    (ResponsesBody, {"input": [{"role": "user", "content": PARTS}]}, "input.0.content.1"),
    (MessagesBody, said(RESULT | {"content": PARTS}), "messages.0.content.0.content.1"),
    (ChatBody, {"max_tokens": 1.5}, "max_tokens"),
    (ChatBody, {"tools": [{}], "tool_choice": "required"}, "tools.0.type"),
    (ChatBody, {"tools": [{"type": "function"}]}, "tools.0.function"),
    *(
        (shape, {"tools": [LOOK, LOOK | {"function": {"name": "f"} | wrong}]}, f"tools.1.function.{next(iter(wrong))}")
        for shape in (ChatBody, TokenizeBody)
        for wrong in ({"name": ""}, {"name": 5}, {"description": 5}, {"parameters": 5}, {"parameters": []})
    ),
    (ChatBody, {"tools": [{"type": "search"}, LOOK, LOOK]}, "tools.2.function.name"),
    (MessagesBody, {"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools.1.name"),
    (ResponsesBody, {"tools": [{"type": "function", "name": "f"}] * 2}, "tools.1.name"),
    (ChatBody, {"stop": 5}, "stop"),
    (ChatBody, {"seed": 10**30}, "seed"),
    (ChatBody, {"audio": {"voice": "alloy"}}, "audio"),
    (ChatBody, {"best_of": 2}, "best_of"),
    (ChatBody, {"functions": [{"name": "f"}]}, "functions"),
    (ChatBody, {"function_call": {"name": "f"}}, "function_call"),
    (ChatBody, {"modalities": ["text", "audio"]}, "modalities"),
    (ChatBody, {"response_format": {"type": "poem"}}, "response_format"),
    (ChatBody, {"web_search_options": {}}, "web_search_options"),
    (ChatBody, {"tool_choice": "always"}, "tool_choice"),
    (ChatBody, {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    (ChatBody, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
    (ChatBody, {"stop": ["a"] * 65}, "stop"),
    (ChatBody, {"n": 0}, "n"),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}] * 20_001}, "messages"),
    (ChatBody, {"priority": -1}, "priority"),
    (MessagesBody, {"priority": "high"}, "priority"),
    (CompletionBody, {"prompt": None}, "prompt"),
    (CompletionBody, {"prompt": []}, "prompt"),
    (CompletionBody, {"prompt": [1, "a"]}, "prompt"),
    (CompletionBody, {"prompt": ["a"] * 65, "n": 2}, "prompt"),
    (CompletionBody, {"suffix": "b"}, "suffix"),
    (CompletionBody, {"best_of": 2}, "best_of"),
    *((CompletionBody, {"max_tokens": 0} | more, "max_tokens") for more in ({}, {"echo": True}, {"logprobs": 1})),
    (TokenizeBody, {"prompt": None}, ""),
    (TokenizeBody, HELLO, ""),
    (ScoreBody, {"prompt": None}, ""),
    (ScoreBody, {"prompt_tokens": [1]}, ""),
    (ScoreBody, {"continuations": [""]}, "continuations.0"),
    (ScoreBody, {"continuations": [["a"]]}, "continuations.0.0"),
    (ScoreBody, {"prompt": None, "prompt_tokens": "a"}, "prompt_tokens"),
    (MessagesBody, said({"type": "text", "text": 5}), "messages.0.content.0.text"),
    (MessagesBody, {"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
    (MessagesBody, {"messages": []}, "messages"),
    (MessagesBody, {"tool_choice": {"type": "all"}}, "tool_choice.type"),
    (MessagesBody, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (MessagesBody, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (MessagesBody, {"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
    (MessagesBody, {"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
    (MessagesBody, {"stop_sequences": [""]}, "stop_sequences.0"),
    (ChatBody, {"top_logprobs": 2}, "top_logprobs"),
    (ChatBody, {"decode": "ar", "window": 4}, "window"),
    (ResponsesBody, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (ResponsesBody, {"conversation": {"id": "conv_1"}}, "conversation"),
    (ResponsesBody, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (ResponsesBody, {"background": True}, "background"),
    (ResponsesBody, {"top_logprobs": 2}, "top_logprobs"),
    (ResponsesBody, {"include": ["message.output_text.logprobs"]}, "include"),
    (ResponsesBody, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (ResponsesBody, {"tool_choice": {"type": "function"}}, "tool_choice.name"),
    (ResponsesBody, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    (ResponsesBody, {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments"),
    (ResponsesBody, {"input": []}, "input"),
    (ResponsesBody, {"tools": [{"type": "function", "name": ""}]}, "tools.0.name"),
    (ResponsesBody, {"input": None}, "input"),
    *(
        (shape, {name: [7]}, name)  # what would change the answer
        for shape in (ChatBody, CompletionBody, CountBody, MessagesBody, ResponsesBody)
        for name in ("guided_json", "structured_outputs", "bad_words")
    ),
    *(
        (shape, {name: value}, name)  # what only OpenAI's other bodies have
        for shape in (MessagesBody, ResponsesBody)
        for name, value in (("response_format", {"type": "json_object"}), ("stop", ["a"]), ("logit_bias", {1: 9}))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "change", "field"), REFUSED)
def test_wrong_and_unsupported_fields_are_refused(shape: type[Any], change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        body = read(shape, {key: value for key, value in (WHOLE[shape] | change).items() if value is not None})
        body.to_specs() if shape is CompletionBody else body.to_spec()
    assert refused.value.field == field
    assert not {"Input", "Field", "List", "String", "Unable"} & set(refused.value.message.split()), "pydantic's words"
    if None in change.values():
        with pytest.raises(InputError) as refused:  # null is as good as nothing
            read(shape, WHOLE[shape] | change)
        assert refused.value.field == field


def test_what_is_wrong_is_shown() -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": False}}
    for shape, change, found in (
        (CompletionBody, {"prompt": ["a", 5]}, "a list with 5"),
        (CompletionBody, {"prompt": [5, "a"]}, 'a list with "a"'),
        (CompletionBody, {"prompt": 5}, "5"),
        (ChatBody, {"response_format": wanted}, "false"),
    ):
        with pytest.raises(InputError, match=rf"found {found}$"):
            body = read(shape, WHOLE[shape] | change)
            body.to_specs() if shape is CompletionBody else body.to_spec()


def test_a_boolean_and_a_text_are_no_numbers() -> None:
    of_number = [
        (shape, name) for shape in WHOLE for name, field in shape.model_fields.items() if field.annotation in NUMBERS
    ]
    for shape, field in (*of_number, (GenerateBody, "max_tokens")):
        for value in (True, "5"):
            with pytest.raises(InputError) as refusal:
                read(shape, WHOLE.get(shape, TEXT) | {field: value})
            assert refusal.value.field == field, shape


def test_a_boolean_and_a_text_are_no_token_ids() -> None:
    for shape, body, field in (
        (DetokenizeBody, {"tokens": [True]}, "tokens.0"),
        (DetokenizeBody, {"tokens": ["1"]}, "tokens.0"),
        (GenerateBody, {"prompt_tokens": [1, True]}, "prompt_tokens.1"),
    ):
        with pytest.raises(InputError) as refused:
            read(shape, body)
        assert refused.value.field == field
    assert read(GenerateBody, {"prompt_tokens": [1, 2], "logit_bias": {"7": 1}}).logit_bias == {7: 1.0}


def test_what_changes_nothing_is_let_pass() -> None:
    fields = {
        "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prediction": {"type": "content"},
        "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"],
        "function_call": "none", "best_of": 1, "tool_choice": "none", "top_logprobs": 0,
    }  # fmt: skip
    assert read(ChatBody, HELLO | fields).to_spec() == read(ChatBody, HELLO).to_spec()


@pytest.mark.parametrize("shape", WHOLE)
def test_a_null_is_as_good_as_nothing(shape: type[Any]) -> None:
    whole = WHOLE[shape]
    nulls = dict.fromkeys([field.alias or name for name, field in shape.model_fields.items()])
    assert read(shape, nulls | dict.fromkeys(["audio", "stream_options"]) | whole) == read(shape, whole)


def test_a_null_within_a_field_is_as_good_as_nothing_but_a_schema_keeps_its_own() -> None:
    assert read(ChatBody, HELLO | {"stream_options": {"include_usage": None}}) == read(ChatBody, HELLO)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [None], "default": None}}}
    assert read(ChatBody, HELLO | {"tools": [tool]}).to_spec().tools == (tool,)
    more = {"max_tokens": 5, "tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}
    found = read(MessagesBody, said({"type": "text", "text": "hi", "cache_control": None}) | more)
    assert found.to_spec() == read(MessagesBody, WHOLE[MessagesBody]).to_spec()


def test_parameters_mean_what_other_servers_clients_mean_by_them() -> None:
    ask = read(ChatBody, HELLO | {"top_k": -1, "stop": "x", "reasoning_effort": "low", "max_tokens": 5}).to_spec()
    assert ask.sampling["top_k"] == 0 and ask.stops == ("x",) and ask.max_tokens == 5
    assert getattr(ask.prompt, "template_arguments", None) == {"reasoning_effort": "low"}
    llamas = {"top_n_sigma": -1.0, "dry_penalty_last_n": -1, "dry_multiplier": 0.5, "dry_sequence_breakers": []}
    ask = read(ChatBody, HELLO | llamas | {"min_tokens": 2, "stop_token_ids": [7, 8]}).to_spec()
    assert ask.sampling == read(ChatBody, HELLO).to_spec().sampling | {"dry_multiplier": 0.5, "min_tokens": 2}
    assert ask.stop_token_ids == (7, 8) and ask.dry_sequence_breakers == ()
    ask = read(ChatBody, HELLO | {"chat_template_kwargs": {"enable_thinking": False}}).to_spec()
    assert getattr(ask.prompt, "template_arguments", None) == {"enable_thinking": False}
    assert ask.max_tokens is None
    assert read(ChatBody, HELLO | {"max_tokens": 5, "max_completion_tokens": 7}).to_spec().max_tokens == 7


def test_prompts_come_as_one_or_as_many_as_texts_or_as_ids() -> None:
    for given_as, prompts in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1], [2]], [(1,), (2,)])):
        assert [ask.prompt for ask in read(CompletionBody, {"prompt": given_as}).to_specs()] == prompts


def test_probabilities_are_over_the_labels() -> None:
    answers = [[Scored(Token(1, -1000.0), False)], [Scored(Token(2, -500.0), True), Scored(Token(3, -500.0), False)]]
    told = classification("m", ["no", "yes"], answers)
    assert told["label"] == "no" and [each["probability"] for each in told["labels"]] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("shape", "fields", "calls"),
    [
        (ChatBody, {}, Calls()),
        (ChatBody, {"parallel_tool_calls": False}, Calls(is_parallel=False)),
        (ChatBody, {"tool_choice": "required", "parallel_tool_calls": True}, Calls(are_forced=True)),
        (ChatBody, {"tool_choice": LOOK}, Calls(are_forced=True, only="look")),
        (MessagesBody, {"tool_choice": {"type": "auto"}}, Calls()),
        (MessagesBody, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, Calls(is_parallel=False)),
        (MessagesBody, {"tool_choice": {"type": "any"}}, Calls(are_forced=True)),
        (MessagesBody, {"tool_choice": {"type": "tool", "name": "look"}}, Calls(are_forced=True, only="look")),
        (ResponsesBody, {}, Calls()),
        (ResponsesBody, {"tool_choice": "auto", "parallel_tool_calls": False}, Calls(is_parallel=False)),
        (ResponsesBody, {"tool_choice": "required"}, Calls(are_forced=True)),
        (ResponsesBody, {"tool_choice": {"type": "function", "name": "look"}}, Calls(are_forced=True, only="look")),
    ],
)
def test_calls_can_be_forced(shape: type[Any], fields: dict[str, Any], calls: Calls) -> None:
    assert read(shape, WHOLE[shape] | fields).to_spec().calls == calls


def test_tools_are_told_to_the_template_unless_they_may_not_be_called() -> None:
    tools = {"tools": [LOOK]}
    assert read(ChatBody, HELLO | tools).to_spec().tools == (LOOK,)
    assert read(ChatBody, HELLO | tools | {"tool_choice": "none"}).to_spec().tools == ()
