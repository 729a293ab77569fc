"""Standard input and output as lines, read and written aside: whoever is slow there must not stop the event loop."""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, BinaryIO, TextIO

from worker.process.call_thread import CallThread
from worker.process.json_text import to_json

MOST_BYTES = 64 << 20  # of a line


async def read_lines(stream: BinaryIO) -> AsyncGenerator[bytes, None]:
    """Every line as it comes, without its end; of one that is too long, its beginning."""
    thread = CallThread("standard input")
    try:
        while line := await thread.run(partial(_read_line, stream)):
            yield line.rstrip(b"\r\n")
    finally:
        thread.close(timeout_s=0)  # it may wait for a line that never comes


class LineWriter:
    """Writes JSON objects, a line each and each at once. Use as a context manager."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = CallThread("standard output")

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.close()

    async def write(self, line: dict[str, Any]) -> None:
        """Return once it is written. Raises BrokenPipeError if nobody reads any more."""
        await self._thread.run(partial(self._write, to_json(line)))

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def _read_line(stream: BinaryIO) -> bytes:
    line = rest = stream.readline(MOST_BYTES + 1)
    while rest and not rest.endswith(b"\n"):
        rest = stream.readline(MOST_BYTES)
    return line
