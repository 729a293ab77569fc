"""What is heard is bounded: who floods the network can hide others, and do no more."""

import asyncio
from typing import Any, cast

import pytest
from zeroconf import Error, ServiceStateChange
from zeroconf.asyncio import AsyncZeroconf

from coordinator.deploy import discovery as browsing
from coordinator.deploy.discovery import MAX_ANNOUNCEMENTS, Heard, ServiceListener, browse
from worker.errors import StageLost
from worker.node.announce import SERVICE
from worker.platform.interfaces import Interface


class Noting(ServiceListener):
    """Does not resolve what it hears of."""

    num_asked = 0

    async def _resolve(self, zeroconf: Any, instance: str) -> None:
        self.num_asked += 1


def test_only_so_many_announcements_are_looked_at_and_each_once() -> None:
    async def flood() -> Noting:
        ear = Noting(0.0)
        for number in range(MAX_ANNOUNCEMENTS + 44):
            for change in (ServiceStateChange.Added, ServiceStateChange.Updated, ServiceStateChange.Removed):
                ear.on_change(cast(Any, None), "", f"node-{number}.{SERVICE}", change)
        ear.on_change(cast(Any, None), "", f"node-0.{SERVICE}", ServiceStateChange.Added)
        await ear.wait_resolved()
        return ear

    ear = asyncio.run(flood())
    assert (ear.num_asked, ear.heard.num_ignored) == (MAX_ANNOUNCEMENTS, 44)


@pytest.mark.parametrize(
    "name", ["printer._http._tcp.local.", f"mini\n.{SERVICE}", f"{'m' * 64}.{SERVICE}", f".{SERVICE}"]
)
def test_who_points_to_what_is_no_node_is_ignored_and_ends_nothing(name: str) -> None:
    async def point() -> Heard:
        ear = ServiceListener(0.0)
        async with AsyncZeroconf(interfaces=["127.0.0.1"]) as listener:
            ear.on_change(listener.zeroconf, SERVICE, name, ServiceStateChange.Added)
            await ear.wait_resolved()
        return ear.heard

    assert asyncio.run(point()) == Heard([], num_ignored=1)


def test_a_failure_without_words_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Interface]:
        raise Error

    monkeypatch.setattr(browsing, "own_interfaces", fail)
    with pytest.raises(StageLost, match=r"on this machine's networks: Error$"):
        asyncio.run(browse(0.1))


def test_a_listener_that_fails_leaves_no_task_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """A browser that hears of one node and fails."""

        def __init__(self, zeroconf: Any, service_type: str, handlers: list[Any]) -> None:
            handlers[0](zeroconf, SERVICE, f"mini.{SERVICE}", ServiceStateChange.Added)

        async def __aenter__(self) -> None:
            await asyncio.sleep(0)  # resolving begins
            raise OSError("no network")

        async def __aexit__(self, *exc: object) -> None: ...

    async def look() -> set[str]:
        with pytest.raises(StageLost, match="no network"):
            await browse(60.0)
        return {task.get_name() for task in asyncio.all_tasks() if "_resolve" in repr(task)}

    monkeypatch.setattr("zeroconf.asyncio.AsyncServiceBrowser", Failing)
    monkeypatch.setattr(browsing, "own_interfaces", lambda: [Interface("lo", ("127.0.0.1",))])
    assert not asyncio.run(look())
