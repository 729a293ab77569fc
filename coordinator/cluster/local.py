"""Worker processes on this machine, for `--local N`: started here, ended here, whatever happens."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from worker.errors import StageLost
from worker.platform.installation import search_path

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


_FIRST_PAUSE_S = 0.2  # from when it began to run: one that ran for longer is started again at once
_LONGEST_PAUSE_S = 5.0
_SOUND_S = 20.0  # a process that has run for so long did not fail by being started


class Keeper:
    """Watches one local worker. Use `run` as a task; cancelling it ends the watch, `stop` then the worker."""

    def __init__(
        self, worker: LocalWorker, replaced: Callable[[LocalWorker | None], Awaitable[None]], say: Callable[[str], None]
    ) -> None:
        """`replaced` is told once the worker is gone (None), and of the one that stands in its place."""
        self.worker: LocalWorker | None = worker  # None until another one runs in its place
        self._name, self._model = worker.name, worker.model
        self._replaced = replaced
        self._say = say

    async def run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            how = await self._watch()
            ran_s = time.monotonic() - began
            if ran_s > _SOUND_S:
                pause_s = _FIRST_PAUSE_S
            self._say(f"worker {self._name}: {how}; it is started again")
            await asyncio.sleep(max(0.0, pause_s - ran_s))
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            await self._start()

    def kill(self) -> None:
        """End a process that does not answer: `run` starts another."""
        if self.worker is not None:
            self.worker.kill()

    async def stop(self) -> None:
        if self.worker is not None:
            await self.worker.stop()

    async def _watch(self) -> str:
        """How the worker ended; it may never have begun."""
        if self.worker is None:
            return "did not start"
        how = await self.worker.wait_ended()
        self.worker = None
        await self._replaced(None)
        return how

    async def _start(self) -> None:
        try:
            self.worker = await LocalWorker.start(self._name, self._model)
        except (StageLost, OSError):  # OSError: no memory or no process is left; the next try may find some
            return
        await self._replaced(self.worker)
