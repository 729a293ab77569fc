"""Log lines on standard error: text for people on a terminal, JSON objects for programs.

No line holds a prompt or an answer.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from worker.platform.text import to_json


class _Handler(logging.Handler):
    """Writes each record to the present standard error, which progress bars and tests replace."""

    is_json = False

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)

    def format(self, record: logging.LogRecord) -> str:
        msg = record.getMessage()
        if not self.is_json:
            return msg
        ts = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"ts": ts, "level": record.levelname.lower(), "event": getattr(record, "event", "note"), "msg": msg}
        return to_json(head | getattr(record, "fields", {}))


_HANDLER = _Handler()
_LOGGER = logging.getLogger("brigade")
_LOGGER.addHandler(_HANDLER)
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False


@contextlib.contextmanager
def log_as_json(is_json: bool | None = None) -> Iterator[None]:
    """Write JSON objects inside this context; by default only if standard error is no terminal."""
    before, _HANDLER.is_json = _HANDLER.is_json, not sys.stderr.isatty() if is_json is None else is_json
    try:
        yield
    finally:
        _HANDLER.is_json = before


def log(event: str, msg: str, *, level: str = "info", **fields: Any) -> None:
    """Write one event: `msg` is for people, `fields` are for programs. Fields that are None are left out."""
    known = {name: value for name, value in fields.items() if value is not None}
    _LOGGER.log(logging.getLevelNamesMapping()[level.upper()], msg, extra={"event": event, "fields": known})
