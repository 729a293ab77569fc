"""Chat templates, rendered in a process of their own that is killed when it takes too much. Any thread may ask."""

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import psutil

from coordinator.cluster.template_process import OUT_OF_MEMORY, Bounds, receive, send
from worker.errors import BrigadeError, InputError, first_line
from worker.process.imports import search_path

_USUAL = Bounds()
_TRIES = 2  # somebody may have ended the process, which is no fault of the template
_START_S = 30.0
_LOOK_S = 0.05
_PASSED_ON = ("TZ", "PYTHONHOME", "LD_LIBRARY_PATH")  # for local time, and for a Python that does not start without


class Templates:
    """Renders one conversation after another, in one process that lives until it has to be killed."""

    def __init__(self, bounds: Bounds = _USUAL) -> None:
        self._bounds = bounds
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Have the process start beside other work. Else the first rendering starts it, and waits for it."""
        with self._lock:
            self._process = self._process or _Process(self._bounds)

    def render(self, **arguments: Any) -> tuple[list[str], list[Any]]:
        """What transformers' render_jinja_template makes of these arguments.

        Raises:
            InputError: the template refuses them, or takes more than it may.
            BrigadeError: the process does not start.
        """
        request = _packed(arguments)
        with self._lock:
            outcome, found = msgpack.unpackb(self._ask(request))
        if outcome == "refused":
            said = "".join(letter if letter.isprintable() else " " for letter in found)
            raise InputError("prompt", f"the chat template refuses this conversation ({said}); give it raw")
        if outcome == "too long":
            raise _excess(f"made more than {self._bounds.text_bytes / 2**20:g} MiB of text")
        texts, generated = found
        return texts, generated

    def _ask(self, request: bytes) -> bytes:
        for _ in range(_TRIES):
            # Whoever fails or is interrupted in the middle of an answer must not leave the rest of it to the next one.
            process, self._process = self._process or _Process(self._bounds), None
            try:
                with suppress(EOFError):
                    answer = process.ask(request)
                    self._process = process
                    return answer
            finally:
                if self._process is None:
                    process.end()
        raise _excess(f"was rendered {_TRIES} times by a process that ended")


TEMPLATES = Templates()  # the coordinator's: one process, whoever asks


class _Process:
    """One life of the process."""

    def __init__(self, bounds: Bounds) -> None:
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._bounds = bounds
        self._is_ready = False
        self._process = subprocess.Popen(
            # Without -P a folder that is named as a package would be run instead.
            [sys.executable, "-P", "-m", "coordinator.cluster.template_process", *bounds.as_arguments()],
            env=passed_on | {"PYTHONPATH": search_path(), "OPENBLAS_NUM_THREADS": "1"},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the coordinator
        )
        self.end = weakref.finalize(self, _end, self._process)  # at the latest when the coordinator ends

    def ask(self, request: bytes) -> bytes:
        """The answer. Raises EOFError if the process ended by itself, or InputError or BrigadeError if it had to."""
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
            if self._process.wait() == OUT_OF_MEMORY:
                excesses.append(self._too_large())
            if not excesses:
                raise EOFError from error
            if not self._is_ready:
                raise BrigadeError(f"the process that renders chat templates {excesses[0]} to start") from None
            raise _excess(excesses[0]) from None
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


def _packed(arguments: dict[str, Any]) -> bytes:
    try:
        return bytes(msgpack.packb(arguments))
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError("prompt", f"expected values that JSON has, in UTF-8; {first_line(error)}") from error


def _excess(excess: str) -> InputError:
    return InputError("prompt", f"the chat template {excess}; give it raw, or shorter")
