"""JSON as UTF-8 text that can always be written: halves of characters, which JSON can name, stay its escapes."""

import json
from typing import Any


def json_bytes(
    value: Any, *, indent: int | None = None, separators: tuple[str, str] | None = None, allow_nan: bool = True
) -> bytes:
    r"""Text as it stands; half of a surrogate pair, which no UTF-8 can hold, as `\ud800`.

    Raises:
        ValueError: a number is no number, and `allow_nan` is False.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, allow_nan=allow_nan)
    return text.encode(errors="backslashreplace")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """`json_bytes` as text."""
    return json_bytes(value, indent=indent).decode()
