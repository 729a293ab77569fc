"""This machine: memory budget, what MLX can compute here, limit of open files, name, processes, and sleep."""

import asyncio
import contextlib
import gc
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import NoReturn

import mlx.core as mx
import psutil

from worker.errors import StageLost

_ASLEEP = {  # a clock that also runs while the machine sleeps, and one that does not
    "Darwin": ("CLOCK_MONOTONIC", "CLOCK_UPTIME_RAW"),
    "Linux": ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"),
}
LOOK_EVERY_S = 1.0
_SLEEP_COUNTS_S = 5.0  # peers need not notice a shorter sleep
_HEADROOM = 0.9  # leave a tenth to the system


def memory_budget() -> int:
    """Return the bytes that weights and caches may take in this process, including what it already holds.

    On Apple silicon the budget follows Metal's recommended working set, which the GPU can wire even where the system
    caches files; elsewhere it follows the free memory.
    """
    held = mx.get_active_memory() + mx.get_cache_memory()
    return budget_from(mx.device_info(), psutil.virtual_memory().available + held)


def budget_from(device: dict[str, str | int], available: int) -> int:
    """Return the budget in bytes, given MLX's description of the device and the available bytes."""
    return int(_HEADROOM * int(device.get("max_recommended_working_set_size") or available))


def multiplies_experts(dtype: mx.Dtype) -> bool:
    """Return whether MLX can multiply gathered matrices of this dtype here; on a CPU only float32."""
    return dtype == mx.float32 or mx.default_device().type == mx.gpu


@cache
def attends_quantised() -> bool:
    """Return whether MLX can multiply a prompt's rows by quantised keys and values here; some CUDA versions cannot."""
    rows = mx.zeros((1, 1, 2, 64, 64), mx.bfloat16)  # [B, H, heads of a group, L, K]
    quantised = mx.quantize(rows[:, :, 0], bits=8)
    try:
        mx.eval([mx.quantized_matmul(rows, *quantised, transpose=is_key, bits=8) for is_key in (True, False)])
    except RuntimeError:
        return False
    return True


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files, which is 256 on macOS, so that it can hold `count` connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count if hard == resource.RLIM_INFINITY else min(2 * count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@cache
def freeze_heap() -> None:
    """Exclude all objects that exist now from garbage collection, once until `thaw_heap`.

    Reference counts still free them. A full collection on a loaded node takes a fifth of a second, during which no
    thread runs Python.
    """
    gc.collect()
    gc.freeze()


def thaw_heap() -> None:
    """Free all objects to which nothing leads any more; a cluster and its chain, say, refer to each other."""
    freeze_heap.cache_clear()
    gc.unfreeze()
    gc.collect()


def machine_name() -> str:
    """Return processor, cores, memory and system as one line."""
    device = str(mx.device_info().get("device_name", platform.processor()))
    memory = psutil.virtual_memory().total / 2**30
    return f"{device}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"


def older_twin() -> psutil.Process | None:
    """Return a process of this user that was started before this one with the same arguments, or None."""
    began = psutil.Process().create_time()
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or may not be looked at
            is_same = other.cmdline()[1:] == sys.orig_argv[1:] and other.uids().real == os.getuid()
            if is_same and other.create_time() < began:
                return other
    return None


def is_overloaded() -> bool:
    """Return whether more threads than CPUs were ready to run, on average of the last minute."""
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def asleep_s() -> float:
    """Return the seconds that this machine has slept since it booted, independent of changes to its date."""
    return asleep_by(platform.system(), lambda name: time.clock_gettime(getattr(time, name)))


def asleep_by(system: str, read: Callable[[str], float]) -> float:
    """Return `asleep_s` for a system, with `read` returning a clock's seconds by its name; 0 for an unknown system."""
    if system not in _ASLEEP:
        return 0.0
    running, stopping = _ASLEEP[system]
    return read(running) - read(stopping)


class SleepWatch:
    """Detects sleep in successive readings of `asleep_s`. Pure."""

    def __init__(self, asleep_s: float) -> None:
        self._last_s = asleep_s

    def look(self, asleep_s: float) -> float:
        """Return the seconds slept since the last call; 0 for five seconds or less."""
        slept_s, self._last_s = asleep_s - self._last_s, asleep_s
        return slept_s if slept_s > _SLEEP_COUNTS_S else 0.0


async def wait_slept() -> NoReturn:
    """Never return; raise StageLost once the machine has slept."""
    watch = SleepWatch(asleep_s())
    while True:
        if slept_s := watch.look(asleep_s()):
            raise StageLost(f"its machine slept for {slept_s:.0f} s, so it left the chain; it may join again")
        await asyncio.sleep(LOOK_EVERY_S)


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """Keep a Mac from idle sleep; it still sleeps when its lid closes."""
    with contextlib.ExitStack() as stack:
        if command := awake_command(platform.system(), os.getpid()):
            with contextlib.suppress(OSError):  # serving matters more than staying awake
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
                stack.callback(child.wait)
                stack.callback(child.terminate)
        yield


def awake_command(system: str, pid: int) -> list[str]:
    """Return the command that keeps a machine awake while the process `pid` lives; [] if none is needed."""
    return ["caffeinate", "-i", "-w", str(pid)] if system == "Darwin" else []
