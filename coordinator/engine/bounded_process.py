"""The process that renders chat templates or tries grammars, with bounds: see bounded.py, which starts it and asks.

`python -m coordinator.engine.bounded_process SECONDS BYTES MEMORY JOB ARGUMENTS...` reads requests from standard input
and writes answers to standard output. A template is foreign code, rendered in jinja's sandbox as transformers does it.
"""

import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any

import msgpack
import psutil

from worker.errors import first_line
from worker.platform.installation import skip_init

OUT_OF_MEMORY = 75  # the exit code
_LENGTH = struct.Struct(">Q")
_LONGEST_LINE = 300
Job = Callable[[Any], tuple[str, Any]]  # from a request to how it went, and the answer


@dataclass(frozen=True)
class Bounds:
    """What one request may take."""

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


def main(bounds: Bounds, job: str, *arguments: str) -> None:
    """Answer requests until the coordinator is gone."""
    jobs: dict[str, Callable[..., Job]] = {"templates": _templates, "grammars": _grammars}
    answer_one = jobs[job](*arguments)
    _confine(bounds)
    send(sys.stdout.buffer, b"")  # from here on the time is the request's
    try:
        while True:
            request = receive(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_REAL, bounds.seconds + 1)  # should no one be left to kill us
            outcome, found = answer_one(msgpack.unpackb(request, strict_map_key=False))
            answer = bytes(msgpack.packb((outcome, found), unicode_errors="replace" if outcome == "refused" else None))
            if len(answer) > bounds.text_bytes:
                answer = bytes(msgpack.packb(("too long", "")))
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(sys.stdout.buffer, answer)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # without another attempt to write
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _templates() -> Job:
    """transformers' own function, without what else transformers imports: two thirds of the time it would take."""
    for package in ("transformers", "transformers.utils"):
        skip_init(package)
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    refusals = (
        TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError,
        ValueError,
    )  # fmt: skip

    def render(arguments: Any) -> tuple[str, Any]:
        try:
            rendered = render_jinja_template(**arguments)
            msgpack.packb(rendered)  # what is no text is refused, too
            return "done", rendered
        except refusals as error:
            return "refused", first_line(error)[:_LONGEST_LINE]

    return render


def _grammars(folder: str, vocab_size: str, eos: str) -> Job:
    """Grammars of this vocabulary, which is read before the first one."""
    from protos.brigade_pb2 import Grammar
    from worker.compute.grammar import Grammars
    from worker.errors import SamplingError

    ends = [int(token) for token in eos.split(",") if token]
    with contextlib.suppress(SamplingError):  # each request is told
        Grammars(Path(folder), int(vocab_size)).spelled("", ends)

    def require(text: Any) -> tuple[str, Any]:
        try:
            grammars = Grammars(Path(folder), int(vocab_size))  # what it keeps goes with it
            grammars.guide(Grammar(text=text, eos=ends)).require_beginning()
            return "done", None
        except SamplingError as error:
            return "refused", error.message

    return require


def _confine(bounds: Bounds) -> None:
    """No more memory than that, no picture of it on the disk, and not a word to the user's terminal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = psutil.Process().memory_info().vms + bounds.memory_bytes
    with contextlib.suppress(OSError, ValueError):  # macOS does not have it; there whoever asks looks at our size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


if __name__ == "__main__":
    main(Bounds.of_arguments(*sys.argv[1:4]), *sys.argv[4:])
