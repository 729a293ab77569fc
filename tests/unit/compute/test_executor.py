"""What an executor concludes from the times of its steps."""

import pytest

from worker.compute.executor import share_of_begin


@pytest.mark.parametrize(
    ("times_us", "share"),
    [
        ((0, 900, 900, 1000), 0.9),  # a CPU computes in `begin`
        ((0, 100, 100, 1000), 0.1),  # a device that takes longer than it takes to begin
        ((0, 100, 400, 1000), 0.1),  # something else was begun meanwhile, and the device was still busy
        ((0, 500, 1100, 1110), 0.98),  # the device was done before that: its own time is unknown
        ((0, 0, 0, 0), 0.0),
    ],
)
def test_steps_overlap_where_the_device_takes_longer(times_us: tuple[int, int, int, int], share: float) -> None:
    assert share_of_begin(*(1000 * time for time in times_us)) == pytest.approx(share, abs=0.001)
