from typing import Any

import pytest

from coordinator.resident.ask import Calls, Conversation
from coordinator.resident.channels import Delta, ToolCall
from coordinator.sessions.answer import Piece, Token, Usage
from coordinator.shapes.body import read
from coordinator.shapes.openai_chat import ChatAnswer, ChatBody
from worker.errors import InputError

USAGE = Usage(3, 0, 2, 4, 4, num_generated=4)
CALL = ToolCall("call_1", "look", '{"a": 1}')


def messages_of(*messages: dict[str, Any]) -> list[Any]:
    prompt = read(ChatBody, {"messages": list(messages)}).ask().prompt
    assert isinstance(prompt, Conversation)
    return list(prompt.messages)


def test_messages_are_told_to_the_template_in_its_own_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    assert messages_of(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call | {"function": {"name": "look", "arguments": {"a": 1}}}],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", None])
def test_parts_that_are_no_text_are_refused(kind: str | None) -> None:
    with pytest.raises(InputError, match="messages: expected parts of type text"):
        messages_of({"role": "user", "content": [{"type": kind, "text": 5}]})


def test_a_stream_and_a_whole_answer_tell_the_same() -> None:
    deltas = [
        Delta(Piece("", (Token(1),), 0)),
        Delta(Piece("", (Token(1),), 0), reasoning="hm"),
        Delta(Piece("", (Token(1),), 0), content="look: "),
        Delta(Piece("", (Token(1),), 0, "stop", USAGE), tool_calls=(CALL,), finish_reason="tool_calls"),
    ]
    answer = ChatAnswer("id", "talker", 0, str)
    [choice] = answer.whole([deltas])["choices"]
    chunks = [chunk["choices"][0] for each in deltas if (chunk := answer.chunk(0, each, 0))]
    assert len(chunks) == 3
    message = choice["message"]
    assert message["content"] == "".join(chunk["delta"].get("content", "") for chunk in chunks) == "look: "
    assert message["reasoning"] == message["reasoning_content"] == chunks[0]["delta"]["reasoning_content"] == "hm"
    [call] = message["tool_calls"]
    assert chunks[-1]["delta"]["tool_calls"] == [call | {"index": 0}]
    assert call["function"] == {"name": "look", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"


def test_tools_are_told_to_the_template_unless_they_may_not_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    assert list(read(ChatBody, body).ask().tools) == tools
    assert read(ChatBody, body | {"tool_choice": "none"}).ask().tools == ()


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, Calls()),
        ({"parallel_tool_calls": False}, Calls(is_parallel=False)),
        ({"tool_choice": "required", "parallel_tool_calls": True}, Calls(are_forced=True)),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, Calls(are_forced=True, only="look")),
    ],
)
def test_calls_can_be_forced(fields: dict[str, Any], calls: Calls) -> None:
    assert read(ChatBody, {"messages": [{"role": "user", "content": "hi"}]} | fields).ask().calls == calls


def test_what_a_window_has_decided_ahead_goes_with_a_chunk_or_alone() -> None:
    answer = ChatAnswer("id", "talker", 0, str)
    delta = Delta(Piece("hi", [Token(5)], 0, fills=[(9, Token(6)), (11, Token(7))]), "hi")
    ahead = {"fills": [[9, "6"], [11, "7"]]}
    said = answer.filled(0, delta, answer.chunk(0, delta, 0))
    assert (said["choices"][0]["delta"], said["brigade"]) == ({"content": "hi"}, ahead)
    alone = answer.filled(0, delta, None)
    assert (alone["choices"][0]["delta"], alone["brigade"]) == ({}, ahead)


def test_a_field_that_needs_another_one_is_refused_by_its_name() -> None:
    with pytest.raises(InputError) as refused:
        read(ChatBody, {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2})
    assert refused.value.field == "top_logprobs"


def test_the_bytes_of_a_part_of_a_character_are_its_own_or_not_told() -> None:
    deltas = [Delta(Piece("", (Token(1), Token(2)), 0, "stop", USAGE), finish_reason="stop")]
    answer = ChatAnswer("id", "talker", 0, lambda token: "\ufffd", True, {1: b"\xe2", 2: None}.get)
    [choice] = answer.whole([deltas])["choices"]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[0xE2], None]
