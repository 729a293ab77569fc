"""Anthropic's messages: an answer's deltas as events and as one message, by the types of the official client."""

from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, ParsedMessage, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from coordinator.api.anthropic import AnthropicError, AnthropicMessage, MessageAnswer, MessageEvent, MessagesBody
from coordinator.api.body import read
from coordinator.api.errors import HttpError
from coordinator.engine.stats import REQUEST_ID
from coordinator.sessions.output import Output, ToolCall
from tests.unit.api.scripted import ALL, CALLS, delta, last

MESSAGE = TypeAdapter(AnthropicMessage)
ANTHROPIC_ERROR = TypeAdapter(AnthropicError)
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
    return dict(MESSAGE.validate_python(told.answer))


def accumulated(deltas: Sequence[Output]) -> Message:
    """What the official client makes of the events."""
    snapshot: ParsedMessage[None] | None = None
    buffers: dict[int, bytes] = {}
    for event in events(deltas):
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return Message.model_validate(snapshot.to_dict())


def content(deltas: Sequence[Output]) -> list[Any]:
    return list(whole(deltas)["content"])


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


def test_events_come_in_their_order() -> None:
    said = [delta(reasoning="Hm."), delta("Hel"), delta("lo"), delta(calls=CALLS[:1]), last("tool_calls")]
    kinds = [(event.type, getattr(event, "index", None)) for event in events(said)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == [
        ("message_start", None),
        *((kind, 0) for kind in block),
        *((kind, 1) for kind in [block[0], block[1], block[1], block[2]]),
        *((kind, 2) for kind in block),
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
def test_it_is_told_why_the_answer_ended(end: Output, reason: str, stop: str | None) -> None:
    message = whole([delta("x"), end])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


def test_white_space_is_a_text_only_where_nothing_else_is_said() -> None:
    assert content([delta(" \n"), last()]) == [{"type": "text", "text": " \n"}]
    assert content([delta(" "), delta(reasoning="Hm."), delta("\n"), delta("a "), delta(" "), last()])[1:] == [
        {"type": "text", "text": "\na  "}
    ]
    assert content([last()]) == []


@pytest.mark.parametrize(("arguments", "given"), [("[1]", [1]), ("no JSON", "no JSON"), ("", "")])
def test_arguments_are_an_object_whatever_the_model_says(arguments: str, given: Any) -> None:
    called = [delta(calls=[ToolCall("c", "f", arguments)]), last("tool_calls")]
    assert content(called)[0]["input"] == {"arguments": given}
    assert accumulated(called).content[0].to_dict()["input"] == {"arguments": given}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_the_type_of_their_status(status: int, kind: str) -> None:
    assert ANTHROPIC_ERROR.validate_python(HttpError(status, "why").to_anthropic())
    token = REQUEST_ID.set("req_1")
    error = ErrorResponse.model_validate(HttpError(status, "why").to_anthropic())
    REQUEST_ID.reset(token)
    assert (error.error.type, error.error.message, error.request_id) == (kind, "why", "req_1")


def test_a_body_that_is_too_large_has_a_type_that_only_the_documents_know() -> None:
    assert HttpError(413, "why").to_anthropic()["error"]["type"] == "request_too_large"
