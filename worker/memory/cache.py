"""What one layer remembers of one slot. The rule: a step cuts to its base, then appends its window.

Cutting moves a length and copies nothing. mlx-lm's layers see `offset` and `update_and_fetch`, as of its own caches.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from worker.errors import CacheMismatch
from worker.memory.rows import Parts, Rows
from worker.model.cachespec import (
    INT8,
    ROW_BLOCK,
    WHOLE,
    CacheSpec,
    Form,
    int8_group,
    whole_blocks,
)

Mask = mx.array | str | None


class Lender(Protocol):
    """Where a cache's rows are while its slot steps together with others: worker/memory/pack.py."""

    capacity: int

    @property
    def nbytes(self) -> int: ...

    def arrays(self) -> list[mx.array]: ...

    def rows_of(self, member: "KVCache") -> tuple[mx.array, mx.array]: ...

    def dissolve(self, besides: Sequence[object] = ()) -> None: ...


class LayerCache(Protocol):
    """The rule of the cache, as every kind of layer keeps it."""

    @property
    def nbytes(self) -> int: ...

    def cut(self, length: int) -> None: ...

    def reserve(self, num_rows: int, positions: mx.array | None) -> None: ...

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> Mask: ...

    def settle(self, length: int) -> None: ...

    def arrays(self) -> list[mx.array]: ...

    def changing(self) -> list[object]: ...

    @property
    def has_room(self) -> bool: ...

    def fork(self, length: int) -> "LayerCache": ...

    def close(self, besides: "Sequence[LayerCache]" = ()) -> None: ...


def _as_they_are(rows: mx.array) -> Parts:
    return (rows,)


def _in_8_bits(rows: mx.array) -> Parts:
    return tuple(mx.quantize(rows, group_size=int8_group(rows.shape[-1]), bits=8))


class KVCache:
    """Keys and values of the first `keep` tokens and of the tokens since; rows beyond the length are stale.

    With a `window` a query sees the first `keep` tokens and the `window` latest, itself included; what no later query
    can see is let go of, some at a time.
    """

    form: Form = WHOLE
    step = ROW_BLOCK
    encode = staticmethod(_as_they_are)  # a method of the cache would make a cycle of it and its rows

    def __init__(self, window: int | None = None, keep: int = 0) -> None:
        self.can_be_packed = CacheSpec(self.form, window, keep).can_be_packed
        self.length = 0
        self.window = window
        self.keep = keep
        self.dropped = 0  # tokens let go of, all right after the first `keep`
        self.pack: Lender | None = None
        self._positions: mx.array | None = None
        self._keys = Rows(self.encode)
        self._values = Rows(self.encode)

    @property
    def offset(self) -> int | mx.array:
        """For RoPE: where the next row is, or every row of a reordered window."""
        return self.length if self._positions is None else self._positions

    @property
    def nbytes(self) -> int:
        pack = self.pack  # read once: this is asked from other threads
        return pack.nbytes if pack else self._keys.nbytes + self._values.nbytes

    def arrays(self) -> list[mx.array]:
        return self.pack.arrays() if self.pack else [*self._keys.parts, *self._values.parts]

    def changing(self) -> list[object]:
        """The objects whose attributes a pass changes."""
        return [self, self._keys, self._values, *([self.pack] if self.pack else [])]

    @property
    def has_room(self) -> bool:
        """Whether one more row fits into the buffers that there are, and nothing is let go of for it."""
        if self.pack:
            return self.length < self.pack.capacity
        return self.length - self.dropped < self._keys.capacity

    def held_rows(self) -> tuple[mx.array, mx.array] | None:
        """Keys and values [1, H, length, K], wherever they are; None before the first."""
        if self.pack:
            return self.pack.rows_of(self)
        return (self._keys.read(self.length)[0], self._values.read(self.length)[0]) if self._keys.parts else None

    def lend(self, pack: Lender) -> None:
        """The rows are in `pack` from now on."""
        self.pack = pack
        for rows in (self._keys, self._values):
            rows.clear()

    def take_back(self, keys: mx.array, values: mx.array) -> None:
        """Have rows [1, H, length, K] of one's own again."""
        self.pack = None
        capacity = whole_blocks(self.length, self.step)
        self._keys.fill(keys, capacity)
        self._values.fill(values, capacity)

    def close(self, besides: Sequence[LayerCache] = ()) -> None:
        """Let go of all rows. A pack would keep them, so it is dissolved; those of `besides` are about to close too."""
        if self.pack:
            self.pack.dissolve(besides=[self, *besides])
            self.pack = None
        for rows in (self._keys, self._values):
            rows.clear()

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens. Raises CacheMismatch if not all that they can see is here."""
        if length <= self.keep:
            self.dropped = 0  # from here on nothing that was let go of is missed
        if length > self.length or (self.dropped and self._first_seen(length) < self.keep + self.dropped):
            held = f"{self.length} less [{self.keep}, {self.keep + self.dropped})"
            raise CacheMismatch(f"cannot cut the cache to {length} tokens: it holds {held}")
        self.length = length

    def reserve(self, num_rows: int, positions: mx.array | None) -> None:
        """Make room for a window of `num_rows` rows, whose `positions` [L] are given if they do not just count up."""
        if self.pack:
            self.pack.dissolve()
        self._positions = positions
        held = self.length - self.dropped
        if held + num_rows <= self._keys.capacity:
            return
        out_of_sight = max(0, self._first_seen(self.length) - self.keep - self.dropped)
        self.dropped += out_of_sight
        least = max(num_rows, self.step) if self.window else num_rows  # a full window must not be copied at every step
        for rows in (self._keys, self._values):
            if out_of_sight:
                rows.drop(self.keep, self.keep + out_of_sight, held)
            rows.grow(held - out_of_sight, whole_blocks(held - out_of_sight + least, self.step))

    def fork(self, length: int) -> "KVCache":
        """Another cache that goes on from the first `length` tokens; rows are shared until either is written to.

        Raises CacheMismatch as `cut` does.
        """
        if self.pack:
            self.pack.dissolve()
        other = type(self)(self.window, self.keep)
        other.length, other.dropped = self.length, self.dropped
        other.cut(length)
        for copied, rows in ((other._keys, self._keys), (other._values, self._values)):
            copied.share(rows, length - other.dropped, self.step)
        return other

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Which of the held rows and of the window's own each row of the window sees; asked for by mlx-lm's models.

        Args:
            return_array: not by a name, even where there is one.
            window_size: of a layer that sees less than its cache holds.
        """
        held = self.length - self.dropped
        windows = [size for size in (self.window, window_size) if size is not None]
        slides = self.dropped or any(held + num_rows > size + self.keep for size in windows)
        if not slides and num_rows == 1:
            return None
        if not slides and not return_array and (window_size is None or self.window is not None):
            return "causal"
        rows = mx.arange(held + num_rows)
        old = mx.where(rows[:held] < self.keep, rows[:held], rows[:held] + self.dropped)
        new = mx.arange(self.length, self.length + num_rows) if self._positions is None else self._positions
        positions = mx.concatenate([old, new])[None]
        in_sight = rows[None] <= rows[held:, None]
        for size in windows:
            in_sight &= (positions > new[:, None] - size) | (positions < self.keep)
        return in_sight

    def settle(self, length: int) -> None:
        """A pass is over by which there are `length` tokens. Moves what stands for a layer that is elsewhere."""
        self.length = length

    @property
    def keys(self) -> mx.array:
        """The buffer, for models that make it wait for something else."""
        return self._keys.parts[0]

    @keys.setter
    def keys(self, buffer: mx.array) -> None:
        self._keys.parts = (buffer,)

    @property
    def values(self) -> mx.array:
        return self._values.parts[0]

    @values.setter
    def values(self, buffer: mx.array) -> None:
        self._values.parts = (buffer,)

    start_position = 0  # of what is held, for models that let go of rows themselves: here nothing is

    def maybe_trim_front(self) -> None:
        """Called by such models."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array | Parts, mx.array | Parts]:
        """Append [1, H, L, K] and return everything held."""
        here = self.length - self.dropped
        end = here + keys.shape[2]
        self._keys.write(keys, here, end)
        self._values.write(values, here, end)
        self.length += keys.shape[2]
        return self._read(self._keys, end), self._read(self._values, end)

    def _first_seen(self, position: int) -> int:
        """The first position after the kept ones that the query at `position` sees."""
        return max(self.keep, position - self.window + 1) if self.window else self.keep

    def _read(self, rows: Rows, end: int) -> mx.array | Parts:
        return rows.read(end)[0]


class Int8Cache(KVCache):
    """Keys and values quantised to 8 bits, a scale and a bias per group; mlx-lm's attention reads them as they are."""

    form = INT8
    bits = 8
    encode = staticmethod(_in_8_bits)

    @property
    def group_size(self) -> int:
        """How many numbers share a scale: mlx-lm's attention asks for it once there are rows."""
        packed, scales, _ = self._values.parts
        head_size = packed.shape[-1] * (32 // self.bits)
        return head_size // scales.shape[-1]

    def _read(self, rows: Rows, end: int) -> mx.array | Parts:
        return rows.read(end)
