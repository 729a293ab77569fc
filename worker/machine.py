"""What this machine offers. The only module that knows of macOS."""

import platform

import mlx.core as mx
import psutil

_HEADROOM = 0.9  # leave a tenth to the system


def memory_budget() -> int:
    """Bytes that weights and caches may take here.

    On Apple silicon Metal's recommended working set, which counts what the GPU may wire down; elsewhere what is free.
    """
    return budget_from(mx.device_info(), psutil.virtual_memory().available)


def budget_from(device: dict[str, str | int], available: int) -> int:
    """The rule of `memory_budget` on plain numbers."""
    working_set = device.get("max_recommended_working_set_size")
    return int(_HEADROOM * (min(int(working_set), available) if working_set else available))


def machine_name() -> str:
    """One line for tables: processor, cores, memory, system."""
    device = str(mx.device_info().get("device_name", platform.processor()))
    memory = psutil.virtual_memory().total / 2**30
    return f"{device}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"
