"""Worker processes on this machine, for `--local N`: started here, ended here, whatever happens."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

from worker.errors import StageLost
from worker.process.imports import search_path

_START_S = 30.0
_STOP_S = 5.0


class LocalWorker:
    """A `python -m worker` on a free loopback port. It also ends by itself when this process is gone."""

    def __init__(self, name: str, model: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.model = model
        self.address = ""
        self.started_s = 0.0  # how long it took to start
        self._process = process

    @classmethod
    async def start(cls, name: str, model: str) -> "LocalWorker":
        """Start the process and wait until it listens; `model` is what it is to load, as the user names it here.

        Raises:
            StageLost: it does not listen.
        """
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # or a folder named worker where the user happens to be would be run instead
            *("-m", "worker", "--name", name, "--model", model, "--bind", "127.0.0.1:0", "--follow-parent"),
            env=os.environ | {"PYTHONPATH": search_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the coordinator: it ends its workers in order
        )
        local = cls(name, model, process)
        try:
            local.address = await local._wait_listening()
        finally:
            if not local.address:
                await local.stop()
        local.started_s = time.monotonic() - began
        return local

    async def _wait_listening(self) -> str:
        """The address that it says it listens on, as its first line."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await self._process.stdout.readline()
            return str(json.loads(line)["address"])
        except TimeoutError:
            raise StageLost(f"did not start within {_START_S:.0f} s", node=self.name) from None
        except (json.JSONDecodeError, KeyError, TypeError):
            raise StageLost("ended while starting; what it said stands above", node=self.name) from None

    async def wait_ended(self) -> str:
        """How the process ended, once it has."""
        code = await self._process.wait()
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """To the process, if it has not ended."""
        if self._process.returncode is None:
            self._process.send_signal(number)

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
