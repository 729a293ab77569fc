import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from coordinator.api.body import read
from coordinator.api.openai import ChatAnswer, ChatBody
from coordinator.api.sse import DONE, Event, encode
from coordinator.sessions.output import Output, Token, ToolCall, Usage
from coordinator.sessions.request import Calls, Conversation
from tests.unit.api.answers import last
from worker.errors import InputError

USAGE = Usage(3, 0, 2, 4, 4, num_generated=4)
CALL = ToolCall("call_1", "look", '{"a": 1}')


HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def answer_of(**fields: Any) -> ChatAnswer:
    return ChatAnswer(read(ChatBody, HELLO | fields), "talker")


def parsed(events: Iterable[Event]) -> list[dict[str, Any]]:
    """As clients get them, without the end of the stream."""
    return [json.loads(encode(event).removeprefix(b"data: ")) for event in events if event != DONE]


def chunks_of(answer: ChatAnswer, outputs: Sequence[Output], index: int = 0) -> list[dict[str, Any]]:
    """The chunks of a choice, without the first one, which tells the role."""
    first, *chunks = parsed([event for output in outputs for event in answer.events(index, output)])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    return chunks


def messages_of(*messages: dict[str, Any]) -> list[Any]:
    prompt = read(ChatBody, {"messages": list(messages)}).to_spec().prompt
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
        Output("", (Token(1),), 0),
        Output("", (Token(1),), 0, reasoning="hm"),
        Output("", (Token(1),), 0, content="look: "),
        Output("", (Token(1),), 0, "tool_calls", USAGE, tool_calls=(CALL,)),
    ]
    [choice] = answer_of().whole([deltas])["choices"]
    chunks = [chunk["choices"][0] for chunk in chunks_of(answer_of(), deltas)]
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
    assert list(read(ChatBody, body).to_spec().tools) == tools
    assert read(ChatBody, body | {"tool_choice": "none"}).to_spec().tools == ()


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
    assert read(ChatBody, {"messages": [{"role": "user", "content": "hi"}]} | fields).to_spec().calls == calls


@pytest.mark.parametrize("wants", [True, False])
def test_what_is_decided_ahead_comes_with_the_chunk_of_its_step_where_it_is_asked_for(*, wants: bool) -> None:
    """Also with a step whose tokens say nothing yet."""
    steps = [Output(text, [Token(5)], 0, fills=[(9, Token(7)), (11, Token(6))], content=text) for text in ("a", "")]
    chunks = chunks_of(answer_of(brigade={"fills": wants}), [*steps, last(0)])
    ahead = {"fills": [[9, "7"], [11, "6"]]}
    assert [chunk.get("brigade") for chunk in chunks] == ([ahead, ahead, None] if wants else [None, None])
    if wants:
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"content": "a"}, {}, {"content": "a"}]


def test_a_stream_tells_the_figures_of_its_choices_by_number_in_whatever_order_they_end() -> None:
    answer = answer_of(n=3, stream_options={"include_usage": True})
    for index in (2, 0, 1):
        chunks_of(answer, [last(num_reused=index)], index)
    [closing] = parsed(list(answer.end()))
    assert [figures["reused_tokens"] for figures in closing["brigade"]] == [0, 1, 2]
    assert closing["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_calls_of_a_stream_are_numbered_on() -> None:
    outputs = [Output("", (), 0, tool_calls=(CALL,)), Output("", (), 0, "tool_calls", USAGE, tool_calls=(CALL, CALL))]
    calls = [call for chunk in chunks_of(answer_of(), outputs) for call in chunk["choices"][0]["delta"]["tool_calls"]]
    assert [call["index"] for call in calls] == [0, 1, 2]


def test_the_bytes_of_a_part_of_a_character_are_its_own_or_not_told() -> None:
    deltas = [Output("", (Token(1), Token(2)), 0, "stop", USAGE)]
    answer = answer_of(logprobs=True)
    answer.token_text, answer.token_bytes = lambda token: "\ufffd", {1: b"\xe2", 2: None}.get
    logprobs = answer.whole([deltas])["choices"][0]["logprobs"]
    assert logprobs and [entry["bytes"] for entry in logprobs["content"]] == [[0xE2], None]
