"""What this machine offers. But for the folder `mac`, the only module that knows of macOS."""

import contextlib
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import psutil

_ASLEEP = {  # a clock that goes on while the machine sleeps, and one that does not
    "Darwin": ("CLOCK_MONOTONIC", "CLOCK_UPTIME_RAW"),
    "Linux": ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"),
}
_HEADROOM = 0.9  # leave a tenth to the system


def memory_budget() -> int:
    """Bytes that weights and caches may take here, those that this process holds already included.

    On Apple silicon it follows Metal's recommended working set, what the GPU may wire down whatever the system caches;
    elsewhere it follows what is free.
    """
    held = mx.get_active_memory() + mx.get_cache_memory()
    return budget_from(mx.device_info(), psutil.virtual_memory().available + held)


def budget_from(device: dict[str, str | int], available: int) -> int:
    """The rule of `memory_budget` on plain numbers."""
    return int(_HEADROOM * int(device.get("max_recommended_working_set_size") or available))


def multiplies_experts(dtype: mx.Dtype) -> bool:
    """Whether MLX multiplies gathered matrices of this dtype here: on a CPU it does in float32 only."""
    return dtype == mx.float32 or mx.default_device().type == mx.gpu


def allow_connections(count: int) -> None:
    """Let this process open so many beside its files: macOS allows it 256 descriptors unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count if hard == resource.RLIM_INFINITY else min(2 * count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def machine_name() -> str:
    """One line for tables: processor, cores, memory, system."""
    device = str(mx.device_info().get("device_name", platform.processor()))
    memory = psutil.virtual_memory().total / 2**30
    return f"{device}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"


def asleep_s() -> float:
    """Seconds that this machine has slept since it was started, whatever becomes of the time of day."""
    return asleep_by(platform.system(), lambda name: time.clock_gettime(getattr(time, name)))


def asleep_by(system: str, read: Callable[[str], float]) -> float:
    """The rule of `asleep_s`: `read` tells a clock's seconds by its name. Where nothing is known of clocks it is 0."""
    if system not in _ASLEEP:
        return 0.0
    goes_on, stands_still = _ASLEEP[system]
    return read(goes_on) - read(stands_still)


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """Keep the machine from falling asleep by itself, where that is up to us; a lid that closes is not."""
    command = awake_command(platform.system(), os.getpid())
    with contextlib.ExitStack() as stack:
        if command:
            with contextlib.suppress(OSError):  # it serves awake or not
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
                stack.callback(child.wait)
                stack.callback(child.terminate)
        yield


def awake_command(system: str, pid: int) -> list[str]:
    """What keeps a machine awake for as long as the process `pid` lives; nothing where there is no need."""
    return ["caffeinate", "-i", "-w", str(pid)] if system == "Darwin" else []
