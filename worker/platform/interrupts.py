"""Ctrl-C or SIGTERM while no event loop runs ends the process at once; while MLX looks for a compiler, after that."""

from __future__ import annotations

import atexit
import os
import select
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # handlers are set before slow imports
    import asyncio
    from collections.abc import Callable

INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STUCK_S = 3.0  # after a signal: a loop that has not run by then may write to a pipe that is not read


def end_interrupted() -> NoReturn:
    """End the process at once, with the exit code of an interrupt and with the cursor that a progress bar hides."""
    for stream in (1, 2):
        with suppress(OSError):
            if os.isatty(stream) and select.select([], [stream], [], 0)[1]:  # else the write may block for ever
                os.write(stream, b"\x1b[?25h")
    os._exit(INTERRUPTED)


def end_when_interrupted() -> None:
    """From now on, end the process silently at Ctrl-C or SIGTERM, even during imports and the parsing of flags."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: end_interrupted())
    # while Python ends, a signal would have its default effect, in place of the exit code
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    with suppress(OSError, ValueError, AttributeError):  # Python reports it
        sys.stdout.flush()  # while a signal still ends this: it may not be read
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def call_soon_or_end(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have the loop call this, from a handler of a signal; end the process if the loop is stuck for `STUCK_S`."""

    def called() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        call()

    signal.signal(signal.SIGALRM, lambda number, frame: end_interrupted())
    signal.setitimer(signal.ITIMER_REAL, STUCK_S)
    loop.call_soon_threadsafe(called)


def find_compiler() -> None:
    """Make MLX look for the CPU's compiler now, while this process has only one thread.

    MLX looks for it once per process, by system(), which ignores SIGINT until it returns: a Ctrl-C would be lost. This
    function blocks SIGINT in the only thread, so that it takes effect afterwards.
    """
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            mx.compile(lambda: mx.array(0))()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
