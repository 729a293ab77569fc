"""Turns grammars of clients (JSON schemas, regular expressions, Lark) into grammars of llguidance."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llguidance import LLMatcher

from coordinator.sessions.request import Calls
from coordinator.sessions.text import Markers
from worker.compute.header import MOST_GRAMMAR
from worker.errors import InputError, SamplingError

Spell = Callable[[str], str]  # a text with markers in it, as a rule of Lark: see `Grammars.spelled`

_COMPACT: Any = {"whitespace_flexible": False}  # or an answer could be blanks to its end


def json_grammar(
    schema: Mapping[str, Any] | None = None, *, is_strict: bool = True, field: str = "response_format"
) -> str:
    """Return a grammar of this schema; of any object without one.

    Without `is_strict` it leaves out keywords that llguidance does not enforce, such as `uniqueItems`.

    Raises:
        InputError: the schema is unsupported.
    """
    text = json.dumps({"type": "object"} if schema is None else schema)
    _require_small(text, field)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides={**_COMPACT, "lenient": not is_strict})
    except ValueError as error:
        raise InputError(field, f"expected a JSON schema: {error}") from error


def regex_grammar(pattern: str) -> str:
    """Return a grammar of whole matches of a regular expression in Rust's syntax, without look-around."""
    _require_small(pattern)
    return LLMatcher.grammar_from_regex(pattern)


def lark_grammar(text: str) -> str:
    """Return a grammar from Lark in llguidance's dialect."""
    _require_small(text)
    return LLMatcher.grammar_from_lark(text)


def composed(lark: str, parts: Mapping[str, str]) -> str:
    """Return a Lark grammar whose rules refer to other grammars as `@name`."""
    grammars = [{"lark_grammar": lark}, *(each for name, text in parts.items() for each in _listed(name, text))]
    return json.dumps({"grammars": grammars})


def after_thought(grammar: str, markers: Markers, spell: Spell) -> str:
    """Return the grammar with the model's reasoning before it: any text without the markers that end it.

    Reasoning that has not begun is optional.

    Raises:
        SamplingError: the marker that ends this model's reasoning is unknown.
    """
    if markers.begins_in not in ("normal", "reasoning") or not markers.thought_ends:
        raise SamplingError(
            "this model's template lets it think first, and the marker that ends its thoughts is unknown"
        )
    first = "thought" if markers.begins_in == "reasoning" else f"({spell(markers.thought_begins)} thought)?"
    ends = " | ".join(json.dumps(text) for text in (markers.thought_ends, markers.call_begins) if text)
    spelled = spell(markers.thought_ends)
    # A special token ends a text by itself; a text that ends another one does it where it is found first.
    lazy = "" if spelled.startswith("<") else "[lazy]"
    lark = (
        f"start: {first} @answer",
        f"thought{lazy}: THOUGHT {spelled}",
        f"THOUGHT: ANY & ~(ANY ({ends}) ANY)",
        r"ANY: /(.|\n)*/",
    )
    return composed("\n".join(lark), {"answer": grammar})


def _listed(name: str, text: str) -> list[Any]:
    """Return a grammar under this name, and the grammars that it refers to."""
    try:
        first, *others = json.loads(text)["grammars"]
        return [{**first, "name": name}, *others]
    except (ValueError, LookupError, TypeError):  # as it stands, it is Lark
        return [{"name": name, "lark_grammar": text}]


def _require_small(text: str, field: str = "response_format") -> None:
    if len(text) > MOST_GRAMMAR:
        raise InputError(field, f"expected at most {MOST_GRAMMAR} characters, got {len(text)}")


_NAME = re.compile(r"[\w-]+")  # which stands for itself in every format
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class _Format:
    """The text around the calls of an answer, and around the name and the arguments of each call."""

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


JSON_FORMATS = {"json_tools": _IN_JSON, "kimi_k2": _KIMI, "mistral": _MISTRAL_LIST}  # in which calls can be forced


def calls_grammar(calls: Calls, tools: Sequence[Mapping[str, Any]], markers: Markers, spell: Spell) -> str:
    """Return a grammar of calls of these tools, with arguments by their parameters' schemas.

    Raises:
        InputError: there is no such tool, or its name or schema is unsuitable.
    """
    names, arguments = _functions(calls, tools)
    form = _format(markers, spell)
    start = f"start: {spell(form.opening)} call {_more(form, calls, spell)} {spell(form.closing)}"
    return composed("\n".join((start, *_rules(form, names, spell))), arguments)


def text_or_calls_grammar(
    calls: Calls, tools: Sequence[Mapping[str, Any]], markers: Markers, spell: Spell, others: Sequence[int]
) -> str:
    """Return a grammar of any text, in which calls as `calls_grammar` has them may follow the first marker of calls.

    Args:
        others: the special tokens that may be in the text.
    """
    names, arguments = _functions(calls, tools)
    marker = spell(markers.call_begins)
    is_token = marker.startswith("<")
    listed = ",".join(str(token) for token in others if f"<[{token}]>" != marker)
    form = _format(markers, spell)
    first = replace(form, before_name=form.before_name.removeprefix(markers.call_begins))
    lark = (
        f"start: {'special*' if listed else ''} (ANY | marked first {_more(form, calls, spell)})",
        f"special: ANY <[{listed}]>" if listed else "",
        f"marked{'' if is_token else '[lazy]'}: ANY {marker}",
        *_rules(form, names, spell),
        _call("first", first, names, spell),
        r"ANY: /(.|\n)*/",
    )
    return composed("\n".join(lark), arguments)


def _functions(calls: Calls, tools: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """Return the names of the functions that may be called, and the grammars of their arguments."""
    found = list(arguments_grammars(calls, tools))
    if not found:
        what = f"found no tool {calls.only!r}" if calls.only else "found no tools"
        raise InputError("tool_choice", f"expected tools that can be called, {what}")
    return [name for _, name, _ in found], {f"arguments_{n}": grammar for n, (_, _, grammar) in enumerate(found)}


def arguments_grammars(calls: Calls, tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield the field, the name and the grammar of the parameters of each tool that may be called.

    Raises:
        InputError: its name or schema is unsuitable.
    """
    for number, tool in enumerate(tools):
        function = tool["function"]
        if calls.only in (None, name := function.get("name")):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                reason = f"expected letters, digits, _ and - where a call is forced, found {name!r}"
                raise InputError(f"tools.{number}.function.name", reason)
            field = f"tools.{number}.function.parameters"
            yield field, name, _arguments(function, field)


def _format(markers: Markers, spell: Spell) -> _Format:
    if markers.format == "mistral" and spell("[ARGS]") != json.dumps("[ARGS]"):
        return _MISTRAL  # older ones write a list, newer ones have a token that ends a name
    return JSON_FORMATS[markers.format]


def _more(form: _Format, calls: Calls, spell: Spell) -> str:
    """Return the rule of calls after the first one."""
    is_one = calls.only is not None or not calls.is_parallel
    return "" if is_one else f"({spell(form.between)} call)*"


def _rules(form: _Format, names: Sequence[str], spell: Spell) -> Iterable[str]:
    yield _call("call", form, names, spell)
    number = '":" /[0-9]{1,3}/' if form.is_numbered else ""
    for n, name in enumerate(names):
        yield f"called_{n}: {json.dumps(name)} {number} {spell(form.before_arguments)} @arguments_{n}"


def _call(rule: str, form: _Format, names: Sequence[str], spell: Spell) -> str:
    named = " | ".join(f"called_{n}" for n, _ in enumerate(names))
    return f"{rule}: {spell(form.before_name)} ({named}) {spell(form.after_arguments)}"


def _arguments(function: Mapping[str, Any], field: str) -> str:
    schema = function.get("parameters") or _NO_ARGUMENTS
    kind = schema.get("type", "object") if isinstance(schema, dict) else None
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InputError(field, f"tool {function['name']}: expected a JSON schema of an object")
    try:
        return json_grammar(schema | {"type": "object"}, is_strict=function.get("strict") is True)
    except InputError as error:
        raise InputError(field, f"tool {function['name']}: {error.message}") from error
