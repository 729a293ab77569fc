"""Log: what a long-lived process says on standard error: lines for people on a terminal, JSON objects for programs.

No line holds what anybody asked or was answered.
"""

import contextlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from worker.process.json_text import to_json

_is_json = False


@contextlib.contextmanager
def log_as_json(is_json: bool | None = None) -> Iterator[None]:
    """Write JSON lines meanwhile; by itself where standard error is no terminal."""
    global _is_json
    before, _is_json = _is_json, not sys.stderr.isatty() if is_json is None else is_json
    try:
        yield
    finally:
        _is_json = before


def log(event: str, msg: str, *, level: str = "info", **fields: Any) -> None:
    """One event: `msg` is for people, `fields` are for programs; those that are None are left out."""
    line = _as_json(level, event, msg, fields) if _is_json else msg
    print(line, file=sys.stderr, flush=True)


def _as_json(level: str, event: str, msg: str, fields: dict[str, Any]) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    known = {name: value for name, value in fields.items() if value is not None}
    return to_json({"ts": now, "level": level, "event": event, "msg": msg, **known})
