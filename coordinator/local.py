"""Worker processes on this machine, for `--local N`: started here, ended here, whatever happens."""

import asyncio
import json
import subprocess
import sys

from worker.errors import StageLost

_START_S = 30.0
_STOP_S = 5.0


class LocalWorker:
    """A `python -m worker` on a free loopback port. It also ends by itself when this process is gone."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, address: str) -> None:
        self.name = name
        self.address = address
        self._process = process

    @classmethod
    async def start(cls, name: str) -> "LocalWorker":
        """Start the process and wait until it listens. Raises StageLost with its last words if it does not."""
        arguments = ["-m", "worker", "--name", name, "--bind", "127.0.0.1:0", "--follow-parent"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the coordinator: it ends its workers in order
        )
        assert process.stdout is not None and process.stderr is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            raise StageLost(f"worker {name}: did not start within {_START_S:.0f} s") from None
        except asyncio.CancelledError:
            process.kill()
            raise
        if not line:
            words = (await process.stderr.read()).decode(errors="replace").strip().splitlines() or ["nothing said"]
            raise StageLost(f"worker {name}: ended while starting ({words[-1]})")
        return cls(name, process, json.loads(line)["address"])

    async def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
