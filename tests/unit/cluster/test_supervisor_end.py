import asyncio
from typing import Any

import pytest

from coordinator.cluster.deployment import Deployment
from coordinator.cluster.supervisor import Supervisor
from coordinator.planning.plan import Node, plan
from tests.unit.cluster.test_supervisor_states import LIMITS, MEMORY, SPEC


def test_the_chain_is_closed_also_where_the_lookout_does_not_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    none: Any = None
    closed = []

    async def stop() -> None:
        raise asyncio.CancelledError

    async def close() -> None:
        closed.append(True)

    async def left() -> None:
        split = plan(SPEC, [Node("coordinator", MEMORY), Node("a", MEMORY)], 100)
        supervisor = Supervisor(none, none, Deployment(none, SPEC, split, []), LIMITS)
        monkeypatch.setattr(supervisor._lookout, "stop", stop)
        monkeypatch.setattr(supervisor._chains, "close", close)
        async with supervisor:
            pass

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(left())
    assert closed
