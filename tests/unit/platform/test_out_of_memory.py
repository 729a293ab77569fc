"""MLX's own texts of an exhausted memory, as its backends write them, and texts that are about something else."""

import pytest

from worker.errors import OutOfMemory
from worker.platform.mlx_memory import memory_errors_named, out_of_memory

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
    with pytest.raises(RuntimeError) as caught, memory_errors_named("at a step"):
        raise RuntimeError(text)
    assert type(caught.value) is RuntimeError and out_of_memory(text, "at a step") is None


@pytest.mark.parametrize("error", [RuntimeError("[malloc] Unable to allocate 5 bytes."), MemoryError()])
def test_it_is_raised_instead_of_what_mlx_raises(error: Exception) -> None:
    with pytest.raises(OutOfMemory) as caught, memory_errors_named("at a step"):
        raise error
    assert caught.value.__cause__ is error
