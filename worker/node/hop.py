"""Hop: a frame's header and array as messages, and back. Runs on the MLX thread; each side copies the array once."""

import time
from collections.abc import Sequence

import mlx.core as mx

from protos.brigade_pb2 import DType, Frame
from worker.compute.placeholder import MLX_DTYPES, Placeholder
from worker.errors import FrameError
from worker.node.parts import PLAIN, Wire, checksum_seed, cut, write_part

_ENUMS = {dtype: enum for enum, dtype in MLX_DTYPES.items()}


def put(header: Frame, array: mx.array | None, wire: Wire = PLAIN) -> list[bytes]:
    """The messages that carry a frame; closes its last timing, since nothing may change the header from then on."""
    payload = memoryview(b"")
    if array is not None:
        header.hidden.dtype = _dtype(array)
        header.hidden.shape.extend(array.shape)
        payload = _bytes_of(array)
    first, *others = cut(payload, wire.part_bytes)
    seed, first_seed = (checksum_seed(n, header.step) if wire.has_checksums else None for n in (1, 0))
    rest = [write_part(number, b"", data, seed) for number, data in enumerate(others, start=1)]
    header.timings[-1].sent = time.monotonic_ns()
    return [write_part(0, header.SerializeToString(), first, first_seed), *rest]


def take(header: Frame, payload: Sequence[memoryview]) -> mx.array | None:
    """The array of a frame that has arrived; None if it has none."""
    if header.hidden.dtype not in MLX_DTYPES:
        return None
    found = Placeholder(header.hidden.shape, MLX_DTYPES[header.hidden.dtype])
    found.fill(payload)
    return found.array


def _dtype(array: mx.array) -> DType:
    if array.dtype not in _ENUMS:
        raise FrameError(f"hidden states of dtype {array.dtype} do not travel; expected float32, float16 or bfloat16")
    return _ENUMS[array.dtype]


def _bytes_of(array: mx.array) -> memoryview:
    """The array's own memory, or that of a copy where its rows do not lie end to end."""
    view = memoryview(array)  # type: ignore[arg-type]
    if not view.c_contiguous:
        view = memoryview(mx.contiguous(array))  # type: ignore[arg-type]
    return view.cast("B")
