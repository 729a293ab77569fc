"""Times before the lines of a log file: on a terminal or in a pipe, the reader sees when lines come."""

import io
import os
import stat
from datetime import UTC, datetime
from typing import TextIO


def dated(out: TextIO) -> TextIO:
    """Return `out`, or if it is a file a stream that begins each of its lines with the time in UTC."""
    try:
        is_file = stat.S_ISREG(os.fstat(out.fileno()).st_mode)
    except (OSError, ValueError):  # it has no descriptor, or is closed
        return out
    return _Dated(out) if is_file else out


class _Dated(io.TextIOBase, TextIO):
    """Writes to another stream, with a time before each line."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._is_at_start = True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} " if self._is_at_start else ""
            self._out.write(now + line)
            self._is_at_start = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()
