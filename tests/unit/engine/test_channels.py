"""An answer's text taken apart, however its pieces were cut."""

import json
from typing import Any

import pytest
from mlx_lm.generate import TextStateMachine
from mlx_lm.tool_parsers import json_tools

from coordinator.sessions.calls import joined_calls
from coordinator.sessions.output import Output, Token
from coordinator.sessions.request import Calls
from coordinator.sessions.text import Markers, TextParser

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "zwei"}}</tool_call>'
TEXT = f"<think>Hm, {{1}} < 2.</think>Let me see.{CALL}{CALL} Done"


def markers(begins_in: str = "normal", form: str = "") -> Markers:
    edges = {
        "normal": [("<think>", "reasoning"), ("<tool_call>", "tool")],
        "reasoning": [("</think>", "normal"), ("<tool_call>", "tool")],
        "tool": [("</tool_call>", "normal")],
    }
    parse = json_tools.parse_tool_call
    return Markers(TextStateMachine(edges), begins_in, "<tool_call>", "</tool_call>", parse, form)


def divided(parser: TextParser, text: str, reason: str | None = None) -> Output:
    output = Output(text, [], 0, reason)
    parser.split(output)
    return output


def apart(
    text: str, size: int, *, tools: Any = TOOLS, begins_in: str = "normal", reason: str = "stop", form: str = ""
) -> list[Output]:
    parser = TextParser(None, (), markers(begins_in, form), tools)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [divided(parser, piece) for piece in pieces]
    return [*deltas, divided(parser, "", reason)]


def content(deltas: list[Output]) -> str:
    return "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("size", [1, 2, 7, len(TEXT)])
def test_what_is_said_thought_and_called_is_told_apart_wherever_the_text_is_cut(size: int) -> None:
    deltas = apart(TEXT, size)
    assert "".join(delta.reasoning for delta in deltas) == "Hm, {1} < 2."
    assert content(deltas) == "Let me see. Done"
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == 2 * [("add", {"a": 1, "b": "zwei"})]
    assert len({call.id for call in calls}) == 2
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "tools", "reason"),
    [
        *(
            (f"<tool_call>{body}</tool_call>", TOOLS, "stop")
            for body in ("no JSON", "[]", "[1]", '{"name": "add"}', '"add"')
        ),
        (f"Look: {CALL}", [], "stop"),  # nobody has given tools
        (CALL.removesuffix("</tool_call>")[:-4], TOOLS, "length"),  # it breaks off
        ("1 <thin", TOOLS, "stop"),
    ],
)
def test_what_is_no_call_is_text(text: str, tools: Any, reason: str) -> None:
    for size in (1, 3):
        deltas = apart(text, size, tools=tools, reason=reason)
        assert content(deltas) == text and deltas[-1].finish_reason == reason
    assert content(apart("1 <thin", 3, form="json_tools")) == "1 <thin"


def test_a_template_may_end_where_thinking_has_begun_and_without_markers_all_is_content() -> None:
    deltas = apart("so be it</think>Yes", 4, begins_in="reasoning")
    assert "".join(delta.reasoning for delta in deltas) == "so be it" and content(deltas) == "Yes"
    assert divided(TextParser(), TEXT, "stop") == Output(TEXT, [], 0, "stop", content=TEXT)


@pytest.mark.parametrize("size", [1, len(TEXT)])
def test_only_the_first_call_is_told_where_there_is_to_be_one(size: int) -> None:
    parser = TextParser(None, (), markers(), TOOLS, Calls(is_parallel=False))
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    deltas = [*(divided(parser, piece) for piece in pieces), divided(parser, "", "stop")]
    assert [call.name for delta in deltas for call in delta.tool_calls] == ["add"]
    assert content(deltas) == "Let me see. Done" and deltas[-1].finish_reason == "tool_calls"


def test_a_forced_call_is_no_content_wherever_it_breaks_off() -> None:
    for size in (1, 7, len(CALL)):
        for length in range(len(CALL) + 1):
            parser = TextParser(None, (), markers(), TOOLS, Calls(are_forced=True))
            pieces = [CALL[:length][at : at + size] for at in range(0, length, size)]
            assert content([*(divided(parser, piece) for piece in pieces), divided(parser, "", "length")]) == ""


class Pieces:
    """A detokenizer whose tokens are places in a text that is cut into pieces."""

    last_segment = ""

    def __init__(self, text: str, size: int) -> None:
        self._pieces = [text[at : at + size] for at in range(0, len(text), size)]
        self.tokens = [Token(n) for n in range(len(self._pieces))]

    def add_token(self, token: int) -> None:
        self.last_segment = self._pieces[token]

    def finalize(self) -> None:
        self.last_segment = ""


@pytest.mark.parametrize("size", [1, 2, 7, len(TEXT)])
@pytest.mark.parametrize(
    ("stops", "said", "num_calls"),
    [
        (("add", "zwei", "}}", "tool"), "Let me see. Done", 2),  # only the calls have them
        (("l><", "<to", "</tool_call>"), "Let me see. Done", 2),  # or their markers
        (("Do", "add"), "Let me see. ", 2),
        (("see.",), "Let me ", 0),
        (("think>L",), "", 0),
    ],
)
def test_stop_strings_end_what_is_said_and_no_call(size: int, stops: Any, said: str, num_calls: int) -> None:
    pieces = Pieces(TEXT, size)
    parser = TextParser(pieces, stops, markers(), TOOLS)
    output = Output("", pieces.tokens, 0, "stop")
    parser.read(output)
    assert (output.content, parser.stopped_by is None) == (said, said.endswith("Done"))
    assert [json.loads(call.arguments) for call in joined_calls(output.tool_calls)] == num_calls * [
        {"a": 1, "b": "zwei"}
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_nothing_behind_a_stop_string_is_told_if_it_ends_as_a_marker_begins(size: int) -> None:
    pieces = Pieces(f"a << b <{CALL}", size)
    parser = TextParser(pieces, ("b <",), markers(), TOOLS)
    output = Output("", pieces.tokens, 0, "stop")
    parser.read(output)
    assert (output.text, output.content, output.tool_calls, output.stop) == ("a << ", "a << ", (), "b <")


def test_no_stop_string_ends_an_answer_whose_call_is_forced() -> None:
    pieces = Pieces(f"<think>Hm.</think>{CALL}", 3)
    parser = TextParser(pieces, ("add", "Hm", "<"), markers(), TOOLS, Calls(are_forced=True))
    output = Output("", pieces.tokens, 0, "stop")
    parser.read(output)
    assert output.finish_reason == "tool_calls" and parser.stopped_by is None


@pytest.mark.parametrize(("size", "num_reasoning"), [(1, 20), (4, 5)])
@pytest.mark.parametrize("at_once", [1, 2, 1000])
def test_tokens_of_thoughts_count_however_many_come_at_once_and_whether_or_not_they_have_text(
    size: int, num_reasoning: int, at_once: int
) -> None:
    """The thought's 12 letters and the marker's 8, in tokens of so many; some text waits for what follows."""
    pieces = Pieces("Hm, {1} < 2.</think>Yes", size)
    parser = TextParser(pieces, (), markers("reasoning"), TOOLS)
    outputs = [Output("", pieces.tokens[at : at + at_once], 0) for at in range(0, len(pieces.tokens), at_once)]
    for output in outputs:
        parser.read(output)
    assert sum(output.num_reasoning for output in outputs) == num_reasoning


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_marker_in_a_string_of_a_call_ends_no_call(size: int) -> None:
    """An agent writes a file about calls, in which nothing is a stop string either."""
    given = [{"text": r'a "\ </tool_call><tool_call>'}, {"<think>": "</tool_c", "</tool_call>": ["]</tool_call>"]}]
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(each)}}}\n</tool_call>' for each in given]
    pieces = Pieces("Look: " + "\n".join(calls) + " Done", size)
    parser = TextParser(pieces, ("a ", "]<"), markers(form="json_tools"), TOOLS)
    output = Output("", pieces.tokens, 0, "stop")
    parser.read(output)
    assert [json.loads(call.arguments) for call in joined_calls(output.tool_calls)] == given
    assert (output.content, output.finish_reason) == ("Look: \n Done", "tool_calls")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "arguments", ['{"a": 1', '{"a": "1}}\n', '{"a": "it is 5" tall"}}', '{"a": "so "</b> it"', '{"a": "\\" "b" c"}']
)
def test_a_call_whose_json_is_broken_ends_at_its_marker(arguments: str, size: int) -> None:
    """Unless a string never ends on its line; what looks like strings behind the mistake tells nothing."""
    pieces = Pieces(f'<tool_call>{{"name": "add", "arguments": {arguments}</tool_call> Done', size)
    output = Output("", pieces.tokens, 0, "stop")
    TextParser(pieces, (), markers(form="json_tools"), TOOLS).read(output)
    assert (output.content, output.finish_reason) == (" Done", "tool_calls")
