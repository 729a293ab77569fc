"""Whoever was asleep is told so, and nobody else is blamed."""

import pytest

from coordinator.cluster import stillness
from coordinator.cluster.stillness import Stillness


class Clocks:
    """Both clocks, moved by hand."""

    def __init__(self) -> None:
        self.now, self.today = 1000.0, 5_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.today

    def pass_s(self, seconds: float, *, asleep: bool = False) -> None:
        """A monotonic clock may stand still while the machine sleeps."""
        self.now += 0 if asleep else seconds
        self.today += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(stillness, "time", found)
    return found


@pytest.mark.parametrize("asleep", [False, True])
def test_a_process_that_stood_still_says_for_how_long(clocks: Clocks, asleep: bool) -> None:
    watched = Stillness()
    clocks.pass_s(12, asleep=asleep)
    error = watched.blame()
    assert error is not None and "stood still for 12 s" in str(error) and error.node == ""
    assert watched.woke_at == clocks.now


def test_a_process_that_is_only_busy_blames_whoever_is_at_fault(clocks: Clocks) -> None:
    watched = Stillness()
    for _ in range(20):
        clocks.pass_s(3)
        assert watched.blame() is None
    assert watched.woke_at == 0


def test_what_breaks_long_after_is_not_its_fault(clocks: Clocks) -> None:
    watched = Stillness()
    clocks.pass_s(12)
    assert watched.blame() is not None
    for _ in range(11):
        clocks.pass_s(3)
        watched.blame()
    assert watched.blame() is None
