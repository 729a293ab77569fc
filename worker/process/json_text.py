"""JSON as UTF-8 text that can always be written: halves of characters, which JSON can name, stay its escapes."""

import json
from typing import Any


def to_json(value: Any, *, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    r"""Text as it stands; half of a surrogate pair, which no UTF-8 can hold, as `\ud800`."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
    return text.encode(errors="backslashreplace").decode()
