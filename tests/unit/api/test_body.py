import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.anthropic import CountBody, MessagesBody
from coordinator.api.body import Sampled, read
from coordinator.api.completions import CompletionBody
from coordinator.api.openai import ChatBody
from coordinator.api.responses import ResponsesBody
from coordinator.api.scoring import ClassifyBody, ScoreBody
from coordinator.api.tokenizing import DetokenizeBody, TokenizeBody
from coordinator.sessions.request import make_sampling
from worker.errors import InputError

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
MANY = 10**30

SCALARS = (
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(min_value=-(10**400), max_value=10**400)
    | st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63, 2**64 - 1, 1e308, "auto", "none", "full", "rotating", "\ud800"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_a_body_holds_is_read_or_refused(data: st.DataObject) -> None:
    shape, whole = data.draw(st.sampled_from([(ChatBody, HELLO), (CompletionBody, TEXT)]))
    names = data.draw(st.lists(st.sampled_from(sorted(shape.model_fields)), max_size=4, unique=True))
    with contextlib.suppress(InputError):
        body = read(shape, whole | {name: data.draw(VALUES) for name in names})
        for ask in [body.to_spec()] if isinstance(body, ChatBody) else body.to_specs():
            make_sampling(**ask.sampling)


@pytest.mark.parametrize("shape", [TokenizeBody, DetokenizeBody])
@given(body=st.dictionaries(st.sampled_from(["prompt", "messages", "tokens", "tools"]), VALUES))
@settings(max_examples=30, deadline=None)
def test_whatever_is_to_be_tokenized_is_read_or_refused(shape: Any, body: dict[str, Any]) -> None:
    with contextlib.suppress(InputError):
        read(shape, body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "alloy"}),
        ("best_of", 2),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("response_format", {"type": "poem"}),
        ("web_search_options", {}),
        ("min_tokens", 5),
        ("stop_token_ids", [7]),
        ("guided_json", {}),
        ("tool_choice", "always"),
        ("tool_choice", {"type": "function", "name": "f"}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        ("tools", [{"type": "web_search"}]),
        ("stop", ["a"] * 65),
        ("n", 0),
    ],
)
def test_what_would_change_the_answer_and_is_not_done_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError) as refused:
        read(ChatBody, HELLO | {field: value}).to_spec()
    assert refused.value.field in (field, "")
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "me"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("service_tier", "flex"),
        ("prediction", {"type": "content"}),
        ("parallel_tool_calls", True),
        ("parallel_tool_calls", None),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("audio", None),
        ("min_tokens", 0),
        ("function_call", "none"),
        ("best_of", 1),
        ("tool_choice", "none"),
        ("top_logprobs", 3),
    ],
)
def test_what_changes_nothing_is_let_pass(field: str, value: Any) -> None:
    assert read(ChatBody, HELLO | {field: value}).to_spec() == read(ChatBody, HELLO).to_spec()


@pytest.mark.parametrize(
    ("shape", "body", "field"),
    [
        (ChatBody, {}, "messages"),
        (ChatBody, {"messages": []}, "messages"),
        (ChatBody, {"messages": [{"content": "hi"}]}, "messages.0.role"),
        (ChatBody, {"messages": [{"role": "wizard"}]}, "messages.0.role"),
        (ChatBody, HELLO | {"max_tokens": 0}, "max_tokens"),
        (ChatBody, HELLO | {"temperature": "warm"}, "temperature"),
        (ChatBody, HELLO | {"seed": MANY}, "seed"),
        (ChatBody, HELLO | {"tool_choice": 5}, "tool_choice"),
        (CompletionBody, {}, "prompt"),
        (CompletionBody, {"prompt": []}, "prompt"),
        (CompletionBody, {"prompt": [1, "a"]}, "prompt"),
        (CompletionBody, {"prompt": [[1.5]]}, "prompt"),
        (CompletionBody, {"prompt": [True]}, "prompt"),
        (CompletionBody, {"prompt": ["a"] * 65, "n": 2}, "prompt"),
        (CompletionBody, TEXT | {"suffix": "b"}, "suffix"),
        (CompletionBody, TEXT | {"best_of": 2}, "best_of"),
        (CompletionBody, TEXT | {"max_tokens": 0}, "max_tokens"),
        (TokenizeBody, {}, ""),
        (TokenizeBody, HELLO | TEXT, ""),
        (DetokenizeBody, {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_the_first_wrong_field_is_named(shape: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        read(shape, body)
    assert refused.value.field == field


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


@pytest.mark.parametrize("shape", WHOLE)
def test_a_null_is_as_good_as_nothing(shape: type[Any]) -> None:
    whole = WHOLE[shape]
    nulls = dict.fromkeys([field.alias or name for name, field in shape.model_fields.items()])
    assert read(shape, nulls | dict.fromkeys(["audio", "stream_options"]) | whole) == read(shape, whole)


def test_a_null_within_a_field_is_as_good_as_nothing_but_a_schema_keeps_its_own() -> None:
    assert read(ChatBody, HELLO | {"stream_options": {"include_usage": None}}) == read(ChatBody, HELLO)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [None], "default": None}}}
    assert read(ChatBody, HELLO | {"tools": [tool]}).tools == [tool]
    said = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]}
    more = {"max_tokens": 5, "tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}
    assert (
        read(MessagesBody, {"messages": [said]} | more).to_spec()
        == read(MessagesBody, HELLO | {"max_tokens": 5}).to_spec()
    )


@pytest.mark.parametrize(
    ("shape", "body", "field"),
    [
        (ChatBody, {"messages": None}, "messages"),
        (ChatBody, {"messages": [{"role": None, "content": "hi"}]}, "messages.0.role"),
        (MessagesBody, HELLO | {"max_tokens": None}, "max_tokens"),
    ],
)
def test_a_field_that_is_needed_may_not_be_null(shape: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        read(shape, body)
    assert refused.value.field == field


def test_parameters_mean_what_other_servers_clients_mean_by_them() -> None:
    ask = read(ChatBody, HELLO | {"top_k": -1, "stop": "x", "reasoning_effort": "low", "max_tokens": 5}).to_spec()
    assert ask.sampling["top_k"] == 0 and ask.stops == ("x",) and ask.max_tokens == 5
    assert getattr(ask.prompt, "template_arguments", None) == {"reasoning_effort": "low"}
    ask = read(ChatBody, HELLO | {"chat_template_kwargs": {"enable_thinking": False}}).to_spec()
    assert getattr(ask.prompt, "template_arguments", None) == {"enable_thinking": False}
    assert ask.max_tokens is None


def test_prompts_come_as_one_or_as_many_as_texts_or_as_ids() -> None:
    for given_as, prompts in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [(1, 2)]), ([[1], [2]], [(1,), (2,)])):
        assert [ask.prompt for ask in read(CompletionBody, {"prompt": given_as}).to_specs()] == prompts


@pytest.mark.parametrize("shape", [ChatBody, CompletionBody, CountBody, MessagesBody, ResponsesBody])
@pytest.mark.parametrize("name", ["guided_json", "structured_outputs", "stop_token_ids", "min_tokens", "bad_words"])
def test_every_shape_refuses_by_name_what_would_change_the_answer(shape: type[Sampled], name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: is not supported"):
        read(shape, {name: [7]})


@pytest.mark.parametrize("shape", [MessagesBody, ResponsesBody])
@pytest.mark.parametrize(
    "field", [{"response_format": {"type": "json_object"}}, {"stop": ["a"]}, {"logit_bias": {1: 9}}]
)
def test_what_only_openai_knows_is_refused_by_the_other_shapes(shape: type[Sampled], field: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(field))}: is not supported"):
        read(shape, field)
