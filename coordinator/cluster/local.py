"""Worker processes on this machine, for `--local N`: started, started again and ended here."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

from worker.errors import StageLost
from worker.platform.installation import search_path

_START_S = 30.0
_STOP_S = 5.0


class LocalWorker:
    """A `python -m worker` process on a free loopback port. It ends by itself when this process is gone."""

    def __init__(self, name: str, model: str, draft_model: str | None, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.model = model
        self.draft_model = draft_model
        self.address = ""
        self.started_s = 0.0  # how long it took to start
        self._process = process
        self._is_given_up = False

    @classmethod
    async def start(cls, name: str, model: str, draft_model: str | None = None) -> "LocalWorker":
        """Start the process and wait until it listens; the models to load are named as the user does.

        Raises:
            StageLost: it ended, or did not listen in time.
        """
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # do not run a folder named `worker` in the current directory
            *("-m", "worker", "--name", name, "--model", model, "--bind", "127.0.0.1:0", "--follow-parent"),
            *(("--draft-model", draft_model) if draft_model else ()),
            env=os.environ | {"PYTHONPATH": search_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the coordinator: it ends its workers in order
        )
        local = cls(name, model, draft_model, process)
        try:
            local.address = await local._wait_listening()
        finally:
            if not local.address:
                await local.stop()
        local.started_s = time.monotonic() - began
        return local

    async def _wait_listening(self) -> str:
        """Return the address in the first line of its output."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await self._process.stdout.readline()
            return str(json.loads(line)["address"])
        except TimeoutError:
            self.kill()
            raise StageLost(f"did not start within {_START_S:.0f} s", node=self.name) from None
        except (json.JSONDecodeError, KeyError, TypeError):
            raise StageLost("ended while starting; what it said stands above", node=self.name) from None

    async def wait_ended(self) -> str:
        """Wait for the end of the process, and return a description of it."""
        code = await self._process.wait()
        if self._is_given_up:
            return "did not answer, and was ended"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process at once by SIGKILL, since it does not answer."""
        self._is_given_up = True
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def stop(self) -> None:
        """End the process by SIGTERM, then by SIGKILL."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()


_FIRST_PAUSE_S = 0.2  # from the start of a process to that of the next one, doubled with each short life
_LONGEST_PAUSE_S = 5.0
_SOUND_S = 20.0  # a process that has run for so long did not end because it was started


async def keep_running(worker: LocalWorker, say: Callable[[str], None]) -> AsyncIterator[LocalWorker | None]:
    """Start the worker again whenever it ends: yield None once it has ended, and then the process in its place."""
    name, model, draft_model, pause_s = worker.name, worker.model, worker.draft_model, _FIRST_PAUSE_S
    running: LocalWorker | None = worker
    how = ""  # how the last process ended, or why none was started
    while True:
        began = time.monotonic()
        if running is not None:
            how, running = await running.wait_ended(), None
            yield None
        ran_s = time.monotonic() - began
        if ran_s > _SOUND_S:
            pause_s = _FIRST_PAUSE_S
        say(f"worker {name}: {how}; it is started again")
        await asyncio.sleep(max(0.0, pause_s - ran_s))
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        try:
            running = await LocalWorker.start(name, model, draft_model)
        except StageLost as error:
            how = error.message
        except OSError as error:  # no memory or process left; the next try may find some
            how = f"cannot be started ({error.strerror})"
        else:
            yield running
