"""Grammars as clients write them (JSON schemas, regular expressions, Lark), as llguidance reads them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import LLMatcher

from coordinator.sessions.markers import Markers
from worker.errors import InputError, SamplingError

Spell = Callable[[str], str]  # a text with markers in it, as a rule of Lark: see `Grammars.spelled`

_COMPACT: Any = {"whitespace_flexible": False}  # or an answer could be blanks to its end
_MOST_BYTES = 1 << 20


def json_grammar(schema: Mapping[str, Any] | None = None, *, field: str = "response_format") -> str:
    """Values of this schema; any object without one. Raises InputError for a schema that cannot be enforced."""
    text = json.dumps({"type": "object"} if schema is None else schema)
    _require_small(text, field)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT)
    except ValueError as error:
        raise InputError(field, f"expected a JSON schema: {error}") from error


def regex_grammar(pattern: str) -> str:
    """Whole matches of a regular expression, in the syntax of Rust's regex without look-around."""
    _require_small(pattern)
    return LLMatcher.grammar_from_regex(pattern)


def lark_grammar(text: str) -> str:
    """Texts of a Lark grammar, in llguidance's dialect."""
    _require_small(text)
    return LLMatcher.grammar_from_lark(text)


def composed(lark: str, parts: Mapping[str, str]) -> str:
    """A Lark grammar whose rules name other grammars: `@name`."""
    grammars = [{"lark_grammar": lark}, *(each for name, text in parts.items() for each in _listed(name, text))]
    return json.dumps({"grammars": grammars})


def after_thought(grammar: str, markers: Markers, spell: Spell) -> str:
    """The same once a thought has ended, which may be any text without the markers that end it.

    Where none has begun, there may be one or not.

    Raises:
        SamplingError: nobody knows how this model ends its thoughts.
    """
    if markers.begins_in not in ("normal", "reasoning") or not markers.thought_ends:
        raise SamplingError("this model's template lets it think first, and nobody knows how its thoughts end")
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
    """A grammar under this name, and those that it names in turn."""
    try:
        first, *others = json.loads(text)["grammars"]
        return [{**first, "name": name}, *others]
    except (ValueError, LookupError, TypeError):  # as it stands, it is Lark
        return [{"name": name, "lark_grammar": text}]


def _require_small(text: str, field: str = "response_format") -> None:
    if len(text) > _MOST_BYTES:
        raise InputError(field, f"expected at most {_MOST_BYTES} characters, got {len(text)}")
