"""How nodes reach each other: gRPC options, and tensors as raw bytes."""

import math

import grpc.aio
import mlx.core as mx
import numpy as np

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, DType, Tensor
from worker.errors import FrameError

PROTOCOL_VERSION = 1
ACCEPTED = (("brigade-accepted", "1"),)  # initial metadata of a stream that was not refused

_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_BOTH_ENDS = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),  # without it a stopped peer goes unnoticed for a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # or a second server on the port would start silently
    ("grpc.max_concurrent_streams", 16),
]
CHANNEL_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
]

_DTYPES: dict[DType, mx.Dtype] = {
    DTYPE_FLOAT32: mx.float32,
    DTYPE_FLOAT16: mx.float16,
    DTYPE_BFLOAT16: mx.bfloat16,
}
_ENUMS = {dtype: enum for enum, dtype in _DTYPES.items()}


def open_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to HOST:PORT with this project's options."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


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
