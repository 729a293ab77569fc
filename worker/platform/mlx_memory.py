"""MLX's memory in this process: how much it holds, its limits, and MLX's errors: of memory, compiler and GPU."""

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import psutil

from worker.errors import BrigadeError, ConfigError, OutOfMemory

_LEAST_CACHE = 64 << 20  # buffers that a step frees and the next one takes again
_MOST_CACHE = 2 << 30  # as many as the chunks of a long prompt need; Metal keeps all of them wired
# MLX has no exception type for a lack of memory: its texts tell
_SIZE = re.compile(r"(?:Unable|Attempting) to allocate (\d+) bytes")
_LIMIT = re.compile(r"maximum allowed buffer size of (\d+) bytes")
_SIGNS = ("MemoryError", "out of memory", "OutOfMemory", "Insufficient Memory", "bad_alloc")
_COMPILE_SIGNS = ("[Compile::eval_cpu]", "filesystem error")
_IGNORED = "SubmissionsIgnored"  # Metal's code for work of a process that caused too many errors


class MemoryHeld(NamedTuple):
    """Bytes."""

    active: int
    cached: int  # freed, and kept for the next arrays
    peak: int  # the most active bytes since the last `forget_peak`


class MemoryLimits(NamedTuple):
    """Bytes. `wired` is what Metal keeps from being paged out; 0 without Metal."""

    memory: int
    cache: int
    wired: int


def memory_held() -> MemoryHeld:
    """Return MLX's memory use now. Any thread may call it."""
    active, peak = mx.get_active_memory(), mx.get_peak_memory()  # before `earlier`, which takes it over
    return MemoryHeld(active, mx.get_cache_memory(), max(active, peak, _Peak.earlier))


class _Peak:
    earlier = 0  # bytes: between the latest `forget_peak` and the latest `begin_step_peak`


def forget_peak() -> None:
    """Reset the peak."""
    _Peak.earlier = 0
    mx.reset_peak_memory()


def begin_step_peak() -> int:
    """Have MLX's peak be that of a step from now on, and return the active bytes.

    `memory_held` still knows the peak before it.
    """
    _Peak.earlier = max(_Peak.earlier, mx.get_peak_memory())
    mx.reset_peak_memory()
    return mx.get_active_memory()


def give_back() -> None:
    """Free MLX's cached buffers and restore its default limits."""
    mx.clear_cache()
    _set(_usual_limits())
    if sys.platform == "linux":  # glibc keeps what is freed below what is still used; other libraries lack the call
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def keep_within(memory_bytes: int, weight_bytes: int) -> None:
    """Hold `weight_bytes` of weights and the caches in `memory_bytes`; 0 limits only the buffers that MLX keeps.

    Beyond the limit MLX frees cached buffers and waits for running computations before it allocates; it refuses
    nothing. On Apple silicon Metal may wire all of it: a shard paged out between steps would stall the chain.
    """
    device, usual = mx.device_info(), _usual_limits()
    if not memory_bytes:
        _set(usual._replace(cache=min(_MOST_CACHE, usual.cache), wired=_most_wired(device)))
        return
    most = int(device.get("memory_size", 0)) or max(psutil.virtual_memory().total, usual.memory)  # a card's, or a CPU's
    limits = limits_of(memory_bytes, weight_bytes, device, most)
    _set(limits._replace(cache=min(limits.cache, usual.cache)))


def limits_of(memory_bytes: int, weight_bytes: int, device: dict[str, str | int], most: int) -> MemoryLimits:
    """Return the limits for `keep_within`; Metal refuses to wire more than it recommends.

    The plan comes from another machine, so the memory counts as at least the weights and at most `most`.
    """
    memory = max(weight_bytes, min(memory_bytes, most))
    cache = min(_MOST_CACHE, max(_LEAST_CACHE, memory - weight_bytes))
    return MemoryLimits(memory, cache, min(memory, _most_wired(device)))


def _most_wired(device: dict[str, str | int]) -> int:
    return int(device.get("max_recommended_working_set_size", 0))


def _set(limits: MemoryLimits) -> None:
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if _most_wired(mx.device_info()):
        mx.set_wired_limit(limits.wired)


@cache
def _usual_limits() -> MemoryLimits:
    """Return MLX's own limits, read before any is set; on a CPU it caches next to nothing."""
    cached = mx.set_cache_limit(0)
    mx.set_cache_limit(cached)
    return MemoryLimits(int(mx.get_memory_limit()), int(cached), 0)


def out_of_memory(text: str, doing: str) -> OutOfMemory | None:
    """Return the OutOfMemory error for an MLX error text, or None if it is about something else."""
    size, limit = _SIZE.search(text), _LIMIT.search(text)
    if not size and not any(sign in text for sign in _SIGNS):
        return None
    wanted = f"could not get {_gib(size[1])}" if size else "the device does not say how much was missing"
    most = f" at once, the limit is {_gib(limit[1])}" if limit else ""
    return OutOfMemory(
        f"out of memory {doing}: {wanted}{most}; "
        "give this node fewer layers, or ask for less context, shorter prompt chunks or fewer requests at once"
    )


def not_compiled(text: str) -> ConfigError | None:
    """Return the error for an MLX text about code that it could not compile for a CPU, or None for another text."""
    if not any(sign in text for sign in _COMPILE_SIGNS):
        return None
    *_, last = [line for line in text.splitlines() if "error:" in line] or [text]
    return ConfigError(
        f"MLX could not compile for this CPU: {last.rpartition('output is: ')[2]}; free space in the folder of TMPDIR "
        "(else /tmp), set TMPDIR to another one, or remove the C++ compiler, without which MLX works, too"
    )


@contextmanager
def mlx_errors_named(doing: str) -> Iterator[None]:
    """Turn MLX's errors about memory into OutOfMemory, those about its compiler into ConfigError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        _end_if_ignored(error)
        if (named := not_compiled(str(error)) or out_of_memory(f"{error!r}", doing)) is None:
            raise
        raise named from error


def _end_if_ignored(error: BaseException) -> None:
    """End this process if macOS ignores all of its work on the GPU from now on: only another process can go on.

    A worker is started again by what started it, and its chain recovers as from any other that has ended.
    """
    if _IGNORED in str(error):
        print("error: macOS ignores this process after errors of the GPU: start it again", file=sys.stderr, flush=True)
        os._exit(BrigadeError.exit_code)


def raise_late_errors(*, waits: bool) -> None:
    """Raise what Metal found wrong with arrays that MLX has evaluated without an error.

    One evaluation may take several command buffers. MLX 0.32 reports those before the last only once more work is begun
    or waited for (https://github.com/ml-explore/mlx/pull/4174); what they should have computed is wrong.

    Args:
        waits: whether to wait for all work that was begun, or to begin a little, which tells what is known by now.
    """
    if not mx.metal.is_available():
        return
    if waits:
        mx.synchronize()
    else:
        mx.async_eval(mx.array(0) + 1)


def _gib(num_bytes: str) -> str:
    return f"{int(num_bytes) / 2**30:.2f} GiB"
