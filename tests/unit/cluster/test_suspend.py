"""Whoever was asleep is told so, and nobody else is blamed."""

import asyncio

import pytest

from coordinator.cluster import step_timeouts as flight
from coordinator.cluster.step_timeouts import SuspendWatch
from worker.errors import StageLost


class Clocks:
    """The monotonic clock and how long the machine has slept, moved by hand."""

    def __init__(self) -> None:
        self.now, self.asleep = 1000.0, 5_000.0

    def monotonic(self) -> float:
        return self.now

    def pass_s(self, seconds: float, *, asleep: bool = False) -> None:
        """The monotonic clock stands still while the machine sleeps."""
        self.now += 0 if asleep else seconds
        self.asleep += seconds if asleep else 0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(flight, "time", found)
    monkeypatch.setattr(flight, "asleep_s", lambda: found.asleep)
    return found


@pytest.mark.parametrize("asleep", [False, True])
def test_a_process_that_stood_still_says_for_how_long_and_is_not_at_fault_long_after(
    clocks: Clocks, asleep: bool
) -> None:
    watched = SuspendWatch()
    clocks.pass_s(12, asleep=asleep)
    error = watched.blame()
    assert error is not None and "stood still for 12 s" in str(error) and error.node == ""
    assert watched.woke_at == clocks.now
    blamed = []
    for _ in range(11):
        clocks.pass_s(3)
        blamed.append(watched.blame() is not None)
    assert blamed == [True] * 10 + [False]


def test_a_process_that_is_only_busy_blames_whoever_is_at_fault(clocks: Clocks) -> None:
    watched = SuspendWatch()
    for _ in range(20):
        clocks.pass_s(3)
        assert watched.blame() is None
    assert watched.woke_at == 0


@pytest.mark.parametrize(
    ("still_s", "asleep", "is_lost"),
    [(4, True, False), (5, True, False), (6, True, True), (9000, True, True), (12, False, False)],
)
def test_a_coordinator_whose_machine_slept_drops_its_peers_and_one_that_was_only_stopped_does_not(
    clocks: Clocks, still_s: float, asleep: bool, is_lost: bool
) -> None:
    watched = SuspendWatch()

    async def watch() -> None:
        async with asyncio.timeout(0.01):
            await watched.watch()

    clocks.pass_s(still_s, asleep=asleep)
    with pytest.raises(StageLost if is_lost else TimeoutError, match=f"for {still_s} s" if is_lost else None):
        asyncio.run(watch())
    assert is_lost or asleep or watched.woke_at == clocks.now
