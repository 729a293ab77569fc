"""What filters leave behind: a process lives for months, and each client has numbers of its own."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.sessions.request import make_sampling
from tests.unit.compute.rows import logits_of
from worker.compute.sampling import Sampler


def num_libraries() -> int:
    """How often a part of a library is mapped; on a CPU, a kernel that MLX compiles is one."""
    return sum(".so" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_numbers_of_a_request_are_no_part_of_a_kernel() -> None:
    counts = []
    for number in (0.3, 0.31, 0.32, 0.33):
        for given in ({"top_p": number}, {"min_p": number}, {"xtc_probability": 1.0, "xtc_threshold": number}):
            sampler = Sampler(make_sampling(seed=7, temperature=1.0, **given))
            mx.eval(sampler(logits_of(1), [3], [1, 2, 3], [3]).arrays())
        counts.append(num_libraries())
    assert counts[1:] == counts[:-1]
