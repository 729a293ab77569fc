"""Anthropic's messages: what a body asks, and what is refused."""

from typing import Any

import pytest

from coordinator.api.anthropic import CountBody, MessagesBody
from coordinator.api.body import read
from coordinator.engine.grammars import json_grammar
from coordinator.sessions.request import Calls, Conversation, RequestSpec
from tests.unit.api.scripted import TOOL
from worker.errors import InputError

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}


def ask(**fields: Any) -> RequestSpec:
    return read(MessagesBody, HELLO | fields).to_spec()


def conversation(**fields: Any) -> Conversation:
    prompt = ask(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def test_a_conversation_with_thoughts_calls_and_results_becomes_a_templates_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "xyz"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    assert conversation(messages=messages, system=[{"type": "text", "text": "Be brief.", **cached}]).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One\nTwo"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
                {"id": "t2", "type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "And now?"},
    )


def test_turns_of_one_role_are_one_message() -> None:
    turns = [{"role": role, "content": text} for role, text in [("user", "a"), ("user", "b"), ("system", "c")]]
    said = [(each["role"], each["content"]) for each in conversation(messages=turns, system="d").messages]
    assert said == [("system", "d"), ("user", "a\nb"), ("system", "c")]


def test_tools_become_functions_and_none_are_there_where_none_may_be_called() -> None:
    tools = [{"name": "add", "description": "Adds", "input_schema": TOOL, "cache_control": None}]
    function = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": TOOL}}
    assert conversation(tools=tools).tools == (function,)
    assert conversation(tools=tools, tool_choice={"type": "auto"}).tools == (function,)
    assert conversation(tools=tools, tool_choice={"type": "none"}).tools == ()


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": 1}}, {"enable_thinking": 1}),
    ],
)
def test_thinking_is_the_templates_argument(fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert conversation(**fields).template_arguments == arguments


def test_parameters_go_by_their_own_names() -> None:
    asked = ask(stop_sequences=["END"], temperature=0.5, top_k=3, seed=7, decode="ar", metadata={"user_id": "x"})
    assert (asked.max_tokens, asked.stops, asked.decode.kind) == (9, ("END",), "ar")
    assert asked.sampling == {"temperature": 0.5, "top_k": 3, "seed": 7}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        (user({"type": "text", "text": "x"}, {"type": "image", "source": {}}), "messages.0.content.1", "'image'"),
        (user({"type": "document", "source": {}}), "messages.0.content.0", "'document'"),
        (user({"type": "text"}), "messages.0.content.0.text", "required"),
        (user({"type": "text", "text": 5}), "messages.0.content.0.text", "string"),
        (
            user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}),
            "messages.0.content.0.content.0.type",
            "'text'",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "list"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages", "begun"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type", "'any' or 'tool'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "expected the name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type", "'custom'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "required"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type", "'json_schema'"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format", "is not supported"),
        ({"stop_sequences": [""]}, "stop_sequences.0", "1 character"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_its_name(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InputError) as refusal:
        ask(**fields)
    assert refusal.value.field == field and said in refusal.value.message


def test_a_count_needs_no_max_tokens_and_a_message_does() -> None:
    body = {"messages": HELLO["messages"]}
    assert read(CountBody, body).conversation() == conversation()
    with pytest.raises(InputError, match="max_tokens: Field required"):
        read(MessagesBody, body)


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "auto"}, Calls()),
        ({"type": "auto", "disable_parallel_tool_use": True}, Calls(is_parallel=False)),
        ({"type": "any"}, Calls(are_forced=True)),
        ({"type": "tool", "name": "add"}, Calls(are_forced=True, only="add")),
    ],
)
def test_calls_can_be_forced(choice: dict[str, Any], calls: Calls) -> None:
    assert ask(tool_choice=choice).calls == calls


def test_an_output_format_is_a_schema_that_the_answer_keeps_to() -> None:
    assert ask(output_config={"format": {"type": "json_schema", "schema": TOOL}}).grammar == json_grammar(TOOL)
    assert ask(output_config={"effort": "low"}).grammar is None
