"""Grammars that force calls: what they let pass is what mlx-lm's parser of that format reads."""

import json
import re
from importlib import import_module
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from coordinator.engine.grammars import after_thought, calls_grammar, json_grammar, regex_grammar, text_or_calls_grammar
from coordinator.sessions.request import Calls
from coordinator.sessions.text import Markers
from worker.errors import InputError, SamplingError
from worker.model.checkpoint import DEMO

WHERE = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": WHERE}},
    {"type": "function", "function": {"name": "wait"}},
]
LOOK, WAIT = {"name": "look", "arguments": {"town": "Ulm"}}, {"name": "wait", "arguments": {}}
IN_JSON = (
    '<tool_call>\n{"name": "look", "arguments": {"town":"Ulm"}}\n</tool_call>',
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>',
)
START, END = 1, 2
TOKENIZER = LLTokenizer((DEMO / "tokenizer.json").read_text(), eos_token=[END])


def holds(grammar: str, text: str) -> bool:
    """Whether it is the whole of an answer."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(form: str, calls: Calls | None = None) -> str:
    return calls_grammar(calls or Calls(are_forced=True), TOOLS, Markers(None, "normal", format=form), json.dumps)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json_tools", "\n".join(IN_JSON)),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {"town":"Ulm"}}, {"name": "wait", "arguments": {}}]'),
        (
            "kimi_k2",
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"town":"Ulm"}'
            "<|tool_call_end|><|tool_call_begin|>functions.wait:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
        ),
    ],
)
def test_what_a_grammar_lets_pass_is_what_the_models_parser_reads(form: str, text: str) -> None:
    assert holds(grammar_of(form), text)
    assert not holds(grammar_of(form), text.replace("Ulm", 'Ulm","x":"')[:-1])
    assert not holds(grammar_of(form), text.replace('"Ulm"', "5"))
    assert not holds(grammar_of(form), text.replace("wait", "walk"))
    parser: Any = import_module(f"mlx_lm.tool_parsers.{form}")
    parts = text.split(parser.tool_call_start)[1:]
    inner = [part.partition(parser.tool_call_end)[0] if parser.tool_call_end else part for part in parts]
    read = [parser.parse_tool_call(part, TOOLS) for part in inner]
    found = [call for each in read for call in (each if isinstance(each, list) else [each])]
    assert [{"name": call["name"], "arguments": call["arguments"]} for call in found] == [LOOK, WAIT]


def test_a_model_with_a_token_that_ends_names_writes_no_list() -> None:
    def spell(text: str) -> str:
        return "".join(json.dumps(text.replace("[ARGS]", "<ARGS>")))

    markers = Markers(None, "normal", format="mistral")
    grammar = calls_grammar(Calls(are_forced=True), TOOLS, markers, spell)
    assert holds(grammar, '[TOOL_CALLS]look<ARGS>{"town":"Ulm"}[TOOL_CALLS]wait<ARGS>{}')


@pytest.mark.parametrize("is_token", [False, True])
def test_any_text_may_stand_before_calls_and_from_their_marker_on_the_grammar_holds(is_token: bool) -> None:
    marker = "<|im_start|>" if is_token else "<tool_call>"  # a special token of this tokenizer, or none

    def spell(text: str) -> str:
        parts = [part for part in re.split("(<tool_call>)", text) if part]
        return " ".join(f"<[{START}]>" if is_token and part == "<tool_call>" else json.dumps(part) for part in parts)

    def is_held(text: str, calls: Calls = Calls()) -> bool:  # noqa: B008 - immutable
        markers = Markers(None, "normal", "<tool_call>", format="json_tools")
        grammar = text_or_calls_grammar(calls, TOOLS, markers, spell, [0, START, 3])
        return holds(grammar, text.replace("<tool_call>", marker))

    for text in ("", "Ulm, 5 < 6.", "a<|endoftext|>b", "a <tool"):
        assert is_held(text) and all(is_held(text + call) for call in IN_JSON)
        assert not is_held(f"{text}<tool_call>{text}") and not is_held(f"{text}{IN_JSON[0][:-20]}")
    assert is_held("Both." + "\n".join(IN_JSON)) and not is_held(f"{IN_JSON[0]} Done.")
    assert not is_held("\n".join(IN_JSON), Calls(is_parallel=False))


@pytest.mark.parametrize("calls", [Calls(are_forced=True, is_parallel=False), Calls(are_forced=True, only="wait")])
def test_one_call_is_one_call(calls: Calls) -> None:
    grammar = grammar_of("json_tools", calls)
    assert holds(grammar, IN_JSON[1]) and not holds(grammar, "\n".join(IN_JSON[1:] * 2))
    assert holds(grammar, IN_JSON[0]) == (calls.only is None)
    assert not holds(grammar, "")


@pytest.mark.parametrize(
    ("form", "tools", "only", "said"),
    [
        ("json_tools", [], None, "^tool_choice: .*found no tools"),
        ("json_tools", TOOLS, "walk", "^tool_choice: .*found no tool 'walk'"),
        ("json_tools", [{"function": {"name": "a b"}}], None, r"^tools\.0\.function\.name: .*'a b'"),
        ("json_tools", [{"function": {}}], None, r"^tools\.0\.function\.name: "),
        *(
            (
                "json_tools",
                [{"function": {"name": "a", "parameters": parameters}}],
                None,
                r"^tools\.0\.function\.parameters: tool a: ",
            )
            for parameters in ([1], {"type": "string"}, {"type": ["array", "null"]})
        ),
    ],
)
def test_calls_that_cannot_be_forced_are_refused(form: str, tools: list[Any], only: str | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        calls_grammar(Calls(are_forced=True, only=only), tools, Markers(None, "normal", format=form), json.dumps)


def test_a_grammar_may_hold_once_a_thought_has_ended_whether_or_not_one_has_begun() -> None:
    markers = Markers(None, "reasoning", "<tool_call>", "</tool_call>", format="json_tools", thought_ends="</think>")
    grammar = after_thought(regex_grammar("[0-9]+"), markers, json.dumps)
    assert holds(grammar, "Hm, 5 < 6.\nSo </thin.</think>12") and holds(grammar, "</think>12")
    assert not holds(grammar, "12") and not holds(grammar, "a</think>b</think>12")
    assert not holds(grammar, "I <tool_call> it</think>12")
    forced = after_thought(grammar_of("json_tools"), markers, json.dumps)
    assert holds(forced, f"Hm.</think>{IN_JSON[0]}") and not holds(forced, "Hm.</think>12")
    assert holds(after_thought('start: "a" | b\nb: "c"', markers, json.dumps), "Hm.</think>c")
    assert holds(after_thought(json_grammar(WHERE), markers, json.dumps), 'Hm.</think>{"town":"Ulm"}')
    begins = Markers(None, "normal", thought_begins="<think>", thought_ends="</think>")
    grammar = after_thought(regex_grammar("[0-9]+"), begins, json.dumps)
    assert holds(grammar, "12") and holds(grammar, "<think>Hm.</think>12")
    assert not holds(grammar, "Hm.</think>12") and not holds(grammar, "<think>12")
    with pytest.raises(SamplingError, match="think first"):
        after_thought(json_grammar(), Markers(None, "reasoning"), json.dumps)
