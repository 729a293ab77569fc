"""What one layer remembers of one slot. The rule: a step cuts to its base, then appends its window.

Cutting moves a length and copies nothing. mlx-lm's layers see `offset` and `update_and_fetch`, as of its own caches.
"""

from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from worker.errors import CacheMismatch
from worker.families import LayerKind

Mask = mx.array | str | None


class LayerCache(Protocol):
    """The rule of the cache, as every kind of layer keeps it."""

    @property
    def nbytes(self) -> int: ...

    def cut(self, length: int) -> None: ...

    def reserve(self, num_tokens: int) -> None: ...

    def mask(self, num_tokens: int) -> Mask: ...

    def arrays(self) -> list[mx.array]: ...


def make_cache(kind: LayerKind) -> LayerCache:
    return RecurrentState() if kind.recurrent else KVCache(kind.window)


class KVCache:
    """Keys and values [1, H, capacity, K] of positions [start, length); rows beyond the length are stale.

    A sliding layer (`window` set) lets go of rows that no later query can see, a step at a time.
    """

    step = 256

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.start = 0
        self.length = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.keys, self.values) if array is not None]

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens. Raises CacheMismatch if what the next one sees of them is not all here."""
        if self._first_seen(length) < self.start or length > self.length:
            raise CacheMismatch(f"cannot cut the cache to {length} tokens: it holds [{self.start}, {self.length})")
        self.length = length

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more rows, dropping those that slid out of sight."""
        if self.keys is None or self.length - self.start + num_tokens <= self.keys.shape[2]:
            return
        first = max(self.start, self._first_seen(self.length))
        kept = slice(first - self.start, self.length - self.start)
        self.keys, self.values = (array[:, :, kept] for array in self.arrays())
        self.start = first
        self._grow(max(num_tokens, self.step))  # a full window must not be copied for every token

    def mask(self, num_tokens: int) -> Mask:
        """Who sees whom: rows [length, length + num_tokens) against [start, length + num_tokens)."""
        total = self.length - self.start + num_tokens
        if self.window is None or total <= self.window:
            return None if num_tokens == 1 else "causal"
        queries = mx.arange(total - num_tokens, total)[:, None]
        keys = mx.arange(total)[None]
        return (queries >= keys) & (queries < keys + self.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [1, H, L, K] and return everything kept, [1, H, length - start, K]."""
        if self.keys is None or self.values is None:
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
            self._grow(keys.shape[2])
        here = self.length - self.start
        end = here + keys.shape[2]
        self.keys[:, :, here:end] = keys
        self.values[:, :, here:end] = values
        self.length += keys.shape[2]
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _first_seen(self, position: int) -> int:
        """The first row that the query at `position` sees."""
        return max(0, position - self.window + 1) if self.window else 0

    def _grow(self, num_tokens: int) -> None:
        def grown(array: mx.array) -> mx.array:
            B, H, L, K = array.shape
            room = -(-(L + num_tokens) // self.step) * self.step - L
            return mx.concatenate([array, mx.zeros((B, H, room, K), array.dtype)], axis=2)

        self.keys, self.values = grown(self.keys), grown(self.values)  # type: ignore[arg-type]


class RecurrentState(ArraysCache):
    """The state of a recurrent layer: it has no rows, so it can go on or start again, but not be cut."""

    def __init__(self) -> None:
        super().__init__(size=2)
        self.length = 0

    def arrays(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def cut(self, length: int) -> None:
        """Go on at `length`, or start again at 0. Raises CacheMismatch for anything in between."""
        if length == 0:
            self.cache = [None] * len(self.cache)
        elif length != self.length:
            raise CacheMismatch(f"a recurrent layer cannot be cut to {length} tokens: its state is at {self.length}")
        self.length = length

    def reserve(self, num_tokens: int) -> None:
        pass

    def mask(self, num_tokens: int) -> Mask:
        return None

    def advance(self, num_tokens: int) -> None:
        """Called by mlx-lm's layer once it has taken `num_tokens` rows."""
        self.length += num_tokens
