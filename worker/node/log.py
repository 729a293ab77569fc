"""A worker's log: lines on standard error for people, each beginning with the worker's name."""

import asyncio
import io
import logging
import os
import stat
from datetime import UTC, datetime
from typing import TextIO

from worker.errors import error_text
from worker.platform.text import printable

_MOST_CHARACTERS = 2000  # of a line


def worker_log(name: str, out: TextIO | None) -> logging.Logger:
    """Return the log of the worker `name`, which writes to `out` if given. Levels are not shown."""
    log = logging.Logger(f"worker {name}", logging.INFO)  # outside the hierarchy: a process may have several workers
    handler = logging.NullHandler() if out is None else logging.StreamHandler(out)
    handler.setFormatter(_LineFormatter())
    log.addHandler(handler)
    return log


def log_failure(log: logging.Logger, task: "asyncio.Task[None]") -> None:
    """Log why a background task failed. A callback for the end of a task."""
    if not task.cancelled() and (error := task.exception()):
        log.error("%s", error_text(error))


class _LineFormatter(logging.Formatter):
    """Formats a record as one printable line, whatever text callers use as names."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        subject = record.name if text.startswith("listens on ") else f"{record.name}:"
        return printable(" ".join(f"{subject} {text}".splitlines()), _MOST_CHARACTERS)


def dated(out: TextIO) -> TextIO:
    """Return `out`, or, if it is a file, a stream that begins each line with the time in UTC.

    On a terminal or in a pipe the reader sees when lines arrive.
    """
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
        if not self._out.closed:  # since Python 3.13 an error of the flush at this object's end is reported
            self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()
