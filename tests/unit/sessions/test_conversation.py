"""Conversations as they are given to chat templates that lack something."""

import json
from typing import Any

from mlx_lm.tool_parsers import json_tools

from coordinator.sessions.conversation import CALL_BEGINS, CALL_ENDS, plainer, with_calls_as_text

LOOK = {"type": "function", "function": {"name": "look", "arguments": {"town": "Ulm"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def turns(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in said]


def test_calls_and_their_results_become_text_that_the_parser_of_the_format_reads() -> None:
    assert (json_tools.tool_call_start, json_tools.tool_call_end) == (CALL_BEGINS, CALL_ENDS)
    calling = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [LOOK, LOOK]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "snow"}
    user, called, *results = with_calls_as_text([*turns(("user", "Snow?")), calling, result, result], ())
    assert user == turns(("user", "Snow?"))[0] and results == 2 * turns(
        ("user", "<tool_response>\nsnow\n</tool_response>")
    )
    text, *written = called["content"].split(CALL_BEGINS)
    assert text == "I look.\n" and called.keys() == {"role", "content", "reasoning_content"}
    assert [json_tools.parse_tool_call(each.partition(CALL_ENDS)[0]) for each in written] == 2 * [LOOK["function"]]


def test_tools_are_described_once_in_the_system_prompt() -> None:
    for system in (turns(("system", "Be brief."), ("system", "Be kind.")), []):
        first, *rest = with_calls_as_text([*system, *turns(("user", "Hi"), ("system", "Now."))], [TOOL, TOOL])
        assert rest == turns(("user", "Hi"), ("system", "Now."))
        described = [json.loads(line) for line in first["content"].split("\n") if line.startswith('{"name": "')]
        assert first["role"] == "system" and described == 2 * [TOOL["function"]]
        assert first["content"].startswith("Be brief.\n\nBe kind.\n\n" if system else "You can call")


def test_a_template_that_refuses_is_asked_for_less() -> None:
    said = turns(("system", "a"), ("system", "b"), ("user", "c"), ("system", "d"), ("assistant", "e"), ("user", "f"))
    end = turns(("assistant", "e"), ("user", "f"))
    assert list(plainer(said)) == [
        turns(("system", "a\nb"), ("user", "c\nd")) + end,
        turns(("user", "a\nb\nc\nd")) + end,
    ]
    assert list(plainer(end)) == [] and list(plainer([])) == []
