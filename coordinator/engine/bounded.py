"""Processes for work whose cost a client or a model's folder decides: they are killed when a request takes too much.

Chat templates are untrusted code, a grammar of two kilobytes can take any time and memory to compile, and a text of
megabytes keeps a tokenizer busy for seconds. `Bounded` starts and asks such a process, which is this module run as
`python -m coordinator.engine.bounded SECONDS BYTES MEMORY JOB ARGUMENTS...` with requests on standard input.
"""

import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import msgpack
import psutil

from worker.errors import BrigadeError, ContextExceeded, InputError, SamplingError, first_line
from worker.platform.installation import search_path, skip_init

_TRIES = 2  # another program may have ended the process, for which the request is not to blame
_START_S = 60.0
_LOOK_S = 0.05  # between two looks at the process's memory
_OUT_OF_MEMORY = 75  # exit code
_RENDER_S = 0.5  # of the processor, for a chat template: others wait meanwhile, and would for a new process, too
_LENGTH = struct.Struct(">Q")
_MAX_LINE = 300
GIVE_RAW = "give it raw (over HTTP: /v1/completions)"  # advice where a chat template fails
_PATTERN = "the regular expression"
_ENVIRONMENT = ("TZ", "PYTHONHOME", "LD_LIBRARY_PATH")  # for local time, and for a Python that needs them to start

JobResult = tuple[str, Any]  # the outcome ("done", "refused", "too long" or "too slow") and the result
Job = Callable[[Any], JobResult]


@dataclass(frozen=True)
class Bounds:
    """The cost limits of one request."""

    seconds: float = 5.0
    text_bytes: int = 8 << 20  # of the answer
    memory_bytes: int = 512 << 20  # beside what the process takes when it is idle

    def as_arguments(self) -> list[str]:
        return list(map(str, astuple(self)))


class TemplateRefusal(InputError):
    """A chat template does not take a conversation."""

    def __init__(self, why: str) -> None:
        super().__init__("prompt", f"the chat template refuses this conversation ({why}); {GIVE_RAW}")


class Excess(Exception):
    """A request took more than it may; the message says what, such as `took longer than 5 s`."""


# --- in the coordinator -----------------------------------------------------------------------------------------------


class Bounded:
    """A process for one job, which answers one request after another. It is started again after it was killed.

    Any thread may ask.
    """

    def __init__(self, job: Sequence[str], bounds: Bounds) -> None:
        """`job` is a name in `_JOBS`, followed by its arguments."""
        self.bounds = bounds
        self._job = job
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # kills the process
        self._is_ready = False

    def start(self) -> None:
        """Start the process in the background. Otherwise the first request starts it and waits for it."""
        with self._lock:
            self._started()

    def ask(self, request: bytes) -> JobResult:
        """Return the answer to a packed request.

        Raises:
            Excess: the request took too much. BrigadeError: the process does not start.
        """
        with self._lock:
            for _ in range(_TRIES):
                with suppress(EOFError):
                    outcome, found = msgpack.unpackb(self._exchange(request))
                    return outcome, found
        raise Excess(f"ended its process {_TRIES} times")

    def _started(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            one_thread = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                # -P: do not import from the working directory.
                [sys.executable, "-P", "-m", "coordinator.engine.bounded", *self.bounds.as_arguments(), *self._job],
                env=kept | one_thread | {"PYTHONPATH": search_path()},
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the coordinator
            )
            self._end = weakref.finalize(self, _end, self.process)  # at the latest when the coordinator ends
            self._is_ready = False
        return self.process

    def _exchange(self, request: bytes) -> bytes:
        """Send a request and return the answer. Raises EOFError if the process ended by itself."""
        # Forget the process until the answer is complete: a failure must not leave the rest of it to the next request.
        process, self.process = self._started(), None
        assert process.stdin is not None and process.stdout is not None
        try:
            if not self._is_ready:
                with self._watched(process, _START_S):
                    receive(process.stdout)
                self._is_ready = True
            with self._watched(process, self.bounds.seconds):
                send(process.stdin, request)
                answer = receive(process.stdout, self.bounds.text_bytes)
            self.process = process
            return answer
        finally:
            if self.process is None:
                self._end()

    @contextmanager
    def _watched(self, process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
        """Kill the process if this block takes longer, or the process takes too much memory."""
        done, excesses = threading.Event(), list[str]()
        watch = threading.Thread(target=self._watch, args=(process, seconds, done, excesses), daemon=True)
        watch.start()
        try:
            yield
        except (EOFError, BrokenPipeError) as error:
            # native code aborts when it gets no memory
            if process.wait() in (_OUT_OF_MEMORY, -signal.SIGABRT) and not excesses:
                excesses.append(self._too_large())
            if not excesses:
                raise EOFError from error
            if not self._is_ready:
                raise BrigadeError(f"the process for {self._job[0]} {excesses[0]} to start") from None
            raise Excess(excesses[0]) from None
        finally:
            done.set()
            watch.join()

    def _watch(
        self, process: subprocess.Popen[bytes], seconds: float, done: threading.Event, excesses: list[str]
    ) -> None:
        until = time.monotonic() + seconds
        while not done.wait(min(_LOOK_S, max(0.0, until - time.monotonic()))) and not excesses:
            with suppress(psutil.Error):  # it has just ended
                if psutil.Process(process.pid).memory_info().rss > self.bounds.memory_bytes:
                    excesses.append(self._too_large())
            if time.monotonic() >= until:
                excesses.append(f"took longer than {seconds:g} s")
            if excesses:
                process.kill()

    def _too_large(self) -> str:
        return f"took more than {self.bounds.memory_bytes / 2**20:g} MiB of memory"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # waits for it and closes its pipes, which may hold unsent bytes
        pass


def _pack(arguments: Mapping[str, Any]) -> bytes:
    """Raises InputError for values that are not JSON's."""
    try:
        return bytes(msgpack.packb(arguments))
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError("prompt", f"expected values that JSON has, in UTF-8; {first_line(error)}") from error


class Templates(Bounded):
    """Renders chat templates."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        super().__init__(("templates",), bounds)

    def render(self, **arguments: Any) -> tuple[list[str], list[Any]]:
        """Return the result of transformers' render_jinja_template for these arguments.

        Raises:
            TemplateRefusal: the template does not take them. InputError: it takes more than it may.
            BrigadeError: the process does not start.
        """
        try:
            outcome, found = self.ask(_pack(arguments))
        except Excess as excess:
            raise InputError("prompt", f"the chat template {excess}; {GIVE_RAW}, or shorter") from None
        if outcome == "refused":
            line = "".join(letter if letter.isprintable() else " " for letter in found)
            raise TemplateRefusal(line)
        if outcome == "too slow":
            raise InputError("prompt", f"the chat template took longer than {_RENDER_S:g} s; {GIVE_RAW}, or shorter")
        if outcome == "too long":
            made = f"made more than {self.bounds.text_bytes / 2**20:g} MiB of text"
            raise InputError("prompt", f"the chat template {made}; {GIVE_RAW}, or shorter")
        texts, generated = found
        return texts, generated


TEMPLATES = Templates()  # one process for the whole coordinator


class GrammarTrials(Bounded):
    """Compiles grammars for one model's vocabulary and drops the result; a grammar that passes is safe on any node."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos: Sequence[int],
        bounds: Bounds = Bounds(seconds=3.0, memory_bytes=1 << 30),
    ) -> None:
        """`folder` holds the model's tokenizer.json."""
        super().__init__(("grammars", str(folder), str(vocab_size), ",".join(map(str, eos))), bounds)

    def require(self, text: str) -> list[str]:
        """Return the keywords of a grammar's JSON schemas that it does not enforce.

        Raises:
            SamplingError: the grammar is invalid, matches nothing, or takes too much.
        """
        try:
            outcome, found = self.ask(bytes(msgpack.packb(text)))
        except Excess as excess:
            raise SamplingError(f"the grammar {excess} to compile; make it simpler") from None
        if outcome != "done":
            raise SamplingError(str(found))
        return list(found)


class LongTexts(Bounded):
    """Tokenizes prompts that would keep the coordinator's own tokenizer busy for too long."""

    def __init__(
        self,
        folder: Path,
        *,
        trust_remote_code: bool,
        bounds: Bounds = Bounds(seconds=30.0, text_bytes=64 << 20, memory_bytes=4 << 30),
    ) -> None:
        """`folder` holds the model's configuration and tokenizer."""
        super().__init__(("tokenizer", str(folder), str(int(trust_remote_code))), bounds)

    def encode(self, method: str, **arguments: Any) -> list[int]:
        """Return the token ids that this method of the model's `Tokenizer` returns.

        Raises:
            ContextExceeded: there are more than any context takes.
            InputError: the method refuses the arguments, or takes too much. BrigadeError: the process does not start.
        """
        try:
            outcome, found = self.ask(_pack({"method": method, "arguments": arguments}))
        except Excess as excess:
            raise InputError("prompt", f"tokenizing it {excess}; shorten it") from None
        if outcome == "refused":
            field, message = found
            raise InputError(field, message)
        if outcome == "too long":
            raise ContextExceeded("prompt", f"its tokens take more than {self.bounds.text_bytes >> 20} MiB; shorten it")
        return list(found)


class Texts(Bounded):
    """Renders templates and searches texts by regular expressions: both may come with a file of questions."""

    def __init__(self, bounds: Bounds = Bounds(seconds=2.0)) -> None:
        super().__init__(("texts",), bounds)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Return what a jinja template makes of these values.

        Raises:
            InputError: the template is wrong, needs other values, or takes more than it may.
        """
        return str(self._ask("the template", template=template, values=dict(values)))

    def find_all(self, pattern: str, text: str) -> list[Any]:
        """Return what `re.findall` returns.

        Raises:
            InputError: the pattern is wrong, or takes more than it may.
        """
        return list(self._ask(_PATTERN, pattern=pattern, text=text))

    def without(self, pattern: str, text: str) -> str:
        """Return the text without what the pattern matches. Raises as `find_all`."""
        return str(self._ask(_PATTERN, pattern=pattern, text=text, replaced=""))

    def _ask(self, what: str, **arguments: Any) -> Any:
        try:
            outcome, found = self.ask(_pack(arguments))
        except Excess as excess:
            raise InputError("", f"{what} {excess}") from None
        if outcome != "done":
            line = "".join(letter if letter.isprintable() else " " for letter in found)
            raise InputError("", f"{what} cannot be used: {line or 'its result is too long'}")
        return found


# --- in the process ---------------------------------------------------------------------------------------------------


def send(stream: IO[bytes], message: bytes) -> None:
    stream.write(_LENGTH.pack(len(message)))
    stream.write(message)
    stream.flush()


def receive(stream: IO[bytes], most: int = sys.maxsize) -> bytes:
    """Return the next message. Raises EOFError if there is none, or it breaks off, or is longer than `most`."""
    prefix = stream.read(_LENGTH.size)
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else most + 1
    message = stream.read(length) if length <= most else b""
    if length > most or len(message) < length:
        raise EOFError
    return message


def run_job(bounds: Bounds, job: str, *arguments: str) -> None:
    """Answer requests until the coordinator is gone."""
    answer_one = _JOBS[job](*arguments)
    _confine(bounds)
    send(sys.stdout.buffer, b"")  # ready
    try:
        while True:
            request = receive(sys.stdin.buffer)
            signal.setitimer(signal.ITIMER_REAL, bounds.seconds + 1)  # in case the coordinator is gone
            outcome, found = answer_one(msgpack.unpackb(request, strict_map_key=False))
            answer = bytes(msgpack.packb((outcome, found), unicode_errors="replace" if outcome == "refused" else None))
            if len(answer) > bounds.text_bytes:
                answer = bytes(msgpack.packb(("too long", "")))
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(sys.stdout.buffer, answer)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # do not flush again
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)


def _confine(bounds: Bounds) -> None:
    """Limit the memory, write no core dumps, and keep the user's terminal clean."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = psutil.Process().memory_info().vms + bounds.memory_bytes
    with suppress(OSError, ValueError):  # macOS lacks it; there `Bounded._watch` checks the size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _templates() -> Job:
    """Render with transformers' own function in jinja's sandbox, without importing the rest of transformers."""
    for package in ("transformers", "transformers.utils"):
        skip_init(package)
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    refusals = (
        TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError,
        ValueError,
    )  # fmt: skip

    class TooSlow(BaseException):
        pass

    def end(*args: object) -> NoReturn:
        raise TooSlow

    signal.signal(signal.SIGVTALRM, end)

    def render(arguments: Any) -> JobResult:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, _RENDER_S)
            rendered = render_jinja_template(**arguments)
            msgpack.packb(rendered)  # refuse a result that is not text
            return "done", rendered
        except refusals as error:
            return "refused", first_line(error)[:_MAX_LINE]
        except TooSlow:
            return "too slow", ""
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    return render


def _texts() -> Job:
    """Render in jinja's sandbox, with the settings of lm-eval, and search."""
    import re

    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    jinja.filters["regex_replace"] = lambda text, pattern, value="", count=0: re.sub(pattern, value, text, count=count)
    refusals = (
        re.error, TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
    )  # fmt: skip

    def answer(request: Any) -> JobResult:
        try:
            if "template" in request:
                return "done", jinja.from_string(request["template"]).render(request["values"])
            if "replaced" in request:
                return "done", re.sub(request["pattern"], request["replaced"], request["text"])
            return "done", re.findall(request["pattern"], request["text"])
        except refusals as error:
            return "refused", first_line(error)[:_MAX_LINE]

    return answer


def _grammars(folder: str, vocab_size: str, eos: str) -> Job:
    """Compile grammars; the vocabulary is read before the first request."""
    from protos.brigade_pb2 import Grammar
    from worker.compute.grammar import Grammars

    ends = [int(token) for token in eos.split(",") if token]
    with suppress(SamplingError):  # each request gets the error
        Grammars(Path(folder), int(vocab_size)).spelled("", ends)

    def require(text: Any) -> JobResult:
        try:
            grammars = Grammars(Path(folder), int(vocab_size))  # a new one, to keep nothing
            guide = grammars.guide(Grammar(text=text, eos=ends))
            guide.require_beginning()
            return "done", guide.not_enforced()
        except SamplingError as error:
            return "refused", error.message

    return require


def _tokenizer(folder: str, is_trusted: str) -> Job:
    """Tokenize with the same code as the coordinator."""
    from coordinator.engine.tokenizer import Tokenizer
    from worker.model.checkpoint import Checkpoint, read_config

    checkpoint = Checkpoint(folder, Path(folder), read_config(Path(folder)), {})
    tokenizer = Tokenizer(checkpoint, trust_remote_code=is_trusted == "1")

    def encode(request: Any) -> JobResult:
        try:
            return "done", getattr(tokenizer, request["method"])(**request["arguments"])
        except InputError as error:
            return "refused", (error.field, error.message)

    return encode


_JOBS: dict[str, Callable[..., Job]] = {
    "templates": _templates,
    "grammars": _grammars,
    "tokenizer": _tokenizer,
    "texts": _texts,
}

if __name__ == "__main__":
    seconds, text_bytes, memory_bytes, *name = sys.argv[1:]
    run_job(Bounds(float(seconds), int(text_bytes), int(memory_bytes)), *name)
