"""Stillness: whether this very process stood still for a while, so that no worker is blamed for what it missed."""

import asyncio
import time
from typing import NoReturn

from worker.errors import StageLost
from worker.process.machine import asleep_s
from worker.process.sleep import SleepWatch

_TICK_S = 0.25
_STILL_S = 3.5  # late by so much: asleep or stopped, not busy; other nodes wait as long before they give one up
_RECENT_S = 30.0  # what breaks so soon after it broke because of it


class Stillness:
    """Notes when this process did not run: the machine slept, or the process was stopped.

    Python's monotonic clock stands still while a machine sleeps, so that time is added.
    """

    def __init__(self) -> None:
        self.woke_at = 0.0  # seconds, monotonic: when it last ran again after that
        self._still_s = 0.0  # how long it had stood still then
        self._last = time.monotonic() + asleep_s()
        self._sleep = SleepWatch(asleep_s())

    async def watch(self) -> NoReturn:
        """Look at the clocks until cancelled. Raises StageLost once the machine has slept: its peers did not wait."""
        while True:
            self._look()
            if self._sleep.look(asleep_s()) and (error := self.blame()):
                raise error
            await asyncio.sleep(_TICK_S)

    def blame(self) -> StageLost | None:
        """The error that whatever broke now comes from, if this process stood still lately."""
        self._look()
        if not self.woke_at or time.monotonic() - self.woke_at > _RECENT_S:
            return None
        return StageLost(
            f"this process stood still for {self._still_s:.0f} s (the machine slept, or it was stopped), and the other "
            "nodes gave it up; keep it awake (a Mac whose lid is closed is not)"
        )

    def _look(self) -> None:
        now = time.monotonic()
        passed_s, self._last = now + asleep_s() - self._last, now + asleep_s()
        if passed_s > _TICK_S + _STILL_S:
            self.woke_at, self._still_s = now, passed_s
