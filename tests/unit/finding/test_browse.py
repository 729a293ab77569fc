"""What is heard is bounded: who floods the network can hide others, and do no more."""

import asyncio
from typing import Any, cast

from zeroconf import ServiceStateChange

from coordinator.finding.browse import MOST_HEARD, _Ear


class Noting(_Ear):
    """Asks nobody for the rest."""

    num_asked = 0

    async def _resolve(self, zeroconf: Any, instance: str) -> None:
        self.num_asked += 1


def test_only_so_many_announcements_are_looked_at_and_each_once() -> None:
    async def flood() -> Noting:
        ear = Noting(0.0)
        for number in range(MOST_HEARD + 44):
            for change in (ServiceStateChange.Added, ServiceStateChange.Updated, ServiceStateChange.Removed):
                ear.on_change(cast(Any, None), "", f"node-{number}", change)
        ear.on_change(cast(Any, None), "", "node-0", ServiceStateChange.Added)
        await ear.wait_resolved()
        return ear

    ear = asyncio.run(flood())
    assert (ear.num_asked, ear.heard.num_ignored) == (MOST_HEARD, 44)
