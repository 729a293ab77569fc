"""Placeholder: an input of a graph whose numbers come later. Python writes them into memory that MLX reads."""

from collections.abc import Iterable
from functools import cache
from math import prod

import mlx.core as mx
import numpy as np

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, DType

MLX_DTYPES: dict[DType, mx.Dtype] = {
    DTYPE_FLOAT32: mx.float32,
    DTYPE_FLOAT16: mx.float16,
    DTYPE_BFLOAT16: mx.bfloat16,
}


class Placeholder:
    """`array` may be built upon before it is filled, and evaluated after."""

    def __init__(self, shape: Iterable[int], dtype: mx.Dtype) -> None:
        shape = tuple(shape)
        raw = mx.array(np.empty(prod(shape) * dtype.size, np.uint8))
        self._memory = memoryview(raw)  # type: ignore[arg-type]
        self.array = raw.view(dtype).reshape(shape)

    def fill(self, pieces: Iterable[memoryview | bytes]) -> None:
        """Write all of its bytes, which come in pieces."""
        at = 0
        for piece in pieces:
            self._memory[at : at + len(piece)] = piece
            at += len(piece)

    def fill_numbers(self, numbers: Iterable[int]) -> None:
        """Write token ids, as int32."""
        self.fill([np.array(list(numbers), np.int32).tobytes()])


@cache
def can_fill_later(num_ids: int) -> bool:
    """Whether this device sees what is written after a graph was built: tried, since no platform's name tells it.

    `num_ids` is how much is tried: small arrays may lie elsewhere than large ones.
    """
    tried = Placeholder([num_ids], mx.int32)
    found = tried.array * 2 + 1
    tried.fill_numbers(range(num_ids))
    mx.async_eval(found)
    return found.tolist() == list(range(1, 2 * num_ids, 2))
