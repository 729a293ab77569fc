"""Places, keys and values of a YAML file in messages to whoever wrote it."""

import difflib
from typing import Any

from pydantic import BaseModel


def yaml_path(*loc: int | str) -> str:
    """Where a value stands, as `workers[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def unknown_key(key: str, section: type[BaseModel]) -> str:
    """What to say of a key that no field of the section has."""
    known = [field.alias or name for name, field in section.model_fields.items()]
    near = difflib.get_close_matches(key.lower(), known, n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else f"unknown key; expected one of {', '.join(known)}"


def shown(value: Any) -> str:
    """A value of YAML, for a message."""
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    if isinstance(value, dict | list | tuple):
        return "keys and values" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
