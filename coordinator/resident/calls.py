"""Calls: the grammar of an answer that must call tools, in the format that the model was taught. Pure."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.resident.ask import Calls
from coordinator.resident.grammars import Spell, composed, json_grammar
from coordinator.sessions.markers import Markers
from worker.errors import InputError

_NAME = re.compile(r"[\w-]+")  # which stands for itself in every format
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class _Format:
    """What stands around the calls of an answer, and around the name and the arguments of each of them."""

    before_name: str
    before_arguments: str
    after_arguments: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    is_numbered: bool = False  # a number comes after the name


_IN_JSON = _Format('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")
_MISTRAL_LIST = _Format('{"name": "', '", "arguments": ', "}", opening="[TOOL_CALLS][", between=", ", closing="]")
_MISTRAL = _Format("", "[ARGS]", "", opening="[TOOL_CALLS]", between="[TOOL_CALLS]")
_KIMI = _Format(
    "<|tool_call_begin|>functions.",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    is_numbered=True,
)


def calls_grammar(calls: Calls, tools: Sequence[Mapping[str, Any]], markers: Markers, spell: Spell) -> str:
    """Nothing but calls of these tools, with arguments by their parameters' schemas.

    Raises:
        InputError: there is no such tool, or the model writes its calls in a format whose arguments are no JSON.
    """
    form = _format(markers, spell)
    functions = [tool["function"] for tool in tools]
    chosen = [function for function in functions if calls.only in (None, function.get("name"))]
    if not chosen:
        found = f"found no tool {calls.only!r}" if calls.only else "found no tools"
        raise InputError("tool_choice", f"expected tools that can be called, {found}")
    lark = "\n".join(_rules(form, [_name(function) for function in chosen], calls, spell))
    return composed(lark, {f"arguments_{n}": _arguments(function) for n, function in enumerate(chosen)})


def _format(markers: Markers, spell: Spell) -> _Format:
    if markers.format == "mistral":  # older ones write a list, newer ones have a token that ends a name
        return _MISTRAL if spell("[ARGS]") != _literal("[ARGS]") else _MISTRAL_LIST
    formats = {"json_tools": _IN_JSON, "kimi_k2": _KIMI}
    if markers.format not in formats:
        why = f"calls in the format {markers.format}, whose arguments are no JSON" if markers.format else "no calls"
        raise InputError("tool_choice", f'expected "auto" or "none": this model writes {why}')
    return formats[markers.format]


def _rules(form: _Format, names: Sequence[str], calls: Calls, spell: Spell) -> Iterable[str]:
    is_one = calls.only is not None or not calls.is_parallel
    more = "" if is_one else f"({spell(form.between)} call)*"
    yield f"start: {spell(form.opening)} call {more} {spell(form.closing)}"
    named = [f"called_{n}" for n, _ in enumerate(names)]
    yield f"call: {spell(form.before_name)} ({' | '.join(named)}) {spell(form.after_arguments)}"
    number = '":" /[0-9]{1,3}/' if form.is_numbered else ""
    for n, name in enumerate(names):
        yield f"called_{n}: {_literal(name)} {number} {spell(form.before_arguments)} @arguments_{n}"


def _name(function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError("tools", f"expected names of letters, digits, _ and - where a call is forced, found {name!r}")
    return name


def _arguments(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or _NO_ARGUMENTS
    if not isinstance(schema, dict):
        raise InputError("tools", f"expected parameters of {function['name']} as a JSON schema, an object")
    return json_grammar({"type": "object"} | schema, field="tools")


def _literal(text: str) -> str:
    return json.dumps(text)
