"""Text for terminals and JSON: bytes with units, sanitised text of other machines, JSON that is valid UTF-8."""

import json
from typing import Any

_MAX_CHARACTERS = 400
_LINE_ENDS = ("\x85", "\u2028", "\u2029")  # at which `str.splitlines` splits, too

Json = dict[str, Any]  # a JSON object


def format_bytes(num_bytes: int) -> str:
    """Format bytes in binary units: '512 B', '1.2 GiB'."""
    size, power = float(num_bytes), 0
    while round(size, 1) >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.1f} {'KMGT'[power - 1]}iB" if power else f"{num_bytes} B"


def counted(count: int, one: str, several: str = "") -> str:
    """Format a count with its noun: '1 token', '2 tokens'; `several` if that is not `one` with an s."""
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def ago(passed_s: float) -> str:
    """Format how long ago something was: 'just now', '5 min ago', '2 d ago'."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed_s >= length_s:
            return f"{passed_s / length_s:.0f} {unit} ago"
    return "just now"


def printable(text: str, most: int = _MAX_CHARACTERS) -> str:
    """Return another machine's text made safe for a terminal: at most `most` characters, no control or bidi ones."""
    shown = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return shown if len(shown) <= most else f"{shown[:most]}..."


def printable_lines(text: str) -> str:
    """Return the text without control characters other than newlines and tabs."""
    return "".join(each for each in text if each.isprintable() or each in "\n\t")


def json_bytes(
    value: Any, *, indent: int | None = None, separators: tuple[str, str] | None = None, allow_nan: bool = True
) -> bytes:
    r"""Encode as JSON in UTF-8. A lone surrogate, which UTF-8 cannot hold, becomes an escape (`\ud800`).

    So do characters at which some clients end a line of a stream, though JSON and server-sent events do not.

    Raises:
        ValueError: a number is NaN or infinite, and `allow_nan` is False.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, allow_nan=allow_nan)
    for end in _LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode(errors="backslashreplace")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return `json_bytes` as text."""
    return json_bytes(value, indent=indent).decode()


def json_problem(error: ValueError | RecursionError) -> str:
    """Return why `json.loads` refused a text, without the words that are about Python."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
