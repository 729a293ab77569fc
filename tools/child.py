"""A second process of a benchmark."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


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
