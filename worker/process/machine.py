"""What this machine offers. The only module that knows of macOS."""

import platform

import mlx.core as mx
import psutil

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


def keep_resident() -> None:
    """On Apple silicon, let Metal wire what is loaded: a shard paged out between steps would stall the chain."""
    if working_set := mx.device_info().get("max_recommended_working_set_size"):
        mx.set_wired_limit(int(working_set))


def machine_name() -> str:
    """One line for tables: processor, cores, memory, system."""
    device = str(mx.device_info().get("device_name", platform.processor()))
    memory = psutil.virtual_memory().total / 2**30
    return f"{device}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"
