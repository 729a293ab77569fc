"""A machine that slept is noticed by its own clocks, whatever the time of day does."""

import asyncio

import pytest

from worker.errors import StageLost
from worker.platform import machine
from worker.platform.machine import SleepWatch, asleep_by, awake_command, wait_slept

CLOCKS = {"CLOCK_BOOTTIME": 100.0, "CLOCK_MONOTONIC": 70.0, "CLOCK_UPTIME_RAW": 30.0}


def test_each_system_has_a_clock_that_goes_on_and_one_that_does_not_and_a_mac_is_kept_awake() -> None:
    for system, expected in (("Linux", 30.0), ("Darwin", 40.0), ("Windows", 0.0)):
        assert asleep_by(system, CLOCKS.__getitem__) == expected
    assert awake_command("Darwin", 4321) == ["caffeinate", "-i", "-w", "4321"]
    assert awake_command("Linux", 4321) == []


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([7, 7, 7], [0, 0, 0]),
        ([7, 12, 12], [0, 0, 0]),
        ([7, 12.1, 12.1], [0, 5.1, 0]),
        ([7, 11, 15, 19], [0, 0, 0, 0]),  # short ones do not add up: a peer sees each by itself
        ([7, 9007, 9007, 9014], [0, 9000, 0, 7]),
    ],
)
def test_more_than_five_seconds_at_once_count(readings: list[float], expected: list[float]) -> None:
    watch = SleepWatch(7)
    assert [watch.look(reading) for reading in readings] == pytest.approx(expected)


def test_a_node_whose_machine_slept_says_so_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([3.0, 3.0, 3.0, 40.0])
    monkeypatch.setattr(machine, "asleep_s", lambda: next(readings))
    monkeypatch.setattr(machine, "LOOK_EVERY_S", 0)
    with pytest.raises(StageLost, match="its machine slept for 37 s"):
        asyncio.run(wait_slept())
