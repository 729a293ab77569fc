"""Hidden states as bytes and back. Runs on the MLX thread."""

import math

import mlx.core as mx
import numpy as np

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, DType, Tensor
from worker.errors import FrameError

_DTYPES: dict[DType, mx.Dtype] = {
    DTYPE_FLOAT32: mx.float32,
    DTYPE_FLOAT16: mx.float16,
    DTYPE_BFLOAT16: mx.bfloat16,
}
_ENUMS = {dtype: enum for enum, dtype in _DTYPES.items()}


def dtype_name(dtype: DType) -> str:
    """For messages; a peer may send a number that is no dtype."""
    return DType.Name(dtype).removeprefix("DTYPE_").lower() if dtype in DType.values() else f"dtype {dtype}"


def from_array(array: mx.array) -> Tensor:
    """Evaluate an array and copy it out, once."""
    if array.dtype not in _ENUMS:
        raise FrameError(f"hidden states of dtype {array.dtype} do not travel; expected float32, float16 or bfloat16")
    data = bytes(memoryview(array.view(mx.uint8)))  # type: ignore[arg-type]
    return Tensor(dtype=_ENUMS[array.dtype], shape=array.shape, data=data)


def to_array(tensor: Tensor) -> mx.array:
    """The tensor as an array of its own dtype and shape.

    Raises:
        FrameError: the dtype is unknown, or the data is not as long as the shape says.
    """
    if tensor.dtype not in _DTYPES:
        raise FrameError(f"expected a tensor of a known dtype, got {tensor.dtype}")
    dtype = _DTYPES[tensor.dtype]
    expected = math.prod(tensor.shape) * dtype.size
    if expected != len(tensor.data):
        raise FrameError(f"expected {expected} bytes for {list(tensor.shape)}, got {len(tensor.data)}")
    return mx.array(np.frombuffer(tensor.data, np.uint8)).view(dtype).reshape(tensor.shape)
