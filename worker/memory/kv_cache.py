"""The keys and values of one layer for one slot, which may share their buffers with those of other slots.

At each step they are cut to the window's base, then the window is appended. A cut changes only a length. mlx-lm's
layers use `offset` and `update_and_fetch` as with its own caches.
Shapes: B slots, S slots of a buffer, H heads, L window length, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from worker.errors import CacheMismatch
from worker.model.cache_spec import (
    ROW_BLOCK,
    CacheSpec,
    Form,
    group_size,
    pack_capacity,
    whole_blocks,
)

Mask = mx.array | str | None
Parts = tuple[mx.array, ...]  # stored rows: one array, or quantised values, scales and biases
BufferRows = Callable[[int, int], mx.array]  # (H, capacity) -> indices [B, H, L] of new rows in a flattened buffer


@lru_cache(maxsize=256)
def row_sights(num_rows: int, num_canvas: int, grid: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows of a window see which: canvas rows, the last `num_canvas`, see all rows.

    Other rows see to the end of their block of `grid` rows; the window begins at the start of a block.

    Returns:
        For each row [L] the last row of the window that it sees, and the row whose sliding window applies to it: that
        of the first canvas row to all canvas rows.
    """
    rows = np.arange(num_rows, dtype=np.int32)
    first = num_rows - num_canvas
    last = np.minimum(rows // grid * grid + grid, first) - 1
    return np.where(rows < first, last, num_rows - 1).astype(np.int32), np.minimum(rows, first).astype(np.int32)


class KVCache:
    """Keys and values of all tokens or, with a `window`, of those that later queries can see. Rows beyond are stale.

    With a `window` a query sees the first `keep` tokens and the last `window` ones, itself included. Rows that no later
    query can see are dropped, several at a time.
    """

    form = Form.WHOLE
    step = ROW_BLOCK

    def __init__(self, window: int | None = None, keep: int = 0) -> None:
        self.can_be_packed = CacheSpec(self.form, window, keep).can_be_packed
        self.length = 0
        self.window = window
        self.keep = keep
        self.dropped = 0  # number of dropped tokens, which followed the first `keep`
        self._positions: mx.array | None = None
        self._num_canvas = 0  # trailing rows of the present window that see all rows
        self._grid = 1  # other rows see to the end of their block of `_grid` rows
        self._keys, self._values = Rows(), Rows()
        self._slot = 0  # its index in these buffers, which other slots' caches may share

    def _encode(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        return (keys,), (values,)

    @property
    def offset(self) -> int | mx.array:
        """The next row's position for RoPE, or every row's position in a reordered window."""
        return self.length if self._positions is None else self._positions

    @property
    def nbytes(self) -> int:
        """The bytes of its part of the buffers."""
        return sum(rows.nbytes // rows.num_slots for rows in (self._keys, self._values))

    @property
    def capacity(self) -> int:
        """The capacity of the present buffers, in rows."""
        return self._keys.capacity

    def arrays(self) -> list[mx.array]:
        return [*self._keys.parts, *self._values.parts]

    @property
    def has_room(self) -> bool:
        """Whether one more row fits into the present buffers without dropping any."""
        return self.length - self.dropped < self._room(1)

    def saved(self) -> tuple[Any, ...]:
        """Return everything that a pass changes, for `restore`. Shares the arrays, so MLX cannot write in place."""
        rows = self._keys, self._values
        return self.length, self.dropped, self._positions, self._slot, rows, [(r.parts, r.nbytes) for r in rows]

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Restore the state that `saved` returned."""
        self.length, self.dropped, self._positions, self._slot, (self._keys, self._values), before = saved
        for rows, (parts, nbytes) in zip((self._keys, self._values), before, strict=True):
            rows.parts, rows.nbytes = parts, nbytes

    def close(self) -> None:
        """Release its buffers."""
        self._keys, self._values, self._slot = Rows(), Rows(), 0

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens. Raises CacheMismatch if rows that later queries see are missing."""
        if length <= self.keep:
            self.dropped = 0  # all dropped rows are beyond the new length
        if length > self.length or (self.dropped and self._first_seen(length) < self.keep + self.dropped):
            held = f"{self.length} less [{self.keep}, {self.keep + self.dropped})"
            raise CacheMismatch(f"cannot cut the cache to {length} tokens: it holds {held}")
        self.length = length

    def reserve(
        self, num_rows: int, positions: mx.array | None, *, has_drafts: bool = False, num_canvas: int = 0, grid: int = 1
    ) -> None:
        """Make room for a window of `num_rows` rows. `positions` [L] is None if they count up."""
        self._positions, self._num_canvas, self._grid = positions, num_canvas, grid
        held = self.length - self.dropped
        if held + num_rows <= self._room(num_rows):
            return
        least = max(num_rows, self.step) if self.window else num_rows  # amortise the copy of a full sliding window
        self._move(self._capacity_for(held - self._num_unseen + least), self._num_unseen)

    def move_out(self) -> None:
        """Move its rows out of shared buffers."""
        self._move(self.capacity)

    def fork(self, length: int) -> KVCache:
        """Return a cache with a copy of the first `length` tokens. Raises CacheMismatch as `cut` does."""
        other = copy(self)
        other.cut(length)
        other._move(self._capacity_for(length - other.dropped))
        return other

    @property
    def is_tight(self) -> bool:
        """Whether a fork would take as much memory."""
        return self._capacity_for(self.length - self.dropped) >= self.capacity

    def snapshot(self) -> KVCache | None:
        """Return a copy from which to fork after rows were dropped here; None if none are ever dropped."""
        if self.window is None:
            return None
        other = copy(self)
        other._move(self.length - self.dropped - self._num_unseen, self._num_unseen)
        return other

    def drop_unseen(self) -> None:
        """Drop all rows that no later query can see."""
        self._move(self._capacity_for(self.length - self.dropped - self._num_unseen), self._num_unseen)

    def segment(self, begin: int, end: int) -> tuple[Parts, Parts]:
        """Return the keys and values of tokens [begin, end) of a cache without dropped rows."""
        assert not self.dropped
        return self._parts(begin, end)

    def whole(self) -> tuple[Parts, Parts]:
        """Return all keys and values that are held, for `put_whole`."""
        return self._parts(0, self.length - self.dropped)

    def _parts(self, begin: int, end: int) -> tuple[Parts, Parts]:
        keys, values = (
            tuple(part[self._slot : self._slot + 1, :, begin:end] for part in rows.parts)
            for rows in (self._keys, self._values)
        )
        return keys, values

    def put_segment(self, begin: int, keys: Parts, values: Parts) -> None:
        """Overwrite keys and values [1, H, L, ...] from token `begin` on.

        Raises CacheMismatch unless the cache has those tokens.
        """
        end = begin + keys[0].shape[2]
        if self.dropped or end > self.length:
            raise CacheMismatch(f"expected rows of the {self.length} tokens held, got [{begin}, {end})")
        self._keys.write(keys, self._slot, begin)
        self._values.write(values, self._slot, begin)

    def put_whole(self, length: int, dropped: int, keys: Parts, values: Parts) -> None:
        """Take the place of a snapshot of `length` tokens, of which `dropped` are not among its keys and values."""
        held = length - dropped
        if not {part.shape[2] for part in (*keys, *values)} <= {held}:
            found = f"got {[list(part.shape) for part in (*keys, *values)]}"
            raise CacheMismatch(f"expected {held} rows of a snapshot of {length} tokens, {found}")
        self.length, self.dropped, self._slot = length, dropped, 0
        self._keys, self._values = Rows(1, held), Rows(1, held)
        self._keys._set(keys)
        self._values._set(values)

    def _capacity_for(self, num_rows: int) -> int:
        return pack_capacity(num_rows) if self.can_be_packed else whole_blocks(num_rows, self.step)

    def _move(self, capacity: int, num_dropped: int = 0) -> None:
        """Copy the rows, except `num_dropped` after the first `keep`, to new buffers."""
        held = self.length - self.dropped
        spans = [(0, self.keep), (self.keep + num_dropped, held)] if num_dropped else [(0, held)]
        self._keys, self._values = (rows.moved(self._slot, spans, capacity) for rows in (self._keys, self._values))
        self.dropped += num_dropped
        self._slot = 0

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Return the mask of held and new rows for a window that will be appended; called by mlx-lm's models.

        Args:
            return_array: return an array, never "causal".
            window_size: the window of a layer that sees less than its cache holds.
        """
        held = self.length - self.dropped
        windows = [size for size in (self.window, window_size) if size is not None]
        slides = self.dropped or any(held + num_rows > size + self.keep for size in windows)
        if not slides and (num_rows == 1 or (self._num_canvas == num_rows and not return_array)):
            return None
        is_causal = not self._num_canvas and self._grid == 1
        if is_causal and not (slides or return_array) and (window_size is None or self.window is not None):
            return "causal"
        last, back = map(mx.array, row_sights(num_rows, self._num_canvas, self._grid))
        rows = mx.arange(held + num_rows)
        old = mx.where(rows[:held] < self.keep, rows[:held], rows[:held] + self.dropped)
        new = mx.arange(self.length, self.length + num_rows) if self._positions is None else self._positions
        positions = mx.concatenate([old, new])[None]
        in_sight = rows[None] <= held + last[:, None]
        for size in windows:
            in_sight &= (positions > new[back][:, None] - size) | (positions < self.keep)
        return in_sight

    def settle(self, length: int) -> None:
        """Set the length, after a pass. The cache of a stub layer grows only here."""
        self.length = length

    @property
    def keys(self) -> mx.array:
        """The buffer, for models that add a dependency on another array to it."""
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

    start_position = 0  # read by llama4, whose own caches drop rows

    def maybe_trim_front(self) -> None:
        """Do nothing; called by llama4."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array | Parts, mx.array | Parts]:
        """Append [1, H, L, K] and return all keys and values held."""
        self.append(keys, values)
        return self.fetch()

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append [1, H, L, K]."""
        here = self.length - self.dropped
        for rows, parts in zip((self._keys, self._values), self._encode(keys, values), strict=True):
            rows.write(parts, self._slot, here)
        self.length += keys.shape[2]

    def fetch(self) -> tuple[mx.array | Parts, mx.array | Parts]:
        """Return the keys and values [1, H, length, K] that are held."""
        end = self.length - self.dropped
        return self._keys.read(self._slot, end), self._values.read(self._slot, end)

    def _room(self, num_rows: int) -> int:
        """Return the most rows to hold for a window of `num_rows`; excess rows of an earlier long chunk are dropped."""
        if self.window is None:
            return self._keys.capacity
        needed = whole_blocks(self.keep + self.window - 1 + max(num_rows, self.step), self.step)
        return min(self._keys.capacity, needed)

    @property
    def _num_unseen(self) -> int:
        """The rows after the first `keep` that no later query can see."""
        return max(0, self._first_seen(self.length) - self.keep - self.dropped)

    def _first_seen(self, position: int) -> int:
        """Return the first position, apart from the first `keep`, that the query at `position` sees."""
        return max(self.keep, position - self.window + 1) if self.window else self.keep


class QuantisedCache(KVCache):
    """Quantised keys and values, with a scale and a bias per group, as mlx-lm's attention expects them."""

    form = Form.QUANTISED

    def __init__(self, bits: int, window: int | None = None) -> None:
        super().__init__(window)
        self.bits = bits

    def _encode(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        size = group_size(keys.shape[-1], values.shape[-1])
        return tuple(mx.quantize(keys, size, self.bits)), tuple(mx.quantize(values, size, self.bits))

    @property
    def group_size(self) -> int:
        """How many numbers share a scale; read by mlx-lm's attention once there are rows."""
        packed, scales, _ = self._values.parts
        head_size = packed.shape[-1] * (32 // self.bits)
        return head_size // scales.shape[-1]


class Rows:
    """A buffer of rows [S, H, capacity, K] for S slots."""

    def __init__(self, num_slots: int = 1, capacity: int = 0) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self.parts: Parts = ()
        self.nbytes = 0

    def read(self, slot: int, end: int) -> mx.array | Parts:
        """Return the first `end` rows of a slot in the form that attention takes."""
        found = tuple(part[slot : slot + 1, :, :end] for part in self.parts)
        return found if len(found) > 1 else found[0]

    def read_slots(self, first: int, num_slots: int, end: int) -> mx.array:
        """Return the first `end` rows of consecutive slots."""
        return self.parts[0][first : first + num_slots, :, :end]

    def write(self, rows: Parts, slot: int, begin: int) -> None:
        """Write rows of a slot: parts [1, H, L, ...]."""
        self._allocate(rows)
        self.parts = tuple(map(copy, self.parts))  # new array objects, since `saved` may refer to the old ones
        for part, new in zip(self.parts, rows, strict=True):
            part[slot : slot + 1, :, begin : begin + new.shape[2]] = new

    def write_rows(self, new: mx.array, find_rows: BufferRows) -> None:
        """Write [B, H, L, K] of several slots to the rows with these indices."""
        self._allocate((new,))
        shape = self.parts[0].shape
        every = self.parts[0].reshape(-1, shape[-1])
        every[find_rows(shape[1], self.capacity)] = new
        self.parts = (every.reshape(shape),)

    def _allocate(self, like: Parts) -> None:
        """Create the buffers for rows of this form, unless they exist."""
        if not self.parts:
            self._set(mx.zeros((self.num_slots, p.shape[1], self.capacity, p.shape[3]), p.dtype) for p in like)

    def _set(self, parts: Iterable[mx.array]) -> None:
        self.parts = tuple(parts)
        self.nbytes = sum(part.nbytes for part in self.parts)

    def moved(self, slot: int, spans: Sequence[tuple[int, int]], capacity: int) -> Rows:
        """Return a buffer with a copy of these spans of a slot's rows, concatenated."""
        other = type(self)(1, capacity)
        unused = capacity - sum(end - begin for begin, end in spans)

        def copied(part: mx.array) -> mx.array:
            empty = mx.zeros((1, part.shape[1], unused, part.shape[3]), part.dtype)
            return mx.concatenate([*(part[slot : slot + 1, :, begin:end] for begin, end in spans), empty], axis=2)

        other._set(map(copied, self.parts))
        return other

    @staticmethod
    def joined(members: Sequence[tuple[Rows, int, int]], capacity: int) -> Rows:
        """Return a buffer for several slots; `members` are (rows, slot, number of rows to copy)."""
        joined = Rows(len(members), capacity)
        like = next((rows.parts[0] for rows, *_ in members if rows.parts), None)
        if like is not None:
            buffer = mx.zeros((len(members), like.shape[1], capacity, like.shape[3]), like.dtype)
            for number, (rows, slot, held) in enumerate(members):
                if rows.parts:
                    buffer[number : number + 1, :, :held] = rows.read_slots(slot, 1, held)
            joined._set([buffer])
        return joined


def join(caches: Sequence[KVCache], capacity: int) -> None:
    """Move the rows of several slots' caches of one layer to common buffers, in this order."""
    keys = Rows.joined([(cache._keys, cache._slot, cache.length) for cache in caches], capacity)
    values = Rows.joined([(cache._values, cache._slot, cache.length) for cache in caches], capacity)
    for slot, cache in enumerate(caches):
        cache._keys, cache._values, cache._slot = keys, values, slot


def append_together(caches: Sequence[KVCache], keys: mx.array, values: mx.array, find_rows: BufferRows) -> None:
    """Append [B, H, L, K] to caches that share buffers, at the rows with these indices."""
    caches[0]._keys.write_rows(keys, find_rows)
    caches[0]._values.write_rows(values, find_rows)
    for cache in caches:
        cache.length += keys.shape[2]


def fetch_together(caches: Sequence[KVCache], end: int) -> tuple[mx.array, mx.array]:
    """Return the first `end` rows [B, H, end, K] of adjacent caches that share buffers, padded with stale rows."""
    first, B = caches[0]._slot, len(caches)
    return caches[0]._keys.read_slots(first, B, end), caches[0]._values.read_slots(first, B, end)


def wait_for(caches: Sequence[KVCache], results: Sequence[mx.array]) -> None:
    """Make later writes to these caches' buffers wait until the results are computed.

    Until then the results refer to the buffers that they are computed from, and MLX would copy these before a write.
    """
    for rows in {id(rows): rows for cache in caches for rows in (cache._keys, cache._values) if rows.parts}.values():
        rows.parts = tuple(mx.depends(list(rows.parts), list(results)))


def is_sparse(num_slots: int, num_used: int) -> bool:
    """Return whether a buffer for several slots should be copied to a smaller one: over a quarter is unused."""
    return 4 * (num_slots - num_used) > num_slots
