"""Work that a client or a model's folder decides on, in processes of their own that are killed when it takes too much.

Chat templates are foreign code, and a grammar of two kilobytes can take any time and memory to compile. Any thread may
ask; a process answers one request after another and lives until it has to be killed.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import psutil

from coordinator.engine.bounded_process import OUT_OF_MEMORY, Bounds, receive, send
from worker.errors import BrigadeError, InputError, SamplingError, first_line
from worker.platform.installation import search_path

_USUAL = Bounds()
_GRAMMARS = Bounds(seconds=3.0, memory_bytes=1 << 30)
_TRIES = 2  # the process may have been ended by someone else, which is no fault of the request
_START_S = 30.0
_LOOK_S = 0.05
_PASSED_ON = ("TZ", "PYTHONHOME", "LD_LIBRARY_PATH")  # for local time, and for a Python that does not start without


class Excess(Exception):
    """A request took more than it may; the text says what, as in `took longer than 5 s`."""


class Bounded:
    """One job's process: it is started when it is needed, and anew after it was killed."""

    def __init__(self, job: Sequence[str], bounds: Bounds) -> None:
        """`job` is its name in `bounded_process` and its arguments."""
        self.bounds = bounds
        self._job = job
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Have the process start beside other work. Else the first request starts it, and waits for it."""
        with self._lock:
            self._process = self._process or _Process(self._job, self.bounds)

    def ask(self, request: bytes) -> tuple[str, Any]:
        """How it went ("done", "refused" or "too long"), and the answer.

        Raises:
            Excess: the request took too much. BrigadeError: the process does not start.
        """
        with self._lock:
            outcome, found = msgpack.unpackb(self._answer(request))
        return outcome, found

    def _answer(self, request: bytes) -> bytes:
        for _ in range(_TRIES):
            # A failure in the middle of an answer must not leave the rest of it to the next request.
            process, self._process = self._process or _Process(self._job, self.bounds), None
            try:
                with suppress(EOFError):
                    answer = process.ask(request)
                    self._process = process
                    return answer
            finally:
                if self._process is None:
                    process.end()
        raise Excess(f"was given {_TRIES} times to a process that ended")


class Templates(Bounded):
    """Renders one conversation after another."""

    def __init__(self, bounds: Bounds = _USUAL) -> None:
        super().__init__(("templates",), bounds)

    def render(self, **arguments: Any) -> tuple[list[str], list[Any]]:
        """What transformers' render_jinja_template makes of these arguments.

        Raises:
            InputError: the template refuses them, or takes more than it may.
            BrigadeError: the process does not start.
        """
        try:
            request = bytes(msgpack.packb(arguments))
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError("prompt", f"expected values that JSON has, in UTF-8; {first_line(error)}") from error
        try:
            outcome, found = self.ask(request)
        except Excess as excess:
            raise InputError("prompt", f"the chat template {excess}; give it raw, or shorter") from None
        if outcome == "refused":
            said = "".join(letter if letter.isprintable() else " " for letter in found)
            raise InputError("prompt", f"the chat template refuses this conversation ({said}); give it raw")
        if outcome == "too long":
            made = f"made more than {self.bounds.text_bytes / 2**20:g} MiB of text"
            raise InputError("prompt", f"the chat template {made}; give it raw, or shorter")
        texts, generated = found
        return texts, generated


TEMPLATES = Templates()  # the coordinator's: one process, whoever asks


class GrammarTrials(Bounded):
    """Compiles grammars of one model's vocabulary, and drops them: what passes may be compiled anywhere."""

    def __init__(self, folder: Path, vocab_size: int, eos: Sequence[int], bounds: Bounds = _GRAMMARS) -> None:
        """`folder` holds the model's tokenizer.json."""
        super().__init__(("grammars", str(folder), str(vocab_size), ",".join(map(str, eos))), bounds)

    def require(self, text: str) -> None:
        """Raises SamplingError for a grammar that is none, allows no first token, or takes more than it may."""
        try:
            outcome, found = self.ask(bytes(msgpack.packb(text)))
        except Excess as excess:
            raise SamplingError(f"the grammar {excess} to compile; make it simpler") from None
        if outcome != "done":
            raise SamplingError(str(found))


class _Process:
    """One life of a process."""

    def __init__(self, job: Sequence[str], bounds: Bounds) -> None:
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._name = job[0]
        self._bounds = bounds
        self._is_ready = False
        self._process = subprocess.Popen(
            # Without -P a folder that is named as a package would be run instead.
            [sys.executable, "-P", "-m", "coordinator.engine.bounded_process", *bounds.as_arguments(), *job],
            env=passed_on | {"PYTHONPATH": search_path(), "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the coordinator
        )
        self.end = weakref.finalize(self, _end, self._process)  # at the latest when the coordinator ends

    def ask(self, request: bytes) -> bytes:
        """The answer. Raises EOFError if the process ended by itself, or Excess or BrigadeError if it had to."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._is_ready:
            with self._watched(_START_S):
                receive(self._process.stdout)
            self._is_ready = True
        with self._watched(self._bounds.seconds):
            send(self._process.stdin, request)
            return receive(self._process.stdout, self._bounds.text_bytes)

    @contextmanager
    def _watched(self, seconds: float) -> Iterator[None]:
        """Kill the process if it takes longer than that, or too much memory, before this block is left."""
        done, excesses = threading.Event(), list[str]()
        watch = threading.Thread(target=self._watch, args=(seconds, done, excesses), daemon=True)
        watch.start()
        try:
            yield
        except (EOFError, BrokenPipeError) as error:
            # native code that gets no memory aborts
            if self._process.wait() in (OUT_OF_MEMORY, -signal.SIGABRT) and not excesses:
                excesses.append(self._too_large())
            if not excesses:
                raise EOFError from error
            if not self._is_ready:
                raise BrigadeError(f"the process for {self._name} {excesses[0]} to start") from None
            raise Excess(excesses[0]) from None
        finally:
            done.set()
            watch.join()

    def _watch(self, seconds: float, done: threading.Event, excesses: list[str]) -> None:
        until = time.monotonic() + seconds
        while not done.wait(min(_LOOK_S, max(0.0, until - time.monotonic()))) and not excesses:
            with suppress(psutil.Error):  # it has just ended
                if psutil.Process(self._process.pid).memory_info().rss > self._bounds.memory_bytes:
                    excesses.append(self._too_large())
            if time.monotonic() >= until:
                excesses.append(f"took longer than {seconds:g} s")
            if excesses:
                self._process.kill()

    def _too_large(self) -> str:
        return f"took more than {self._bounds.memory_bytes / 2**20:g} MiB of memory"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # waits for it and closes its pipes, in which something may be left
        pass
