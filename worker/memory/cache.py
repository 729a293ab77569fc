"""What one layer remembers of one slot. The rule: a step cuts to its base, then appends its window.

Cutting moves a length and copies nothing. mlx-lm's layers see `offset` and `update_and_fetch`, as of its own caches.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from protos.brigade_pb2 import Cache
from worker.errors import CacheMismatch
from worker.memory.rows import Parts, Rows
from worker.model.cachespec import (
    INT8,
    ROW_BLOCK,
    STATE,
    WHOLE,
    CacheSpec,
    Form,
    LayerKind,
    cache_spec,
    int8_group,
    whole_blocks,
)

Mask = mx.array | str | None


class Lender(Protocol):
    """Where a cache's rows are while its slot steps together with others: worker/memory/pack.py."""

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

    def mask(self, num_rows: int) -> Mask: ...

    def arrays(self) -> list[mx.array]: ...

    def fork(self, length: int) -> "LayerCache": ...

    def close(self, besides: "Sequence[LayerCache]" = ()) -> None: ...


def make_cache(kind: LayerKind, cache: Cache) -> LayerCache:
    """The cache of one layer, as the layer and the session's choice of cache want it."""
    spec = cache_spec(kind, cache)
    return _FRESH[spec.form](spec)


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

    def mask(self, num_rows: int) -> Mask:
        """Which of the held rows and of the window's own each row of the window sees."""
        held = self.length - self.dropped
        if self.window is None or (held + num_rows <= self.window + self.keep and not self.dropped):
            return None if num_rows == 1 else "causal"
        rows = mx.arange(held + num_rows)
        old = mx.where(rows[:held] < self.keep, rows[:held], rows[:held] + self.dropped)
        new = mx.arange(self.length, self.length + num_rows) if self._positions is None else self._positions
        positions = mx.concatenate([old, new])[None]
        in_sight = (positions > new[:, None] - self.window) | (positions < self.keep)
        return in_sight & (rows[None] <= rows[held:, None])

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


class RecurrentState(ArraysCache):
    """The state of a recurrent layer: it has no rows, so it can go on or start again, but not be cut."""

    def __init__(self) -> None:
        super().__init__(size=2)
        self.length = 0
        self._nbytes = 0

    def arrays(self) -> list[mx.array]:
        return [array for array in self.cache if array is not None]  # type: ignore[misc]

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
        other = RecurrentState()
        other.cache = list(self.cache)  # a layer replaces these arrays, it does not write to them
        other.length, other._nbytes = self.length, self._nbytes
        other.cut(length)
        return other

    def reserve(self, num_rows: int, positions: mx.array | None) -> None:
        pass

    def mask(self, num_rows: int) -> Mask:
        return None

    def advance(self, num_rows: int) -> None:
        """Called by mlx-lm's layer once it has taken `num_rows` rows."""
        self.length += num_rows
        self._nbytes = sum(array.nbytes for array in self.arrays())


_FRESH: dict[Form, Callable[[CacheSpec], LayerCache]] = {
    WHOLE: lambda spec: KVCache(spec.window, spec.keep),
    INT8: lambda spec: Int8Cache(spec.window, spec.keep),
    STATE: lambda spec: RecurrentState(),
}
