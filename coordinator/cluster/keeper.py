"""Keeper: a local worker that is started again whenever its process ends; if that happens often, ever less often."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from coordinator.cluster.local import LocalWorker
from worker.errors import StageLost

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
        except StageLost:
            return
        await self._replaced(self.worker)
