"""The state of a recurrent layer: of constant size, whatever it has seen."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from worker.errors import CacheMismatch
from worker.memory.cache import LayerCache, Mask


class RecurrentState(ArraysCache):
    """The state of a recurrent layer: it has no rows, so it can go on or start again, but not be cut."""

    def __init__(self, num_arrays: int) -> None:
        super().__init__(size=num_arrays)
        self.length = 0
        self._nbytes = 0

    def arrays(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]  # type: ignore[misc]

    def changing(self) -> list[object]:
        return [self]

    has_room = True

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def cut(self, length: int) -> None:
        """Go on at `length`, or start again at 0. Raises CacheMismatch for anything in between."""
        if length == 0:
            self.cache = [None] * len(self.cache)
            self._nbytes = 0
        elif length != self.length:
            raise CacheMismatch(f"a recurrent layer cannot be cut to {length} tokens: its state is at {self.length}")
        self.length = length

    def close(self, besides: Sequence[LayerCache] = ()) -> None:
        self.cache = [None] * len(self.cache)

    def fork(self, length: int) -> "RecurrentState":
        """Another state that goes on from `length`. Raises CacheMismatch as `cut` does."""
        other = RecurrentState(len(self.cache))
        other.cache = list(self.cache)  # a layer replaces these arrays, it does not write to them
        other.length, other._nbytes = self.length, self._nbytes
        other.cut(length)
        return other

    def reserve(self, num_rows: int, positions: mx.array | None) -> None:
        pass

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        return None

    def advance(self, num_rows: int) -> None:
        """Called by some of mlx-lm's layers; `settle` counts for all of them."""

    def settle(self, length: int) -> None:
        self.length = length
        self._nbytes = sum(array.nbytes for array in self.arrays())
