"""Runs a command's coroutine on uvloop. Ctrl-C and SIGTERM cancel it, so that all it started is ended in order."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import mlx.core as mx
import uvloop

from worker.process.run import INTERRUPTED

T = TypeVar("T")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Raises KeyboardInterrupt, once all is cleaned up, if a signal ended it.

    A second signal ends the process at once; workers of its own notice and end too.
    """
    try:
        return uvloop.run(_interruptible(work))
    finally:
        mx.clear_streams()


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    signalled = False

    def on_signal() -> None:
        nonlocal signalled
        if signalled:
            os._exit(INTERRUPTED)
        signalled = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        if not signalled:
            raise
        raise KeyboardInterrupt from None
