"""How much memory MLX is told that it may take."""

from functools import partial

import mlx.core as mx
import pytest

from tests.unit.platform.test_machine import CPU, MAC_MINI_16, NVIDIA
from worker.platform.mlx_memory import MemoryLimits, forget_peak, give_back, keep_within, limits_of, memory_held

MIB = 2**20
METAL = 11453251584  # what Metal recommends on that Mac


@pytest.mark.parametrize(
    ("memory", "weights", "device", "expected"),
    [
        (8 << 30, 5 << 30, MAC_MINI_16, MemoryLimits(8 << 30, 2 << 30, 8 << 30)),
        (12 << 30, 5 << 30, MAC_MINI_16, MemoryLimits(12 << 30, 2 << 30, METAL)),  # Metal would refuse to wire more
        (6 << 30, 5 << 30, MAC_MINI_16, MemoryLimits(6 << 30, 1 << 30, 6 << 30)),
        (5 << 30, 5 << 30, MAC_MINI_16, MemoryLimits(5 << 30, 64 * MIB, 5 << 30)),
        (8 << 30, 5 << 30, CPU, MemoryLimits(8 << 30, 2 << 30, 0)),
        (8 << 30, 5 << 30, NVIDIA, MemoryLimits(8 << 30, 2 << 30, 0)),
        (1, 5 << 30, MAC_MINI_16, MemoryLimits(5 << 30, 64 * MIB, 5 << 30)),  # less than the weights alone
        (2**64 - 1, 5 << 30, MAC_MINI_16, MemoryLimits(16 << 30, 2 << 30, METAL)),  # more than there is
        (2**64 - 1, 5 << 30, CPU, MemoryLimits(16 << 30, 2 << 30, 0)),
    ],
)
def test_limits_are_the_plans_and_wired_only_what_metal_wires(
    memory: int, weights: int, device: dict[str, str | int], expected: MemoryLimits
) -> None:
    assert limits_of(memory, weights, device, most=16 << 30) == expected


def test_mlx_is_told_until_what_is_held_is_given_back_or_no_plan_says_how_much() -> None:
    give_back()  # what another test of this process has been held to
    usual, usual_cache = mx.get_memory_limit(), cache_limit()
    try:
        for undo in (give_back, partial(keep_within, 0, 100 * MIB)):
            keep_within(123 * MIB, 100 * MIB)
            assert mx.get_memory_limit() == 123 * MIB and cache_limit() == min(64 * MIB, usual_cache)
            undo()
            assert (mx.get_memory_limit(), cache_limit()) == (usual, usual_cache)
        keep_within(2**64 - 1, 100 * MIB)
        assert usual <= mx.get_memory_limit() < 2**50
    finally:
        give_back()


def cache_limit() -> int:
    """MLX tells it to whoever sets another one."""
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    return limit


def test_a_forgotten_peak_is_that_of_what_comes() -> None:
    mx.eval(large := mx.zeros(8 * MIB, dtype=mx.uint8))
    before = memory_held()
    assert before.peak >= before.active >= 8 * MIB
    del large
    forget_peak()
    after = memory_held()
    assert after.active <= before.active - 8 * MIB
    assert after.active == after.peak
