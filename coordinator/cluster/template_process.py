"""The process that renders chat templates: in jinja's sandbox, as transformers does it, with bounds. Knows no model.

A template is foreign code, out of a model's folder. `python -m coordinator.cluster.template_process SECONDS BYTES
MEMORY` reads requests from standard input and writes answers to standard output; templates.py starts it and asks.
"""

import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import IO, Any

import msgpack
import psutil

from worker.errors import first_line
from worker.process.imports import skip_init

OUT_OF_MEMORY = 75  # the exit code
_LENGTH = struct.Struct(">Q")
_LONGEST_LINE = 300
_Render = Callable[..., Any]


@dataclass(frozen=True)
class Bounds:
    """What one rendering may take."""

    seconds: float = 5.0
    text_bytes: int = 8 << 20
    memory_bytes: int = 512 << 20

    def as_arguments(self) -> list[str]:
        return list(map(str, astuple(self)))

    @classmethod
    def of_arguments(cls, seconds: str, text_bytes: str, memory_bytes: str) -> "Bounds":
        return cls(float(seconds), int(text_bytes), int(memory_bytes))


def send(stream: IO[bytes], message: bytes) -> None:
    stream.write(_LENGTH.pack(len(message)))
    stream.write(message)
    stream.flush()


def receive(stream: IO[bytes], most: int = sys.maxsize) -> bytes:
    """The next message. Raises EOFError if there is none, or it breaks off, or is longer than `most`."""
    prefix = stream.read(_LENGTH.size)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else most + 1
    message = stream.read(length) if length <= most else b""
    if length > most or len(message) < length:
        raise EOFError
    return message


def main(bounds: Bounds) -> None:
    """Answer requests until whoever asks is gone."""
    render = _library()
    _confine(bounds)
    send(sys.stdout.buffer, b"")  # from here on the time is the template's
    try:
        while True:
            request = receive(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_REAL, bounds.seconds + 1)  # the end, should nobody be left to kill us
            answer = _answer(render, request, bounds)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(sys.stdout.buffer, answer)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # without another attempt to write
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _library() -> _Render:
    """transformers' own function, without what else transformers imports: two thirds of the time it would take."""
    for package in ("transformers", "transformers.utils"):
        skip_init(package)
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _confine(bounds: Bounds) -> None:
    """No more memory than that, no picture of it on the disk, and not a word to the user's terminal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = psutil.Process().memory_info().vms + bounds.memory_bytes
    with contextlib.suppress(OSError, ValueError):  # macOS does not have it; there whoever asks looks at our size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _answer(render: _Render, request: bytes, bounds: Bounds) -> bytes:
    """What became of it, and its text or what the template says against it."""
    from jinja2 import TemplateError

    try:
        answer = msgpack.packb(("rendered", render(**msgpack.unpackb(request, strict_map_key=False))))
    except (
        TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        return bytes(msgpack.packb(("refused", first_line(error)[:_LONGEST_LINE]), unicode_errors="replace"))
    return answer if len(answer) <= bounds.text_bytes else bytes(msgpack.packb(("too long", "")))


if __name__ == "__main__":
    main(Bounds.of_arguments(*sys.argv[1:]))
