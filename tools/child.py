"""A second process of a benchmark, and how long the event loop of either keeps a task waiting."""

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_TICK_S = 0.0005


@asynccontextmanager
async def child(module: str, *arguments: str | Path) -> AsyncIterator[tuple[bytes, asyncio.StreamReader, Process]]:
    """Run `python -m MODULE ARGUMENTS`. Yield the first line that it prints, its further output, and the process."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    try:
        yield await process.stdout.readline(), process.stdout, process
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            process.terminate()
        await process.wait()


class Ticker:
    """How long the event loop keeps a task waiting beyond what it asked for."""

    def __init__(self, *, is_ticking: bool = True) -> None:
        """Unless it `is_ticking`, all times are 0."""
        self._longest = [0.0, 0.0]
        self._task = asyncio.create_task(self._tick()) if is_ticking else None

    def take(self) -> tuple[float, float]:
        """The longest wait since the last call, and the most that the loop itself computed in one; milliseconds."""
        gap_s, own_s = self._longest
        self._longest = [0.0, 0.0]
        return 1e3 * gap_s, 1e3 * own_s

    async def _tick(self) -> None:
        before, own_before = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(_TICK_S)
            now, own_now = time.perf_counter(), time.thread_time()
            gaps = now - before - _TICK_S, own_now - own_before
            self._longest = [max(pair) for pair in zip(self._longest, gaps, strict=True)]
            before, own_before = now, own_now
