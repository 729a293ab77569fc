"""Runs a command's coroutine on uvloop. Ctrl-C and SIGTERM cancel it, so that all it started is ended in order."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import mlx.core as mx
import uvloop

from worker.platform.interrupts import INTERRUPTED

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine and return its result, also if it takes a signal for its usual end.

    A second signal ends the process at once; its own worker processes notice that and end too.

    Raises:
        KeyboardInterrupt: a signal ended it; all is cleaned up.
    """
    before = [signal.getsignal(number) for number in _SIGNALS]
    try:
        return uvloop.run(_interruptible(work))
    finally:
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler)
        mx.clear_streams()


async def _while_read(work: Coroutine[Any, Any, T]) -> T:
    """Raise BrokenPipeError if standard output is closed: rich raises SystemExit then, which would end the loop."""
    try:
        return await work
    except SystemExit as error:
        raise error.__context__ if isinstance(error.__context__, BrokenPipeError) else error from None


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(_while_read(work))
    signalled = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal signalled
        if signalled or task.done():
            os._exit(INTERRUPTED)
        signalled = True
        loop.call_soon_threadsafe(task.cancel)

    for number in _SIGNALS:
        signal.signal(number, on_signal)  # not the loop's handlers: a second one must not wait for a loop that is stuck
    await asyncio.wait([task])
    if signalled and (task.cancelled() or task.exception()):
        raise KeyboardInterrupt  # what failed meanwhile failed for that reason; what ended in order is done
    return task.result()
