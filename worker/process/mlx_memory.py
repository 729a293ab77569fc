"""MLX's memory in this process: what it holds, and how much it is told that it may."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import mlx.core as mx

_LEAST_CACHE = 64 << 20  # buffers that a step frees and the next one takes again


class Held(NamedTuple):
    """Bytes."""

    active: int
    cached: int  # freed, and kept for the next arrays
    peak: int  # the most that were active since the last `forget_peak`


@dataclass(frozen=True)
class Limits:
    """Bytes. `wired` is what Metal keeps from being paged out; None where there is no Metal."""

    memory: int
    cache: int
    wired: int | None


def memory_held() -> Held:
    """What it holds now; may be asked on any thread."""
    active = mx.get_active_memory()
    return Held(active, mx.get_cache_memory(), max(active, mx.get_peak_memory()))


def forget_peak() -> None:
    """From now on the peak is that of what comes."""
    mx.reset_peak_memory()


def give_back() -> None:
    """Let go of the buffers that are kept for arrays to come."""
    mx.clear_cache()


def keep_within(memory_bytes: int, weight_bytes: int) -> None:
    """Hold weights and caches in `memory_bytes`, of which the weights take so many.

    Beyond that MLX frees what it has cached, and waits for what it computes before it takes more; it refuses nothing.
    """
    limits = limits_of(memory_bytes, weight_bytes, mx.device_info())
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(min(limits.cache, _usual_cache_limit()))
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)


def keep_resident() -> None:
    """On Apple silicon, let Metal wire what is loaded: a shard paged out between steps would stall the chain."""
    if working_set := mx.device_info().get("max_recommended_working_set_size"):
        mx.set_wired_limit(int(working_set))


def limits_of(memory_bytes: int, weight_bytes: int, device: dict[str, str | int]) -> Limits:
    """The rule of `keep_within` on plain numbers; Metal refuses to wire more than it recommends."""
    working_set = int(device.get("max_recommended_working_set_size", 0))
    wired = min(memory_bytes, working_set) if working_set else None
    return Limits(memory_bytes, max(_LEAST_CACHE, memory_bytes - weight_bytes), wired)


@cache
def _usual_cache_limit() -> int:
    """MLX's own: on a CPU it keeps next to nothing."""
    usual = mx.set_cache_limit(0)
    mx.set_cache_limit(usual)
    return int(usual)
