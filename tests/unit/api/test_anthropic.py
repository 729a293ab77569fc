"""Anthropic's messages: an answer's deltas as events and as one message, by the types of the official client."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from anthropic import APIStatusError, AsyncAnthropic, RateLimitError, ServiceUnavailableError
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, ParsedMessage, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from coordinator.api.anthropic import (
    AnthropicError,
    AnthropicMessage,
    CountBody,
    MessageAnswer,
    MessageEvent,
    MessagesBody,
)
from coordinator.api.body import read
from coordinator.api.errors import HttpError
from coordinator.engine.caller import REQUEST_ID
from coordinator.engine.grammars import json_grammar
from coordinator.sessions.output import Output, ToolCall
from tests.unit.api import test_agent_requests as agents
from tests.unit.api.fakes import ALL, CALLS, TOOL, ScriptedModel, connected, delta, last
from worker.errors import QueueFull, StageLost

EVENTS: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def answer() -> MessageAnswer:
    """To a prompt of seven tokens."""
    body = read(MessagesBody, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    made = MessageAnswer(body, "demo")
    made.answer = made.answer | {"id": "msg_1", "usage": {"input_tokens": 7, "output_tokens": 0}}
    return made


def events(deltas: Sequence[Output]) -> list[RawMessageStreamEvent]:
    """As the client's types; fails if one is none of them, or not as our own document says."""
    told = answer()
    found = [event for each in deltas for event in told.events(0, each)]
    assert all(MessageEvent.model_validate(event) for event in found)
    assert found[1] == {"type": "ping"}
    return [EVENTS.validate_python(event) for event in found[:1] + found[2:]]


def whole(deltas: Sequence[Output]) -> dict[str, Any]:
    """The message that all events add up to, as our own document says."""
    told = answer()
    assert [event for each in deltas for event in told.events(0, each)]
    return dict(TypeAdapter(AnthropicMessage).validate_python(told.answer))


def accumulated(deltas: Sequence[Output]) -> Message:
    """What the official client makes of the events."""
    snapshot: ParsedMessage[None] | None = None
    buffers: dict[int, bytes] = {}
    for event in events(deltas):
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return Message.model_validate(snapshot.to_dict())


def test_the_message_has_a_block_for_every_thought_text_and_call() -> None:
    message = Message.model_validate(whole(ALL))
    assert [block.to_dict() for block in message.content] == [
        {"type": "thinking", "thinking": "\nHm, add.", "signature": ""},
        {"type": "text", "text": "\n\nLet me add.\n\n"},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1, "b": "zwei"}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
    ]
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (5, 2, 10)


def test_the_client_makes_the_same_message_of_the_events() -> None:
    message = whole(ALL)
    del message["brigade"]
    assert accumulated(ALL).to_dict(exclude_none=True) == Message.model_validate(message).to_dict(exclude_none=True)
    said = [delta(reasoning="Hm."), delta("Hel"), delta("lo"), delta(calls=CALLS[:1]), last("tool_calls")]
    kinds = [(event.type.removeprefix("content_block_"), getattr(event, "index", None)) for event in events(said)]
    assert kinds == [
        ("message_start", None),
        *((kind, 0) for kind in ("start", "delta", "stop")),
        *((kind, 1) for kind in ("start", "delta", "delta", "stop")),
        *((kind, 2) for kind in ("start", "delta", "stop")),
        ("message_delta", None),
        ("message_stop", None),
    ]


@pytest.mark.parametrize(
    ("end", "reason", "stop"),
    [
        (last("stop"), "end_turn", None),
        (last("stop", stop="END"), "stop_sequence", "END"),
        (last("length"), "max_tokens", None),
        (last("tool_calls", stop="END"), "tool_use", None),
    ],
)
def test_the_message_says_why_it_ended(end: Output, reason: str, stop: str | None) -> None:
    message = whole([delta("x"), end])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


def test_white_space_is_a_text_only_where_nothing_else_is_said() -> None:
    assert whole([delta(" \n"), last()])["content"] == [{"type": "text", "text": " \n"}]
    said = [delta(" "), delta(reasoning="Hm."), delta("\n"), delta("a "), delta(" "), last()]
    assert whole(said)["content"][1:] == [{"type": "text", "text": "\na  "}]
    assert whole([last()])["content"] == []


@pytest.mark.parametrize(
    ("arguments", "known"),
    [("[1]", {}), ("no JSON", {}), ('{"a": "b', {}), ('{"a": 1, "b": ["c"], "d": "e', {"a": 1, "b": ["c"]})],
)
def test_the_input_of_a_call_is_an_object_of_the_models_own_keys(arguments: str, known: dict[str, Any]) -> None:
    called = [delta(calls=[ToolCall("c", "f", arguments)]), last("length")]
    assert whole(called)["content"][0]["input"] == known
    assert accumulated(called).content[0].to_dict()["input"] == known


def test_errors_have_the_type_of_their_status() -> None:
    kinds = {
        400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
        405: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
    }  # fmt: skip
    for status, kind in kinds.items():
        token = REQUEST_ID.set("req_1")
        told = HttpError(status, "why").to_anthropic()
        REQUEST_ID.reset(token)
        error = ErrorResponse.model_validate(told)
        assert TypeAdapter(AnthropicError).validate_python(told)
        assert (error.error.type, error.error.message, error.request_id) == (kind, "why", "req_1")


HELLO = agents.BODIES["messages"]["messages"]


async def asked(script: Sequence[Output | Exception], *, streamed: bool) -> Message:
    http_client = connected(ScriptedModel(script))
    asking: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": HELLO}
    async with AsyncAnthropic(api_key="any", base_url="http://h", max_retries=0, http_client=http_client) as client:
        if not streamed:
            return await client.messages.create(**asking, tools=[{"name": "add", "input_schema": TOOL}])
        async with client.messages.stream(**asking) as stream:
            return await stream.get_final_message()


@pytest.mark.parametrize("streamed", [True, False])
async def test_thoughts_and_calls_reach_the_client(streamed: bool) -> None:
    message = await asked(ALL, streamed=streamed)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].to_dict()["input"] == {"a": 1, "b": "zwei"}
    assert message.stop_reason == "tool_use" and message.usage.cache_read_input_tokens == 2


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_failure_is_an_error_event_or_a_status(streamed: bool) -> None:
    for script, kind, seen in (
        ([QueueFull("too many wait")], "rate_limit_error", RateLimitError),
        ([StageLost("no chain")], "overloaded_error", ServiceUnavailableError),
    ):
        with pytest.raises(seen) as failure:
            await asked(script, streamed=streamed)
        assert failure.value.type == kind and failure.value.response.headers["retry-after"]
        assert failure.value.request_id == failure.value.response.json()["request_id"]
    with pytest.raises(APIStatusError) as failure:  # in the middle
        await asked([delta("x"), StageLost("the worker has gone", node="b")], streamed=True)
    assert (failure.value.type, failure.value.api_message) == ("overloaded_error", "worker b: the worker has gone")


spec, conversation = partial(agents.spec, "messages"), partial(agents.conversation, "messages")


def test_a_conversation_with_thoughts_calls_and_results_becomes_a_templates_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    said = [
        {"type": "thinking", "thinking": "Hm.", "signature": "xyz"},
        {"type": "redacted_thinking", "data": "abc"},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two", **cached}]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": results},
    ]
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "t2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ]
    assert conversation(messages=messages, system=[{"type": "text", "text": "Be brief.", **cached}]).messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One\nTwo"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "And now?"},
    )


def test_fields_become_those_of_a_request() -> None:
    turns = [{"role": role, "content": text} for role, text in [("user", "a"), ("user", "b"), ("system", "c")]]
    said = [(each["role"], each["content"]) for each in conversation(messages=turns, system="d").messages]
    assert said == [("system", "d"), ("user", "a\nb"), ("system", "c")]
    tools = [{"name": "add", "description": "Adds", "input_schema": TOOL, "cache_control": None}]
    function = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": TOOL}}
    assert conversation(tools=tools).tools == (function,)
    assert conversation(tools=tools, tool_choice={"type": "auto"}).tools == (function,)
    assert conversation(tools=tools, tool_choice={"type": "none"}).tools == ()
    asked = spec(stop_sequences=["END"], temperature=0.5, top_k=3, seed=7, decode="ar", metadata={"user_id": "x"})
    assert (asked.max_tokens, asked.stops, asked.decode.kind) == (9, ("END",), "ar")
    assert asked.sampling == {"temperature": 0.5, "top_k": 3, "seed": 7}
    asked = spec(output_config={"format": {"type": "json_schema", "schema": TOOL}})
    assert asked.grammar == json_grammar(TOOL, is_strict=False)
    assert spec(output_config={"effort": "low"}).grammar is None
    assert conversation(output_config={"effort": "low"}).template_arguments == {"reasoning_effort": "low"}
    assert read(CountBody, {"messages": HELLO}).conversation() == conversation()  # without max_tokens
