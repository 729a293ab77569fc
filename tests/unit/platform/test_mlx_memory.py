"""How much memory MLX is told that it may take."""

from functools import partial

import mlx.core as mx
import pytest

from tests.unit.platform.test_machine import CPU, MAC_MINI_16, NVIDIA
from worker.platform import mlx_memory
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


def test_what_is_kept_for_arrays_to_come_is_what_weights_leave_of_the_memory_but_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = cache_limit()
    usual = MemoryLimits(mx.get_memory_limit(), 1 << 40, 0)  # as on a Mac; on a CPU next to nothing is kept anyway
    monkeypatch.setattr(mlx_memory, "_usual_limits", lambda: usual)
    try:
        keep_within(300 * MIB, 100 * MIB)
        assert cache_limit() == 200 * MIB
        for memory in (100 << 30, 0):  # 0: no plan says how much
            keep_within(memory, 100 * MIB)
            assert 0 < cache_limit() <= 2 << 30
    finally:
        give_back()
        mx.set_cache_limit(before)


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
