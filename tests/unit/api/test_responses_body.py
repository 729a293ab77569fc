"""Open Responses: what a body asks, and what is refused."""

from typing import Any

import pytest

from coordinator.api.body import read
from coordinator.api.responses import ResponsesBody
from coordinator.engine.grammars import json_grammar
from coordinator.sessions.request import Calls, Conversation, RequestSpec
from protos.brigade_pb2 import Sampling
from tests.unit.api.scripted import TOOL
from worker.errors import InputError


def ask(**fields: Any) -> RequestSpec:
    return read(ResponsesBody, {"input": "Hello"} | fields).to_spec()


def conversation(**fields: Any) -> Conversation:
    prompt = ask(**fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def test_items_become_a_templates_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "No jokes."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}, {"type": "input_text", "text": "Now?"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Done."}], "encrypted_content": "xyz"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Thanks."},
    ]
    assert conversation(input=items, instructions="Be brief.").messages == (
        {"role": "system", "content": "Be brief.\nNo jokes."},
        {"role": "user", "content": "1+1?\nNow?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "Done."},
        {"role": "user", "content": "Thanks."},
    )


def test_tools_become_functions_and_none_are_there_where_none_may_be_called() -> None:
    tools = [{"type": "function", "name": "add", "description": None, "parameters": TOOL, "strict": True}]
    function = {"type": "function", "function": {"name": "add", "parameters": TOOL}}
    assert conversation(tools=tools).tools == (function,)
    assert conversation(tools=tools, tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("effort", "arguments"),
    [(None, {}), ("low", {"reasoning_effort": "low"}), ("none", {"enable_thinking": False})],
)
def test_effort_is_the_templates_argument(effort: str | None, arguments: dict[str, Any]) -> None:
    assert conversation(reasoning={"effort": effort, "summary": "auto"}).template_arguments == arguments


def test_parameters_go_by_their_own_names_and_the_rest_is_ignored() -> None:
    ignored = {"store": True, "truncation": "auto", "service_tier": "flex", "user": "x", "prompt_cache_key": "y"}
    asked = ask(max_output_tokens=9, temperature=0.5, presence_penalty=1.5, kv="int8", **ignored)
    assert asked.max_tokens == 9 and asked.sampling == {"temperature": 0.5, "presence_penalty": 1.5}
    assert ask(include=["reasoning.encrypted_content"], background=False, top_logprobs=0).max_tokens is None


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores nothing"),
        ({"conversation": "conv_1"}, "conversation", "stores nothing"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "stores nothing"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "stores nothing"),
        ({"background": True}, "background", "at once"),
        ({"top_logprobs": 2}, "top_logprobs", "chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "chat/completions"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "expected an object"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tool_choice": "always"}, "tool_choice", "'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "'required'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "function_call"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
            "'input_text'",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input.0.arguments", "required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": None}, "input", "required"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_its_name(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InputError) as refusal:
        ask(**fields)
    assert refusal.value.field == field and said in refusal.value.message


def test_a_response_tells_what_held_for_it_not_what_was_asked() -> None:
    tools = [{"type": "function", "name": "add", "parameters": TOOL, "strict": True}]
    body = read(ResponsesBody, {"input": "x", "tools": tools, "parallel_tool_calls": False, "metadata": {"a": "b"}})
    echoed = body.response("r", "demo", 0, Sampling(temperature=0.25))
    assert (echoed["temperature"], echoed["top_p"]) == (0.25, 1.0)  # the model's own
    assert echoed["tools"] == [
        {"type": "function", "name": "add", "description": None, "parameters": TOOL, "strict": False}
    ]
    assert (echoed["parallel_tool_calls"], echoed["tool_choice"], echoed["metadata"]) == (False, "auto", {"a": "b"})


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, Calls()),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, Calls(is_parallel=False)),
        ({"tool_choice": "required"}, Calls(are_forced=True)),
        ({"tool_choice": {"type": "function", "name": "add"}}, Calls(are_forced=True, only="add")),
    ],
)
def test_calls_can_be_forced_and_the_response_says_so(fields: dict[str, Any], calls: Calls) -> None:
    assert ask(**fields).calls == calls
    echoed = read(ResponsesBody, {"input": "x"} | fields).response("r", "demo", 0, Sampling())
    assert echoed["tool_choice"] == fields.get("tool_choice", "auto")


def test_a_format_is_a_schema_that_the_answer_keeps_to_and_is_told_as_it_was_given() -> None:
    given = {"type": "json_schema", "name": "sum", "schema": TOOL}
    assert ask(text={"format": given | {"strict": True}}).grammar == json_grammar(TOOL)
    assert read(ResponsesBody, {"input": "x", "text": {"format": given}}).response("r", "demo", 0, Sampling())[
        "text"
    ] == {"format": given}
    assert read(ResponsesBody, {"input": "x"}).response("r", "demo", 0, Sampling())["text"] == {
        "format": {"type": "text"}
    }
