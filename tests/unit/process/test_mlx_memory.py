"""How much memory MLX is told that it may take."""

import mlx.core as mx
import pytest

from tests.unit.process.test_machine import CPU, MAC_MINI_16, NVIDIA
from worker.process.mlx_memory import Limits, forget_peak, keep_within, limits_of, memory_held

MIB = 2**20
METAL = 11453251584  # what Metal recommends on that Mac


@pytest.mark.parametrize(
    ("memory", "weights", "device", "expected"),
    [
        (8 << 30, 5 << 30, MAC_MINI_16, Limits(8 << 30, 3 << 30, 8 << 30)),
        (12 << 30, 5 << 30, MAC_MINI_16, Limits(12 << 30, 7 << 30, METAL)),  # Metal would refuse to wire more
        (5 << 30, 5 << 30, MAC_MINI_16, Limits(5 << 30, 64 * MIB, 5 << 30)),
        (8 << 30, 5 << 30, CPU, Limits(8 << 30, 3 << 30, None)),
        (8 << 30, 5 << 30, NVIDIA, Limits(8 << 30, 3 << 30, None)),
    ],
)
def test_limits_are_the_plans_and_wired_only_what_metal_wires(
    memory: int, weights: int, device: dict[str, str | int], expected: Limits
) -> None:
    assert limits_of(memory, weights, device) == expected


def test_mlx_is_told() -> None:
    usual = mx.set_memory_limit(1 << 40)
    try:
        keep_within(123 * MIB, 100 * MIB)
        assert mx.set_memory_limit(usual) == 123 * MIB
    finally:
        mx.set_memory_limit(usual)


def test_a_forgotten_peak_is_that_of_what_comes() -> None:
    mx.eval(large := mx.zeros(8 * MIB, dtype=mx.uint8))
    before = memory_held()
    assert before.peak >= before.active >= 8 * MIB
    del large
    forget_peak()
    after = memory_held()
    assert after.active <= before.active - 8 * MIB
    assert after.active == after.peak
