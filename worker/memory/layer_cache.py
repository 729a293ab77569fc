"""The cache of one layer for one slot. The rule: a step cuts the cache to its base, then appends its window.

Cutting moves a length and copies nothing. mlx-lm's layers use `offset` and `update_and_fetch` as with its own caches.
Shapes: B slots, H heads, L window length, K head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from protos.brigade_pb2 import Cache
from worker.errors import CacheMismatch
from worker.model.cache_spec import (
    ROW_BLOCK,
    CacheSpec,
    Form,
    Memory,
    cache_spec,
    int8_group,
    whole_blocks,
)

Mask = mx.array | str | None
Parts = tuple[mx.array, ...]  # how rows are stored: as they are, or as quantised values, scales and biases


def make_cache(memory: Memory, cache: Cache) -> LayerCache:
    """Return an empty cache for one memory of a layer, stored in the form that the session chose."""
    spec = cache_spec(memory, cache)
    if spec.form is Form.STATE:
        return RecurrentState(memory.state_arrays)
    return (Int8Cache if spec.form is Form.INT8 else KVCache)(spec.window, spec.keep)


class KVCache:
    """Keys and values of the first `keep` tokens and of the tokens since; rows beyond the length are stale.

    With a `window` a query sees the first `keep` tokens and the `window` latest, itself included. Rows that no later
    query can see are dropped, several at a time.
    """

    form = Form.WHOLE
    step = ROW_BLOCK

    def __init__(self, window: int | None = None, keep: int = 0) -> None:
        self.can_be_packed = CacheSpec(self.form, window, keep).can_be_packed
        self.length = 0
        self.window = window
        self.keep = keep
        self.dropped = 0  # tokens dropped, all right after the first `keep`
        self.pack: Pack | None = None
        self._positions: mx.array | None = None
        self._keys, self._values = self._make_rows(), self._make_rows()

    def _make_rows(self) -> Rows:
        return Rows()

    @property
    def offset(self) -> int | mx.array:
        """The next row's position for RoPE, or every row's position in a reordered window."""
        return self.length if self._positions is None else self._positions

    @property
    def nbytes(self) -> int:
        pack = self.pack  # read once: other threads call this
        return pack.nbytes if pack else self._keys.nbytes + self._values.nbytes

    def arrays(self) -> list[mx.array]:
        return self.pack.arrays() if self.pack else [*self._keys.parts, *self._values.parts]

    def changing(self) -> list[object]:
        """Return the objects whose attributes a pass changes."""
        return [self, self._keys, self._values, *([self.pack] if self.pack else [])]

    @property
    def has_room(self) -> bool:
        """Whether one more row fits into the present buffers without dropping any."""
        if self.pack:
            return self.length < self.pack.capacity
        return self.length - self.dropped < self._room(1)

    def held_rows(self) -> tuple[mx.array, mx.array] | None:
        """Return keys and values [1, H, length, K] from the pack or the own buffers; None before the first row."""
        if self.pack:
            return self.pack.rows_of(self)
        if not self._keys.parts:
            return None
        return self._keys.parts[0][:, :, : self.length], self._values.parts[0][:, :, : self.length]

    def lend(self, pack: Pack) -> None:
        """Give up the own buffers: the rows are in `pack` from now on."""
        self.pack = pack
        self._keys.clear()
        self._values.clear()

    def take_back(self, keys: mx.array, values: mx.array) -> None:
        """Leave the pack and hold a copy of these rows [1, H, length, K]."""
        self.pack = None
        capacity = whole_blocks(self.length, self.step)
        self._keys.fill(keys, capacity)
        self._values.fill(values, capacity)

    def close(self, besides: Sequence[LayerCache] = ()) -> None:
        """Free all rows and dissolve the pack that holds them. `besides` are caches that are about to close too."""
        if self.pack:
            self.pack.dissolve(besides=[self, *besides])
            self.pack = None
        self._keys.clear()
        self._values.clear()

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens. Raises CacheMismatch if rows that later queries need are not held."""
        if length <= self.keep:
            self.dropped = 0  # no dropped row is needed from here on
        if length > self.length or (self.dropped and self._first_seen(length) < self.keep + self.dropped):
            held = f"{self.length} less [{self.keep}, {self.keep + self.dropped})"
            raise CacheMismatch(f"cannot cut the cache to {length} tokens: it holds {held}")
        self.length = length

    def reserve(self, num_rows: int, positions: mx.array | None) -> None:
        """Make room for a window of `num_rows` rows. `positions` [L] is None if they count up."""
        if self.pack:
            self.pack.dissolve()
        self._positions = positions
        held = self.length - self.dropped
        if held + num_rows <= self._room(num_rows):
            return
        out_of_sight = max(0, self._first_seen(self.length) - self.keep - self.dropped)
        self.dropped += out_of_sight
        least = max(num_rows, self.step) if self.window else num_rows  # amortise the copy of a full window
        for rows in (self._keys, self._values):
            if out_of_sight:
                rows.drop(self.keep, self.keep + out_of_sight, held)
            rows.grow(held - out_of_sight, whole_blocks(held - out_of_sight + least, self.step))

    def fork(self, length: int) -> KVCache:
        """Return a cache that continues from the first `length` tokens; rows are shared until either is written to.

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
        """Return the mask of held and new rows that each row of a window sees; called by mlx-lm's models.

        Args:
            return_array: return an array even if a name ("causal") would do.
            window_size: the window of a layer that sees less than its cache holds.
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
        """Record the end of a pass, after `length` tokens; the cache of a stub layer moves only here."""
        self.length = length

    @property
    def keys(self) -> mx.array:
        """The buffer, for models that make it depend on another array."""
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

    start_position = 0  # read by models that drop rows themselves; these caches do that for them

    def maybe_trim_front(self) -> None:
        """Do nothing: called by such models."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array | Parts, mx.array | Parts]:
        """Append [1, H, L, K] and return everything held."""
        here = self.length - self.dropped
        end = here + keys.shape[2]
        self._keys.write(keys, here, end)
        self._values.write(values, here, end)
        self.length += keys.shape[2]
        return self._keys.read(end), self._values.read(end)

    def _room(self, num_rows: int) -> int:
        """Return the rows that may be held with a window of so many; those of a longer chunk before it are dropped."""
        if self.window is None:
            return self._keys.capacity
        needed = whole_blocks(self.keep + self.window - 1 + max(num_rows, self.step), self.step)
        return min(self._keys.capacity, needed)

    def _first_seen(self, position: int) -> int:
        """Return the first position after the kept ones that the query at `position` sees."""
        return max(self.keep, position - self.window + 1) if self.window else self.keep


class Int8Cache(KVCache):
    """Keys and values quantised to 8 bits, with a scale and a bias per group; mlx-lm's attention reads them as such."""

    form = Form.INT8
    bits = 8

    def _make_rows(self) -> Rows:
        return Int8Rows()

    @property
    def group_size(self) -> int:
        """How many numbers share a scale; mlx-lm's attention asks for it once there are rows."""
        packed, scales, _ = self._values.parts
        head_size = packed.shape[-1] * (32 // self.bits)
        return head_size // scales.shape[-1]


class Rows:
    """A growing buffer of rows [1, H, capacity, K]."""

    def __init__(self) -> None:
        self.parts: Parts = ()
        self.capacity = 0
        self.nbytes = 0  # a plain number: other threads read it

    def encode(self, rows: mx.array) -> Parts:
        return (rows,)

    def read(self, end: int) -> mx.array | Parts:
        """Return the first `end` rows as attention takes them."""
        return self.parts[0][:, :, :end]

    def write(self, rows: mx.array, begin: int, end: int) -> None:
        encoded = self.encode(rows)
        if not self.parts:
            self.parts = tuple(mx.zeros((*p.shape[:2], self.capacity, p.shape[3]), p.dtype) for p in encoded)
            self.nbytes = sum(part.nbytes for part in self.parts)
        self.parts = tuple(map(copy, self.parts))  # new array objects: a snapshot may still hold the old ones
        for part, new in zip(self.parts, encoded, strict=True):
            part[:, :, begin:end] = new

    def clear(self) -> None:
        self.parts, self.capacity, self.nbytes = (), 0, 0

    def fill(self, rows: mx.array, capacity: int) -> None:
        """Hold a copy of these rows, with room for `capacity`."""
        self.parts, self.capacity = self.encode(rows), 0
        self.grow(rows.shape[2], capacity)

    def share(self, other: Rows, held: int, step: int) -> None:
        """Hold the first `held` rows of `other`, by a copy if its buffer is larger than they need.

        MLX copies a shared buffer before it writes to it.
        """
        self.parts = tuple(mx.stop_gradient(part) for part in other.parts)  # array objects of our own, the same data
        self.capacity, self.nbytes = other.capacity, other.nbytes
        if (capacity := whole_blocks(held, step)) < self.capacity:
            self.grow(held, capacity)

    def grow(self, held: int, capacity: int) -> None:
        """Make room for `capacity` rows in all and keep the first `held`."""

        def grown(part: mx.array) -> mx.array:
            B, H, _, K = part.shape
            return mx.concatenate([part[:, :, :held], mx.zeros((B, H, capacity - held, K), part.dtype)], axis=2)

        self.parts = tuple(grown(part) for part in self.parts)
        self.nbytes = sum(part.nbytes for part in self.parts)
        self.capacity = capacity

    def drop(self, begin: int, end: int, held: int) -> None:
        """Take rows [begin, end) out of the first `held`."""
        self.parts = tuple(mx.concatenate([p[:, :, :begin], p[:, :, end:held]], axis=2) for p in self.parts)


class Int8Rows(Rows):
    """Rows stored as 8-bit values, scales and biases."""

    def encode(self, rows: mx.array) -> Parts:
        return tuple(mx.quantize(rows, group_size=int8_group(rows.shape[-1]), bits=8))

    def read(self, end: int) -> Parts:
        return tuple(part[:, :, :end] for part in self.parts)


class RecurrentState(ArraysCache):
    """A recurrent layer's state: it has no rows, so it can continue or restart, but not be cut in between."""

    has_room = True

    def __init__(self, num_arrays: int) -> None:
        super().__init__(size=num_arrays)
        self.length = 0
        self._nbytes = 0

    def arrays(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]  # type: ignore[misc]

    def changing(self) -> list[object]:
        return [self]

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def cut(self, length: int) -> None:
        """Continue at `length` or restart at 0. Raises CacheMismatch for anything in between."""
        if length == 0:
            self.close()
        elif length != self.length:
            raise CacheMismatch(f"a recurrent layer cannot be cut to {length} tokens: its state is at {self.length}")
        self.length = length

    def close(self, besides: Sequence[LayerCache] = ()) -> None:
        self.cache = [None] * len(self.cache)
        self._nbytes = 0

    def fork(self, length: int) -> RecurrentState:
        """Return a state that continues from `length`. Raises CacheMismatch as `cut` does."""
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
        """Do nothing: called by some of mlx-lm's layers, while `settle` moves all of them."""

    def settle(self, length: int) -> None:
        if length > self.length + 1:  # copies: a slice of a chunk's rows would hold all of them
            self.cache = [array if array is None else mx.contiguous(array) for array in self.cache]
        self.length = length
        self._nbytes = sum(array.nbytes for array in self.arrays())


LayerCache = KVCache | RecurrentState


def packed(members: Sequence[KVCache], capacity: int, like: tuple[mx.array, mx.array]) -> Pack:
    """Return the pack of exactly these members, new if they have none. `like`: keys, values [B, H, L, K] to come."""
    pack = members[0].pack
    if pack and pack.capacity == capacity and pack.members == list(members):
        return pack
    return Pack(members, capacity, like)


class Pack:
    """One buffer [B, H, capacity, K] of keys and one of values for several slots; row i belongs to `members[i]`."""

    def __init__(self, members: Sequence[KVCache], capacity: int, like: tuple[mx.array, mx.array]) -> None:
        """Copy the members' rows in and dissolve the packs that held them."""
        self.members = list(members)
        self.capacity = capacity
        held = [member.held_rows() for member in members]
        self.keys, self.values = (
            _filled([rows and rows[which] for rows in held], capacity, new) for which, new in enumerate(like)
        )
        total = self.keys.nbytes + self.values.nbytes
        self.nbytes = total // len(members)  # per member; a plain number: other threads read it
        for member in members:
            if member.pack is not None:
                member.pack.dissolve(besides=members)
        for member in members:
            member.lend(self)

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def rows_of(self, member: KVCache) -> tuple[mx.array, mx.array]:
        """Return a member's keys and values [1, H, length, K]."""
        row = self.members.index(member)
        return self.keys[row : row + 1, :, : member.length], self.values[row : row + 1, :, : member.length]

    def update(self, keys: mx.array, values: mx.array, rows: mx.array) -> None:
        """Write [B, H, L, K] at `rows` [B, 1, L, 1] of each member."""
        self.keys = mx.put_along_axis(self.keys, rows, keys, axis=2)
        self.values = mx.put_along_axis(self.values, rows, values, axis=2)
        for member in self.members:
            member.length += keys.shape[2]

    def dissolve(self, besides: Sequence[object] = ()) -> None:
        """Give the members their rows back and evaluate the copies, so that nothing keeps this buffer alive.

        Members in `besides` are about to close and get nothing.
        """
        owners = [member for member in self.members if not any(member is other for other in besides)]
        for member in owners:
            member.take_back(*self.rows_of(member))
        mx.async_eval([array for member in owners for array in member.arrays()])
        self.members = []  # break the cycle, or the buffer lives until the next collection


def _filled(rows: Sequence[mx.array | None], capacity: int, like: mx.array) -> mx.array:
    buffer = mx.zeros((len(rows), like.shape[1], capacity, like.shape[3]), like.dtype)
    for row, held in enumerate(rows):
        if held is not None:
            buffer[row : row + 1, :, : held.shape[2]] = held
    return buffer
