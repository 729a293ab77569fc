"""Sleep: whether this machine has slept, so that its node gives up the peers that it has not heard meanwhile."""

import asyncio
from typing import NoReturn

from worker.errors import StageLost
from worker.process.machine import asleep_s

_LOOK_EVERY_S = 1.0
_COUNTS_S = 5.0  # a shorter sleep no peer need have noticed


class SleepWatch:
    """Finds a sleep in readings of how long the machine has slept in all. Pure."""

    def __init__(self, asleep_s: float) -> None:
        self._last_s = asleep_s

    def look(self, asleep_s: float) -> float:
        """Seconds slept since the last look; 0 if that is too little to count."""
        slept_s, self._last_s = asleep_s - self._last_s, asleep_s
        return slept_s if slept_s > _COUNTS_S else 0.0


async def wait_slept() -> NoReturn:
    """Return never. Raises StageLost once the machine has slept."""
    watch = SleepWatch(asleep_s())
    while True:
        if slept_s := watch.look(asleep_s()):
            raise StageLost(f"its machine slept for {slept_s:.0f} s, so it left the chain; it may join again")
        await asyncio.sleep(_LOOK_EVERY_S)
