"""All caches of one slot on one stage, in the order of the model's own list of caches.

The list is as long as the whole model. For a stub layer it holds the cache of a layer of the same kind on this stage,
or one that only counts: a model that makes a mask from its first layer's cache then gets the right mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from protos.brigade_pb2 import Cache
from worker.errors import CacheMismatch
from worker.memory.kv_cache import KVCache, Parts, QuantisedCache, is_sparse, join
from worker.memory.recurrent_state import RecurrentState, StateStack
from worker.model.cache_spec import Form, Memory, cache_spec, pack_capacity
from worker.model.probe_pass import Entry

LayerCache = KVCache | RecurrentState
Listed = LayerCache | tuple[LayerCache, ...]  # a layer with several caches indexes them by number


@dataclass(frozen=True)
class CacheSegment:
    """What one cache holds of some tokens: its number in the model's list, and in its layer if that has several."""

    number: int
    part: int
    base: int  # the first token; of a snapshot how many tokens its cache has dropped
    keys: Parts  # [1, H, L, ...] each, as they are stored
    values: Parts
    length: int = 0  # tokens of a snapshot; 0 of rows
    is_output: bool = False  # of no cache: its one key holds rows [1, L, W] behind the last layer

    @property
    def is_snapshot(self) -> bool:
        """Whether it is the snapshot of a cache that cannot be cut, and no rows of tokens."""
        return self.length > 0

    @property
    def arrays(self) -> Parts:
        return (*self.keys, *self.values)

    @property
    def num_rows(self) -> int | None:
        """L of all arrays; None if there are none, or they differ."""
        found = {array.shape[2] if array.ndim == 4 else None for array in self.arrays}
        return found.pop() if len(found) == 1 else None


class Caches:
    """One slot's caches: `listed` as the model expects them, and those that are its `own`, without nesting."""

    def __init__(self, entries: Sequence[Entry], own_numbers: Sequence[int], cache: Cache, grid: int = 1) -> None:
        """Make empty caches.

        Args:
            entries: the model's own list of caches.
            own_numbers: the numbers of the entries whose layers are on this stage.
            cache: the kind of cache that the session chose.
            grid: token rows see to the end of their block of so many rows.
        """
        self.grid = grid
        self._entries, self.own_numbers, self._cache = entries, own_numbers, cache
        self._fill({number: _make(entries[number], cache) for number in own_numbers})

    def _fill(self, own: dict[int, Listed]) -> None:
        alike: dict[Any, Listed] = {}
        for number, listed in own.items():
            alike.setdefault(_kind(self._entries[number]), listed)
        self.own = [cache for listed in own.values() for cache in members(listed)]
        entries = [self._entries[number] for number in own]
        self._memories = [each for entry in entries for each in (entry if isinstance(entry, tuple) else (entry,))]
        self._counting: list[LayerCache] = []
        self.listed: list[Listed] = []
        for number, entry in enumerate(self._entries):
            if number not in own and _kind(entry) not in alike:
                alike[_kind(entry)] = _make(entry, self._cache)
                self._counting += members(alike[_kind(entry)])
            self.listed.append(own.get(number, alike[_kind(entry)]))
        # what is saved before a step is launched
        self.states = [each for each in (*self.own, *self._counting) if isinstance(each, RecurrentState)]
        packable = {n: cache for n, cache in enumerate(self.own) if isinstance(cache, KVCache) and cache.can_be_packed}
        self.packable = list(packable.values())
        self.packable_numbers = tuple(packable)  # among its own
        self.pack: Pack | None = None  # where it shares buffers with other slots
        self.snapshots: dict[int, list[LayerCache | None]] = {}  # by length: copies of those of its own that need one
        self._settled: int | None = None  # the common length of its own caches between two passes

    @property
    def nbytes(self) -> int:
        """The bytes of its buffers and of its share of its pack's unused ones."""
        nbytes, pack = sum(cache.nbytes for cache in self.own), self.pack
        if pack:
            unused = len(pack.slots) / max(1, len(pack.members)) - 1
            nbytes += int(unused * sum(cache.nbytes for cache in self.packable))
        copies = (copy for snapshot in self.snapshots.values() for copy in snapshot)
        return nbytes + sum(copy.nbytes for copy in copies if copy)

    def arrays(self) -> list[mx.array]:
        """Return the buffers of the last layer that has any: they depend on all that the pass computed before."""
        layers = (members(self.listed[number]) for number in reversed(self.own_numbers))
        return next((arrays for layer in layers if (arrays := [a for cache in layer for a in cache.arrays()])), [])

    def state_arrays(self) -> list[mx.array]:
        """Return the recurrent states: no other result of a pass depends on them, and they hold what they depend on."""
        states = [cache for cache in self.own if isinstance(cache, RecurrentState)]
        return [array for state in states for array in (*state.arrays(), *state.recorded)]

    def saved(self) -> tuple[Any, ...]:
        """Return all that a pass changes, for `restore`. It shares the arrays, which keeps them from being reused."""
        in_pack = (self.pack, self.pack.slots.index(self)) if self.pack else None
        return in_pack, [(cache, cache.saved()) for cache in (*self.own, *self._counting)]

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Return to what `saved` returned."""
        in_pack, caches = saved
        self.pack = None
        if in_pack:
            self.pack, number = in_pack
            self.pack.slots[number] = self
        for cache, before in caches:
            cache.restore(before)
        self.begin()

    @property
    def has_room(self) -> bool:
        """Whether one more row fits without another buffer."""
        return all(cache.has_room for cache in self.own)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens. Raises CacheMismatch if one of the caches cannot be cut there."""
        if length != self._settled:
            self._settled = None
            for cache in self.own:
                cache.cut(length)
            self._settled = length
            self.snapshots = {at: copies for at, copies in self.snapshots.items() if at <= length}
        for cache in self._counting:
            cache.cut(0)  # an embedding that runs here for another stage still fills its cache at every step
            cache.settle(length)

    def begin(self) -> None:
        """Record that a pass begins or was undone: the caches' lengths are unknown until `settle` or `cut`."""
        self._settled = None

    def reserve(
        self, num_rows: int, positions: mx.array | None, *, has_drafts: bool = False, num_canvas: int = 0
    ) -> None:
        """Make room for a window [L], inside which the next one may cut; rows beyond the pack leave it."""
        before = self.capacity
        for cache in self.own:
            cache.reserve(num_rows, positions, has_drafts=has_drafts, num_canvas=num_canvas, grid=self.grid)
        if (pack := self.pack) and self.capacity != before:
            self._leave_pack()
            pack.thin_out()

    @property
    def capacity(self) -> int:
        """How many rows the buffers have room for that may be shared; 0 if there are none."""
        return self.packable[0].capacity if self.packable else 0

    def settle(self, length: int) -> None:
        """Record the end of a pass, after `length` tokens."""
        for cache in (*self.own, *self._counting):
            cache.settle(length)
        self._settled = length

    def take_snapshot(self) -> list[mx.array]:
        """Keep copies of what cannot be cut back to the present length; return their arrays, to be evaluated."""
        assert self._settled is not None, "a pass is under way"
        copies = self.snapshots[self._settled] = [cache.snapshot() for cache in self.own]
        return [array for copy in copies if copy for array in copy.arrays()]

    def keep_snapshots(self, lengths: Sequence[int]) -> None:
        """Keep the snapshots of these lengths only. Raises CacheMismatch if one of them is not held."""
        if missing := [length for length in lengths if length not in self.snapshots]:
            raise CacheMismatch(f"expected snapshots at {missing} tokens, found those at {list(self.snapshots)}")
        self.snapshots = {length: self.snapshots[length] for length in lengths}

    def segments(self, begin: int, end: int, most_bytes: int) -> Iterator[CacheSegment]:
        """Yield what its own caches hold of tokens [begin, end), in parts of so many bytes at most, or of one row.

        Of a cache that cannot be cut that is its snapshot of `end`, or nothing without one.
        """
        copies = self.snapshots.get(end) or [None] * len(self.own)
        for (number, part), cache, copy in zip(self._places(), self.own, copies, strict=True):
            if copy:
                yield _whole(number, part, copy)
            elif isinstance(cache, KVCache) and cache.window is None:
                if not cache.nbytes:  # a layer without attention, or one that uses the rows of another
                    continue
                rows = max(1, most_bytes * cache.capacity // cache.nbytes)
                for at in range(begin, end, rows):
                    yield CacheSegment(number, part, at, *cache.segment(at, min(at + rows, end)))

    def _places(self) -> list[tuple[int, int]]:
        """Return the number of each of its own caches in the model's list, and in its layer."""
        return [(n, part) for n in self.own_numbers for part in range(len(members(self.listed[n])))]

    def put_segment(self, segment: CacheSegment) -> list[mx.array]:
        """Write a segment; return the buffers, to be evaluated. Raises CacheMismatch if it fits no cache of these."""
        places = self._places()
        if (place := (segment.number, segment.part)) not in places:
            raise CacheMismatch(f"expected a segment of one of its caches, got one of {segment.number}")
        index = places.index(place)
        cache = self.own[index]
        self._require_planned(segment, self._memories[index])
        if segment.is_snapshot:
            self._put_snapshot(segment, index)
        elif isinstance(cache, KVCache):
            cache.put_segment(segment.base, segment.keys, segment.values)
        else:
            raise CacheMismatch(f"expected a whole state of cache {segment.number}, got rows")
        return cache.arrays()

    def _put_snapshot(self, segment: CacheSegment, index: int) -> None:
        """Replace the snapshot of this length of one of its own caches, and what that holds if it is there now."""
        whole = (segment.length, segment.base, segment.keys, segment.values)
        if segment.length in self.snapshots and (snapshot := self.snapshots[segment.length][index]):
            snapshot.put_whole(*whole)
        cache = self.own[index]
        if cache.length != segment.length:
            return
        cache.put_whole(*whole)
        sliding = [other for other in self.own if isinstance(other, KVCache) and other.window]
        for other in sliding:  # those with equal windows share a mask, and so have to hold equal rows
            if other is cache or other.dropped < segment.base:
                other.drop_unseen()

    def _require_planned(self, segment: CacheSegment, memory: Memory) -> None:
        """Raise CacheMismatch unless a segment's arrays have the shapes, and take the bytes, that are planned for them.

        Of a recurrent state only the most bytes are known; some layers remember nothing.
        """
        found = [[array.shape for array in parts] for parts in (segment.keys, segment.values)]
        num_bytes = sum(array.nbytes for array in segment.arrays)
        fits = num_bytes <= memory.state_bytes
        if memory.heads:
            spec, L = cache_spec(memory, self._cache), segment.num_rows or 0
            shapes = [[(1, memory.heads, L, width) for width in widths] for widths in spec.widths(memory)]
            fits = found == shapes and num_bytes == L * spec.row_bytes(memory)
        if not fits:
            raise CacheMismatch(f"expected what is planned for cache {segment.number}, got {found}, {num_bytes} bytes")

    def stored(self, begin: int, end: int) -> list[CacheSegment]:
        """Return what a slot needs of tokens [begin, end) to continue at `end`, for `put_stored`.

        Raises:
            CacheMismatch: a cache that cannot be cut has no snapshot of `end`.
        """
        copies = self.snapshots.get(end) or [None] * len(self.own)
        found = []
        for (number, part), cache, copy in zip(self._places(), self.own, copies, strict=True):
            if copy:
                found.append(_whole(number, part, copy))
            elif isinstance(cache, KVCache) and not cache.dropped:
                found.append(CacheSegment(number, part, begin, *cache.segment(begin, end)))
            else:
                raise CacheMismatch(f"expected a snapshot of {end} tokens, found those of {list(self.snapshots)}")
        return found

    def put_stored(self, segments: Sequence[CacheSegment], begin: int, end: int) -> list[mx.array]:
        """Continue at `end` with what `stored` returned in another slot; return the buffers, to be evaluated.

        Raises:
            CacheMismatch: it is not of these caches, or they do not hold the first `begin` tokens.
        """
        by_place = {(segment.number, segment.part): segment for segment in segments}
        if missing := [place for place in self._places() if place not in by_place]:
            raise CacheMismatch(f"expected what all caches hold of tokens [{begin}, {end}), nothing is of {missing}")
        pairs = [(cache, by_place[place]) for cache, place in zip(self.own, self._places(), strict=True)]
        self.begin()
        for cache, segment in pairs:
            if segment.length not in (0, end):
                raise CacheMismatch(f"expected a snapshot of {end} tokens, got one of {segment.length}")
            if not segment.is_snapshot:
                if segment.base != begin or (segment.arrays and segment.num_rows != end - begin):
                    raise CacheMismatch(f"expected rows [{begin}, {end}), got others from {segment.base} on")
                cache.cut(begin)
        self.reserve(end - begin, None)
        self.settle(end)
        for _, segment in pairs:
            if segment.is_snapshot or segment.arrays:  # some layers use the rows of others
                self.put_segment(segment)
        return [array for cache in self.own for array in cache.arrays()]

    def fork(self, length: int, snapshots: Sequence[int] = ()) -> Caches:
        """Return another slot's caches that continue from the first `length` tokens, and share these snapshots.

        What cannot be cut there continues from the snapshot of that length.

        Raises:
            CacheMismatch: there is none, or one of `snapshots` is not held.
        """
        other = Caches(self._entries, (), self._cache, self.grid)
        other.own_numbers = self.own_numbers
        forks = iter(self._forks(length))
        own: dict[int, Listed] = {}
        for number in self.own_numbers:
            listed = self.listed[number]
            own[number] = tuple(next(forks) for _ in listed) if isinstance(listed, tuple) else next(forks)
        other._fill(own)
        other.snapshots = self.snapshots
        other.keep_snapshots(snapshots)
        for cache in other._counting:
            cache.settle(length)
        mx.async_eval([array for cache in other.own for array in cache.arrays()])  # lets go of the buffers copied from
        return other

    def taken_over(self, length: int, snapshots: Sequence[int] = ()) -> Caches:
        """Cut these caches for the slot that takes the place of this one, or fork them if a copy is smaller.

        Raises:
            CacheMismatch: as `fork` does.
        """
        held = self.snapshots
        with suppress(CacheMismatch):  # what cannot be cut is in a snapshot
            self.cut(length)
            self.snapshots = held
            if all(cache.is_tight for cache in self.own):
                self.keep_snapshots(snapshots)
                return self
        return self.fork(length, snapshots)

    def _forks(self, length: int) -> Iterator[LayerCache]:
        """Yield forks of its own caches."""
        for cache, copy in zip(self.own, self.snapshots.get(length, [None] * len(self.own)), strict=True):
            try:
                fork = cache.fork(length)
            except CacheMismatch:
                if copy is None:
                    raise
                fork = copy.fork(length)
            yield fork

    def close(self) -> None:
        """Free everything that is not shared; `close_all` frees the rest."""
        self.snapshots = {}
        for cache in self.own:
            cache.close()
        self._leave_pack()

    def _leave_pack(self) -> None:
        if self.pack:
            self.pack.slots[self.pack.slots.index(self)] = None
            self.pack = None


class Pack:
    """Slots that share buffers [S, H, capacity, K] in every layer that allows it; `slots` has None for those gone."""

    def __init__(self, slots: Sequence[Caches], capacity: int) -> None:
        for caches in zip(*(slot.packable for slot in slots), strict=True):
            join(caches, capacity)
        for slot in slots:
            slot._leave_pack()
            slot.pack = self
        self.slots: list[Caches | None] = list(slots)

    @property
    def members(self) -> list[Caches]:
        return [slot for slot in self.slots if slot]

    def thin_out(self) -> None:
        """Move its slots to smaller buffers if too many have left."""
        if (staying := self.members) and is_sparse(len(self.slots), len(staying)):
            _move_out(staying)


def shared_by(slots: Sequence[Caches]) -> list[Pack | StateStack]:
    """Return what these slots share with others or with each other."""
    shared: list[Pack | StateStack] = [slot.pack for slot in slots if slot.pack]
    shared += [state.stack for slot in slots for state in slot.states if state.stack]
    return list({id(each): each for each in shared}.values())


def close_all(slots: Sequence[Caches]) -> None:
    """Close slots, then free what is unused of the buffers that they shared."""
    shared = shared_by(slots)
    for slot in slots:
        slot.close()
    for each in shared:
        each.thin_out()


def move_apart(slots: Sequence[Caches]) -> None:
    """Move slots out of buffers that they share with others."""
    for pack in {id(slot.pack): slot.pack for slot in slots if slot.pack}.values():
        leaving = [member for member in pack.members if member in slots]
        if len(leaving) < len(pack.members):
            _move_out(leaving)
            pack.thin_out()


def _move_out(slots: Sequence[Caches]) -> None:
    """Move slots of one pack to buffers that only they share, and let go of the old ones."""
    if len(slots) > 1:
        Pack(slots, slots[0].capacity)
    else:
        for cache in slots[0].packable:
            cache.move_out()
        slots[0]._leave_pack()
    mx.async_eval([array for cache in slots[0].packable for array in cache.arrays()])


def pack_together(slots: Sequence[Caches], needed: Sequence[int]) -> None:
    """Move slots of similar capacity to common buffers, unless they are there.

    Args:
        needed: how many rows each slot is about to hold.
    """
    alike: dict[Any, list[Caches]] = defaultdict(list)
    for slot, num_rows in zip(slots, needed, strict=True):
        if slot.packable:
            capacity = slot.capacity if num_rows <= slot.capacity else pack_capacity(num_rows)
            alike[capacity, slot.packable_numbers].append(slot)
    for (capacity, _), group in alike.items():
        pack = group[0].pack
        is_one = pack is not None and all(slot.pack is pack for slot in group) and group[0].capacity == capacity
        if len(group) > 1 and not is_one:
            left = {id(slot.pack): slot.pack for slot in group if slot.pack}
            Pack(group, capacity)
            for old in left.values():
                old.thin_out()


def _whole(number: int, part: int, copy: LayerCache) -> CacheSegment:
    """Return a snapshot as a segment."""
    if isinstance(copy, RecurrentState):
        return CacheSegment(number, part, 0, copy.whole(), (), copy.length)
    return CacheSegment(number, part, copy.dropped, *copy.whole(), copy.length)


def members(listed: Listed) -> tuple[LayerCache, ...]:
    return listed if isinstance(listed, tuple) else (listed,)


def make_cache(memory: Memory, cache: Cache) -> LayerCache:
    """Return an empty cache for one memory of a layer, stored in the form that the session chose."""
    spec = cache_spec(memory, cache)
    if spec.form is Form.STATE:
        return RecurrentState(memory.state_arrays)
    if spec.form is Form.QUANTISED:
        return QuantisedCache(spec.bits, spec.window)
    return KVCache(spec.window, spec.keep)


def _make(entry: Entry, cache: Cache) -> Listed:
    return tuple(make_cache(part, cache) for part in entry) if isinstance(entry, tuple) else make_cache(entry, cache)


def _kind(entry: Entry) -> Any:
    """Return a key that is equal for entries with equal masks and offsets."""
    return tuple(map(_kind, entry)) if isinstance(entry, tuple) else (entry.window, entry.state_arrays)
