"""MLX's memory in this process: how much it holds, and its limits."""

from functools import cache
from typing import NamedTuple

import mlx.core as mx
import psutil

_LEAST_CACHE = 64 << 20  # buffers that a step frees and the next one takes again


class MemoryHeld(NamedTuple):
    """Bytes."""

    active: int
    cached: int  # freed, and kept for the next arrays
    peak: int  # the most that were active since the last `forget_peak`


class MemoryLimits(NamedTuple):
    """Bytes. `wired` is what Metal keeps from being paged out; 0 where there is no Metal."""

    memory: int
    cache: int
    wired: int


def memory_held() -> MemoryHeld:
    """Return MLX's memory use now. Any thread may call it."""
    active = mx.get_active_memory()
    return MemoryHeld(active, mx.get_cache_memory(), max(active, mx.get_peak_memory()))


def forget_peak() -> None:
    """Reset the peak."""
    mx.reset_peak_memory()


def give_back() -> None:
    """Free MLX's cached buffers and restore its default limits."""
    mx.clear_cache()
    _set(_usual_limits())


def keep_within(memory_bytes: int, weight_bytes: int) -> None:
    """Hold weights and caches in `memory_bytes`, of which the weights take so many; 0 leaves it to MLX.

    Beyond that MLX frees what it has cached, and waits for what it computes before it takes more; it refuses nothing.
    On Apple silicon Metal may wire all of it: a shard paged out between steps would stall the chain.
    """
    device, usual = mx.device_info(), _usual_limits()
    if not memory_bytes:
        _set(usual._replace(wired=_most_wired(device)))
        return
    most = int(device.get("memory_size", 0)) or max(psutil.virtual_memory().total, usual.memory)  # a card's, or a CPU's
    limits = limits_of(memory_bytes, weight_bytes, device, most)
    _set(limits._replace(cache=min(limits.cache, usual.cache)))


def limits_of(memory_bytes: int, weight_bytes: int, device: dict[str, str | int], most: int) -> MemoryLimits:
    """The rule of `keep_within` on plain numbers; Metal refuses to wire more than it recommends.

    The plan is another machine's: less than the weights is no limit to keep to, nor is more than `most`, which is all.
    """
    memory = max(weight_bytes, min(memory_bytes, most))
    return MemoryLimits(memory, max(_LEAST_CACHE, memory - weight_bytes), min(memory, _most_wired(device)))


def _most_wired(device: dict[str, str | int]) -> int:
    return int(device.get("max_recommended_working_set_size", 0))


def _set(limits: MemoryLimits) -> None:
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if _most_wired(mx.device_info()):
        mx.set_wired_limit(limits.wired)


@cache
def _usual_limits() -> MemoryLimits:
    """MLX's own, as they are before any is set: on a CPU it keeps next to nothing."""
    cached = mx.set_cache_limit(0)
    mx.set_cache_limit(cached)
    return MemoryLimits(int(mx.get_memory_limit()), int(cached), 0)
