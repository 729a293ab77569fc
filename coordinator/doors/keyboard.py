"""Keyboard: lines as they are typed, or piped, read aside; and Ctrl-C, which ends an answer and not the program."""

import asyncio
import contextlib
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from worker.process.call_thread import CallThread


class Keyboard:
    """Lines of standard input. Use as a context manager."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._thread = CallThread("keyboard")
        self._settings: list[object] | None = None

    def __enter__(self) -> "Keyboard":
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - by which input() edits lines, and knows earlier ones
            self._settings = termios.tcgetattr(sys.stdin)
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.close(timeout_s=0)  # it may wait for a line that never comes
        if self._settings is not None:  # as they were before that line was waited for
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)  # type: ignore[arg-type]

    async def read(self, prompt: str) -> str | None:
        """The next line; None at the end."""
        try:
            return await self._thread.run(partial(input, prompt) if self.is_terminal else _piped_line)
        except EOFError:
            return None


def _piped_line() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode(errors="surrogateescape").rstrip("\r\n")  # as python reads a flag


@contextmanager
def taking_interrupts(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Have Ctrl-C do this meanwhile."""
    before, loop = signal.getsignal(signal.SIGINT), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
