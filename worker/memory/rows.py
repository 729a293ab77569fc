"""Rows: a growing buffer of what one layer keeps of one slot. Which row is whose token is the cache's affair."""

from collections.abc import Callable
from copy import copy

import mlx.core as mx

Parts = tuple[mx.array, ...]  # how rows are stored: as they are, or as quantised values, scales and biases


class Rows:
    """A growing buffer of rows [1, H, capacity, K], stored in the parts that `encode` makes of them."""

    def __init__(self, encode: Callable[[mx.array], Parts]) -> None:
        self.parts: Parts = ()
        self.capacity = 0
        self.nbytes = 0  # a plain number: asked for from other threads
        self._encode = encode

    def write(self, rows: mx.array, begin: int, end: int) -> None:
        encoded = self._encode(rows)
        if not self.parts:
            self.parts = tuple(mx.zeros((*p.shape[:2], self.capacity, p.shape[3]), p.dtype) for p in encoded)
            self.nbytes = sum(part.nbytes for part in self.parts)
        self.parts = tuple(_written(part, new, begin, end) for part, new in zip(self.parts, encoded, strict=True))

    def read(self, end: int) -> Parts:
        return tuple(part[:, :, :end] for part in self.parts)

    def clear(self) -> None:
        self.parts, self.capacity, self.nbytes = (), 0, 0

    def fill(self, rows: mx.array, capacity: int) -> None:
        """Hold a copy of these rows, with room for `capacity`."""
        self.parts, self.capacity = self._encode(rows), 0
        self.grow(rows.shape[2], capacity)

    def share(self, other: "Rows", held: int, step: int) -> None:
        """Hold the first `held` rows of `other`, by a copy if its buffer is larger than they need.

        MLX copies a shared buffer before it writes to it.
        """
        self.parts = tuple(mx.stop_gradient(part) for part in other.parts)  # array objects of our own, the same data
        self.capacity, self.nbytes = other.capacity, other.nbytes
        capacity = -(-held // step) * step
        if capacity < self.capacity:
            self.grow(held, capacity)

    def grow(self, held: int, capacity: int) -> None:
        """Make room for `capacity` rows in all, of which the first `held` stay."""

        def grown(part: mx.array) -> mx.array:
            B, H, _, K = part.shape
            return mx.concatenate([part[:, :, :held], mx.zeros((B, H, capacity - held, K), part.dtype)], axis=2)

        self.parts = tuple(grown(part) for part in self.parts)
        self.nbytes = sum(part.nbytes for part in self.parts)
        self.capacity = capacity

    def drop(self, begin: int, end: int, held: int) -> None:
        """Take rows [begin, end) out of the first `held`."""
        self.parts = tuple(mx.concatenate([p[:, :, :begin], p[:, :, end:held]], axis=2) for p in self.parts)


def _written(part: mx.array, new: mx.array, begin: int, end: int) -> mx.array:
    """An array object of its own: the one from before stays as it was for whoever goes back to it."""
    part = copy(part)
    part[:, :, begin:end] = new
    return part
