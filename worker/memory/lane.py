"""A lane: the windows of several slots in one pass. Each layer gets a view of several caches in place of one.

Rows lie end to end, so that every matrix product takes all of them, and only attention separates the slots: windows of
equal length on caches of similar capacity attend together (`Pack`), the others one by one. Windows of one length may
also lie side by side, as in a batch, for models that need that. A layer whose caches allow neither runs per slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from worker.memory.cache import KVCache, Mask
from worker.memory.caches import Caches
from worker.model.cachespec import pack_capacity
from worker.model.stub_layers import Run

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class LaneWindow:
    """Where one window goes: its slot's caches, already cut to `base`."""

    caches: Caches
    base: int
    num_rows: int
    positions: mx.array | None = None  # [L] int32; None: they count up from the base

    @property
    def is_alike(self) -> tuple[int, int | None, bool]:
        """A key that is equal for windows that may form a batch."""
        return self.num_rows, pack_capacity(self.base + self.num_rows), self.positions is None


class Lane:
    """The windows of one pass and what every layer needs to know of them."""

    def __init__(self, places: Sequence[LaneWindow], *, side_by_side: bool = False) -> None:
        """`side_by_side`: hidden states are [B, L, D], all windows having L rows; else [1, sum L, D]."""
        self.places = places
        self.side_by_side = side_by_side
        self.counts_up = all(place.positions is None for place in places)
        self._splits = tuple(accumulate(place.num_rows for place in places[:-1]))
        bases = [place.base for place in places]
        self.offset = mx.array(bases) if side_by_side else mx.concatenate([_positions(place) for place in places])
        groups = list(_groups(places))
        self._is_one_group = [len(group.numbers) for group in groups] == [len(places)] and self.counts_up
        if side_by_side and not self._is_one_group:
            groups = []  # every slot by itself
        self._reserve(groups)
        self.views = [
            self._view([place.caches.listed[number] for place in places], [g for g in groups if g.suited[number]])
            for number in range(len(places[0].caches.listed))
        ]

    def split(self, rows: mx.array, axis: int = 1) -> list[mx.array]:
        """Split the rows of all windows into each window's."""
        if self.side_by_side:
            return rows.split(len(self.places), axis=0)
        return rows.split(self._splits, axis=axis)

    def join(self, rows: Sequence[mx.array], axis: int = 1) -> mx.array:
        return mx.concatenate(list(rows), axis=0 if self.side_by_side else axis)

    def settle(self) -> None:
        for place in self.places:
            place.caches.settle(place.base + place.num_rows)

    def _reserve(self, groups: Sequence[_Group]) -> None:
        """Make room for every window that is not in a pack."""
        for at, place in enumerate(self.places):
            place.caches.begin()
            group = next((group for group in groups if at in group.numbers), None)
            for number in place.caches.own_numbers:
                if group is None or not group.suited[number]:
                    place.caches.listed[number].reserve(place.num_rows, place.positions)

    def _view(self, caches: list[Any], groups: list[_Group]) -> View:
        together = self._is_one_group and bool(groups)
        if together and self.side_by_side:
            return BatchCache(self, caches, groups[0])
        if self.side_by_side or not isinstance(caches[0], KVCache):
            return View(self, caches)
        return LaneCache(self, caches, groups, together)


class LaneMask:
    """The mask that a model hands to its layers: one per single slot and one per group of slots."""

    def __init__(self, alone: dict[int, Mask], groups: Sequence[mx.array]) -> None:
        self.alone = alone
        self.groups = groups


class View:
    """Several slots' caches in place of one. A layer with a plain view runs once per slot."""

    def __init__(self, lane: Lane, caches: Sequence[Any]) -> None:
        self.caches = caches
        self._lane = lane

    @property
    def offset(self) -> mx.array:
        """Every row's position, or each slot's first if they lie side by side."""
        return self._lane.offset

    def __getitem__(self, number: int) -> View:
        """Of layers with several caches each."""
        return View(self._lane, [cache[number] for cache in self.caches])

    def make_mask(
        self, num_rows: int, return_array: bool = False, window_size: int | None = None
    ) -> LaneMask | mx.array:
        """Return each slot's mask for its own rows; called by mlx-lm's models as of a single cache."""
        places = enumerate(zip(self.caches, self._lane.places, strict=True))
        return LaneMask({i: cache.make_mask(p.num_rows, return_array, window_size) for i, (cache, p) in places}, [])

    def run(self, layer: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the layer over the lane; `args` begin with its hidden states."""
        results = []
        for number, hidden in enumerate(self._lane.split(args[0])):
            others = [self._of_slot(value, number) for value in args[1:]]
            named = {key: self._of_slot(value, number) for key, value in kwargs.items()}
            results.append(layer(hidden, *others, **named))
        if not isinstance(results[0], tuple | list):
            return self._lane.join(results)
        return tuple(self._lane.join(part) if _has_rows(part[0]) else None for part in zip(*results, strict=True))

    def _of_slot(self, value: Any, number: int) -> Any:
        """Return one slot's part of an argument: its own mask, cache or numbers."""
        if isinstance(value, LaneMask):
            return value.alone[number]
        if isinstance(value, View):
            return value.caches[number]
        of_batch = isinstance(value, mx.array) and value.ndim > 0 and value.shape[0] == len(self.caches)
        return value[number : number + 1] if of_batch and self._lane.side_by_side else value


class BatchCache(View):
    """Packed caches of windows that lie side by side: rows [B, H, L, K], as in any batch."""

    def __init__(self, lane: Lane, caches: Sequence[KVCache], group: _Group) -> None:
        super().__init__(lane, caches)
        self._group = group

    @property
    def offset(self) -> mx.array:
        """The position of each slot's first row."""
        return self._group.bases

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self._group.mask(window_size)

    def run(self, layer: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return layer(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, H, L, K]; returns what all slots hold, right-padded."""
        return self._group.append(self.caches, keys, values)


class LaneCache(View):
    """Caches of rows that lie end to end; attention comes to `attend` with what `update_and_fetch` gave it."""

    def __init__(self, lane: Lane, caches: Sequence[KVCache], groups: Sequence[_Group], together: bool) -> None:
        """`together`: one group holds all slots, so the layer may run on a batch."""
        super().__init__(lane, caches)
        self._groups = groups
        self._together = together
        grouped = {number for group in groups for number in group.numbers}
        self._alone = [number for number in range(len(caches)) if number not in grouped]

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> LaneMask:
        places = self._lane.places
        alone = {i: self.caches[i].make_mask(places[i].num_rows, return_array, window_size) for i in self._alone}
        return LaneMask(alone, [group.mask(window_size) for group in self._groups])

    def run(self, layer: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, *others = args
        if not self._together or any(isinstance(other, mx.array) for other in (*others, *kwargs.values())):
            return layer(*args, **kwargs)
        batch = BatchCache(self._lane, self.caches, self._groups[0])
        B, (_, _, D) = len(self.caches), x.shape
        named = {key: self._as_batch(value, batch) for key, value in kwargs.items()}
        result = layer(x.reshape(B, -1, D), *[self._as_batch(value, batch) for value in others], **named)
        if isinstance(result, tuple | list):
            return (result[0].reshape(x.shape), *[None] * (len(result) - 1))
        return result.reshape(x.shape)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[list[Any], list[Any]]:
        """Append each slot's rows of [1, H, sum L, K]; returns what each group and each single slot holds now."""
        k, v = self._lane.split(keys, axis=2), self._lane.split(values, axis=2)
        held = [group.append(self.caches, group.stack(k), group.stack(v)) for group in self._groups]
        held += [self.caches[number].update_and_fetch(k[number], v[number]) for number in self._alone]
        return [keys for keys, _ in held], [values for _, values in held]

    def attend(
        self, attention: Attention, queries: mx.array, keys: list[Any], values: list[Any], mask: LaneMask, **more: Any
    ) -> mx.array:
        """Each slot's queries of [1, H, sum L, K] on its own keys and values."""
        q = self._lane.split(queries, axis=2)
        outputs: dict[int, mx.array] = {}
        for group, k, v, group_mask in zip(self._groups, keys, values, mask.groups, strict=False):
            together = attention(group.stack(q), k, v, cache=None, mask=group_mask, **more)
            outputs |= zip(group.numbers, together.split(len(group.numbers)), strict=True)
        singles = zip(self._alone, keys[len(self._groups) :], values[len(self._groups) :], strict=True)
        for number, k, v in singles:
            outputs[number] = attention(q[number], k, v, cache=self.caches[number], mask=mask.alone[number], **more)
        return self._lane.join([outputs[number] for number in range(len(q))], axis=2)

    def _as_batch(self, value: Any, batch: BatchCache) -> Any:
        if isinstance(value, LaneMask):
            return value.groups[0]
        return batch if value is self else value


class _Group:
    """Windows of the same length L whose caches are packed together, where these are `suited`."""

    def __init__(
        self, numbers: Sequence[int], places: Sequence[LaneWindow], capacity: int, suited: tuple[bool, ...]
    ) -> None:
        self.suited = suited
        self.numbers = numbers
        self.capacity = capacity
        L = places[numbers[0]].num_rows
        self.bases = mx.array([places[number].base for number in numbers], mx.int32)
        self._rows = self.bases[:, None, None, None] + mx.arange(L)[:, None]  # [B, 1, L, 1]
        self._places = [places[number] for number in numbers]
        self._end = max(places[number].base for number in numbers) + L
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window_size: int | None) -> mx.array:
        """Which rows each row sees [B, 1, L, end], of the last `window_size` or of all."""
        if window_size not in self._masks:
            in_sight = mx.arange(self._end) <= self._rows
            self._masks[window_size] = in_sight & self._is_near(window_size) if window_size else in_sight
        return self._masks[window_size]

    def _is_near(self, window_size: int) -> mx.array:
        """Which rows lie less than so far before each row, by their positions."""
        own = mx.stack([_positions(place) for place in self._places])[:, None, :, None]
        held = mx.broadcast_to(mx.arange(self._end), (len(self._places), 1, 1, self._end))
        return mx.put_along_axis(held, self._rows.swapaxes(2, 3), own.swapaxes(2, 3), axis=3) > own - window_size

    def append(self, caches: Sequence[KVCache], keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, H, L, K] of one layer; returns what the group's slots hold there, right-padded."""
        pack = packed([caches[number] for number in self.numbers], self.capacity, (keys, values))
        pack.update(keys, values, self._rows)
        return pack.keys[:, :, : self._end], pack.values[:, :, : self._end]

    def stack(self, rows: Sequence[mx.array]) -> mx.array:
        """The group's [1, H, L, K] of all windows' as [B, H, L, K]."""
        return mx.concatenate([rows[number] for number in self.numbers])


def _groups(places: Sequence[LaneWindow]) -> Iterator[_Group]:
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        suited = tuple(isinstance(cache, KVCache) and cache.can_be_packed for cache in place.caches.listed)
        alike[*place.is_alike[:2], suited].append(number)
    for (_, capacity, suited), numbers in alike.items():
        if len(numbers) > 1 and capacity is not None:
            yield _Group(numbers, places, capacity, suited)


def _has_rows(part: Any) -> bool:
    """Whether this is, of what a layer returned, something that other layers could use."""
    return isinstance(part, mx.array) and part.ndim >= 3


def _positions(place: LaneWindow) -> mx.array:
    return mx.arange(place.base, place.base + place.num_rows) if place.positions is None else place.positions


def packed(members: Sequence[KVCache], capacity: int, like: tuple[mx.array, mx.array]) -> Pack:
    """Return the pack of exactly these members, new if they have none. `like`: keys, values [B, H, L, K] to come."""
    pack = members[0].pack
    if isinstance(pack, Pack) and pack.capacity == capacity and pack.members == list(members):
        return pack
    return Pack(members, capacity, like)


class Pack:
    """One buffer [B, H, capacity, K] of keys and one of values; row i belongs to `members[i]`."""

    def __init__(self, members: Sequence[KVCache], capacity: int, like: tuple[mx.array, mx.array]) -> None:
        """Copy the members' rows in and dissolve the packs that held them."""
        self.members = list(members)
        self.capacity = capacity
        held = [member.held_rows() for member in members]
        self.keys, self.values = (
            _filled([rows and rows[which] for rows in held], capacity, new) for which, new in enumerate(like)
        )
        self.nbytes = (self.keys.nbytes + self.values.nbytes) // len(
            members
        )  # per member; a plain number: other threads read it
        for member in members:
            if member.pack is not None:
                member.pack.dissolve(besides=members)
        for member in members:
            member.lend(self)

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    def rows_of(self, member: KVCache) -> tuple[mx.array, mx.array]:
        """A member's keys and values [1, H, length, K]."""
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
