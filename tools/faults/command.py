"""The command `brigade generate` as a process of its own, for what a coordinator cannot be tried on in this one."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tools.faults.trial import FAR_S
from tools.worker_process import ROOT

MAIN = "from coordinator.__main__ import main; main()"


@dataclass(frozen=True)
class Ended:
    """How the command ended."""

    code: int
    out: str
    err: str

    @property
    def loss(self) -> str:
        """The line about a loss, or the error."""
        lines = [line for line in self.err.splitlines() if "; going on" in line or line.startswith("error: ")]
        return lines[-1] if lines else self.err[-200:]


class Command:
    """A command under way."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._out = b""

    async def wait_text(self, num_bytes: int = 1) -> None:
        """Return once it has written so much of the answer."""
        assert self.process.stdout is not None
        async with asyncio.timeout(FAR_S):
            while len(self._out) < num_bytes:
                piece = await self.process.stdout.read(4096)
                assert piece, f"it ended after {self._out!r}: {(await self.wait()).err}"
                self._out += piece

    async def wait(self, within_s: float = 2 * FAR_S) -> Ended:
        async with asyncio.timeout(within_s):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return Ended(self.process.returncode, (self._out + out).decode(), err.decode())


@contextlib.asynccontextmanager
async def generate(*arguments: str | Path, executable: Path | None = None) -> AsyncIterator[Command]:
    """`brigade generate ARGUMENTS`, ended whatever happens; `executable` is what it starts workers of its own with."""
    before = f"import sys; sys.executable = {str(executable)!r}; " if executable else ""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", before + MAIN, "generate", *map(str, arguments),
        cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Command(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
