"""Standard error in a file: each line with its time. A terminal, or who reads a pipe, sees when they come."""

import io
import os
import stat
from datetime import UTC, datetime
from typing import TextIO


def dated(out: TextIO) -> TextIO:
    """The same, if it is no file; else what writes to it begins lines with the time in UTC."""
    try:
        is_file = stat.S_ISREG(os.fstat(out.fileno()).st_mode)
    except (OSError, ValueError):  # it has no descriptor, or is closed
        return out
    return _Dated(out) if is_file else out


class _Dated(io.TextIOBase, TextIO):
    """Passes on what is written, a time before each line."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._is_at_start = True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._out.write(f"{_now()} {line}" if self._is_at_start else line)
            self._is_at_start = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
