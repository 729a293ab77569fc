"""How much memory MLX is told that it may take."""

import subprocess
import sys
from functools import partial

import mlx.core as mx
import pytest

from tests.unit.platform.test_machine import CPU, MAC_MINI_16, NVIDIA
from worker.errors import ConfigError, OutOfMemory
from worker.platform.mlx_memory import (
    MemoryLimits,
    begin_step_peak,
    forget_peak,
    give_back,
    keep_within,
    limits_of,
    memory_held,
    mlx_errors_named,
    out_of_memory,
    raise_late_errors,
)

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
def test_limits_are_the_plans(memory: int, weights: int, device: dict[str, str | int], expected: MemoryLimits) -> None:
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


# MLX's own texts of an exhausted memory, as its backends write them, and texts that are about something else

EXHAUSTED = {
    "[malloc] Unable to allocate 17179869184 bytes.": "could not get 16.00 GiB",
    "[malloc_async] Unable to allocate 536870912 bytes.": "could not get 0.50 GiB",
    "[metal::malloc] Attempting to allocate 48736917632 bytes which is greater than the maximum allowed buffer size of "
    "30150672384 bytes.": "could not get 45.39 GiB at once, the limit is 28.08 GiB",
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)": "the device does not say how much was missing",
    "cudaMallocManaged failed: out of memory.": "the device does not say how much was missing",
    "cudaMallocAsync(&data, size, stream) failed: out of memory": "the device does not say how much was missing",
    "MemoryError('std::bad_alloc')": "the device does not say how much was missing",
}  # fmt: skip
OTHER = (
    "[Event::wait] Timed out",
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
    "cudaMallocManaged failed: an illegal memory access was encountered.",
    "[load_safetensors] Invalid json header length model.safetensors",
    "[broadcast_shapes] Shapes (1,2) and (3) cannot be broadcast.",
    "",
)


@pytest.mark.parametrize(("text", "size"), EXHAUSTED.items())
def test_an_exhausted_memory_is_one_line_that_says_what_for_and_how_much(text: str, size: str) -> None:
    error = out_of_memory(text, "at a step")
    assert error is not None and "\n" not in error.message
    assert error.message.startswith(f"out of memory at a step: {size}; ")
    assert str(error.at("mini")).startswith("worker mini: out of memory")


@pytest.mark.parametrize("text", OTHER)
def test_another_error_stays_what_it_is(text: str) -> None:
    with pytest.raises(RuntimeError) as caught, mlx_errors_named("at a step"):
        raise RuntimeError(text)
    assert type(caught.value) is RuntimeError and out_of_memory(text, "at a step") is None


@pytest.mark.parametrize("error", [RuntimeError("[malloc] Unable to allocate 5 bytes."), MemoryError()])
def test_it_is_raised_instead_of_what_mlx_raises(error: Exception) -> None:
    with pytest.raises(OutOfMemory) as caught, mlx_errors_named("at a step"):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "[Compile::eval_cpu] Failed to compile function CV2ISigmoid_contiguous: Failed to execute command with "
            'return code 1: "g++ -O3 /tmp/a.cpp 2>&1", the output is: /tmp/a.cpp:1: fatal error: error closing '
            "/tmp/a.s: No space left on device\ncompilation terminated.",
            "/tmp/a.cpp:1: fatal error: error closing /tmp/a.s: No space left on device",
        ),
        ("filesystem error: temp_directory_path: No such file or directory",) * 2,
        ("filesystem error: cannot create directories: Read-only file system [/ro/mlx/0.32.4/cpu]",) * 2,
    ],
)
def test_what_mlx_could_not_compile_is_one_line_with_the_reason_and_a_fix(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught, mlx_errors_named("at a step"):
        raise RuntimeError(text)
    assert caught.value.message.startswith(f"MLX could not compile for this CPU: {why}; ")
    assert "TMPDIR" in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(("waits", "call"), [(True, "synchronize"), (False, "async_eval")])
def test_what_metal_tells_after_an_evaluation_is_raised(
    monkeypatch: pytest.MonkeyPatch, waits: bool, call: str
) -> None:
    def fail(*arrays: mx.array) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (kIOGPU...OutOfMemory).")

    raise_late_errors(waits=waits)
    monkeypatch.setattr(mx, call, fail)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with pytest.raises(OutOfMemory, match=r"^out of memory at a step: "), mlx_errors_named("at a step"):
        raise_late_errors(waits=waits)


def test_a_process_ends_whose_work_macos_ignores() -> None:
    error = (
        "[METAL] Ignored (for causing prior/excessive GPU errors) (kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
    )
    code = (
        f"from worker.platform.mlx_memory import *\nwith mlx_errors_named('at a step'): raise RuntimeError({error!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert done.stderr == "error: macOS ignores this process after errors of the GPU: start it again\n"


def test_the_peak_of_a_step_is_its_own_and_the_peak_before_it_is_still_told() -> None:
    forget_peak()
    mx.eval(large := mx.zeros(8 * MIB, dtype=mx.uint8))
    del large
    held = begin_step_peak()
    mx.eval(small := mx.zeros(MIB, dtype=mx.uint8))
    del small
    assert MIB <= mx.get_peak_memory() - held < 8 * MIB <= memory_held().peak - held
    forget_peak()
    assert memory_held().peak - memory_held().active < MIB
