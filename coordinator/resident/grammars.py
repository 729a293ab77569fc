"""Grammars as clients write them (JSON schemas, regular expressions, Lark), as llguidance reads them."""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from worker.errors import InputError

_COMPACT: Any = {"whitespace_flexible": False}  # or an answer could be blanks to its end
_MOST_BYTES = 1 << 20


def json_grammar(schema: Mapping[str, Any] | None = None) -> str:
    """Values of this schema; any object without one. Raises InputError for a schema that cannot be enforced."""
    text = json.dumps({"type": "object"} if schema is None else schema)
    _require_small(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_COMPACT)
    except ValueError as error:
        raise InputError("response_format", f"expected a JSON schema: {error}") from error


def regex_grammar(pattern: str) -> str:
    """Whole matches of a regular expression, in the syntax of Rust's regex without look-around."""
    _require_small(pattern)
    return LLMatcher.grammar_from_regex(pattern)


def lark_grammar(text: str) -> str:
    """Texts of a Lark grammar, in llguidance's dialect."""
    _require_small(text)
    return LLMatcher.grammar_from_lark(text)


def _require_small(text: str) -> None:
    if len(text) > _MOST_BYTES:
        raise InputError("response_format", f"expected at most {_MOST_BYTES} characters, got {len(text)}")
