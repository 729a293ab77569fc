"""A lane: the windows of several slots in one pass. Each layer gets a view of several caches in place of one.

Rows lie end to end, so that every matrix product takes all of them, and only attention separates the slots: windows of
equal length on caches of similar capacity attend together (`Pack`), the others one by one. Windows of one length may
also lie side by side, as a batch, for models that need that. A layer whose caches allow neither runs once per slot.
Shapes: B slots, L window length, D hidden, H heads, K head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from worker.memory.layer_cache import KVCache, Mask, packed
from worker.memory.slot_caches import Caches
from worker.model.cache_spec import pack_capacity
from worker.model.stub_layers import RunLayer

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class LaneWindow:
    """Where one window goes: its slot's caches, already cut to `base`."""

    caches: Caches
    base: int
    num_rows: int
    positions: mx.array | None = None  # [L] int32; None if they count up from the base

    @property
    def batch_key(self) -> tuple[int, int | None, bool]:
        """A key that is equal for windows that may form one batch."""
        return self.num_rows, pack_capacity(self.base + self.num_rows), self.positions is None


class Lane:
    """The windows of one pass and what every layer needs to know about them."""

    def __init__(self, places: Sequence[LaneWindow], *, side_by_side: bool = False) -> None:
        """`side_by_side` means hidden states [B, L, D], with L rows in every window; otherwise [1, sum L, D]."""
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
        for at, place in enumerate(places):
            place.caches.begin()
            in_pack = next((group.packable for group in groups if at in group.numbers), frozenset())
            place.caches.reserve(place.num_rows, place.positions, in_pack)
        self.views = [
            self._view([place.caches.listed[number] for place in places], [g for g in groups if number in g.packable])
            for number in range(len(places[0].caches.listed))
        ]

    def split(self, rows: mx.array, axis: int = 1) -> list[mx.array]:
        """Split the rows of all windows into those of each window."""
        if self.side_by_side:
            return rows.split(len(self.places), axis=0)
        return rows.split(self._splits, axis=axis)

    def join(self, rows: Sequence[mx.array], axis: int = 1) -> mx.array:
        return mx.concatenate(list(rows), axis=0 if self.side_by_side else axis)

    def settle(self) -> None:
        for place in self.places:
            place.caches.settle(place.base + place.num_rows)

    def _view(self, caches: list[Any], groups: list[_Group]) -> View:
        together = self._is_one_group and bool(groups)
        if together and self.side_by_side:
            return BatchCache(self, caches, groups[0])
        if self.side_by_side or not isinstance(caches[0], KVCache):
            return View(self, caches)
        return LaneCache(self, caches, groups, together)


@dataclass(frozen=True, eq=False)
class LaneMask:
    """The mask that a model hands to its layers: one per single slot and one per group of slots."""

    alone: dict[int, Mask]
    groups: Sequence[mx.array]


class View:
    """Several slots' caches in place of one. A layer with a plain view runs once per slot."""

    def __init__(self, lane: Lane, caches: Sequence[Any]) -> None:
        self.caches = caches
        self._lane = lane

    @property
    def offset(self) -> mx.array:
        """Every row's position, or the first of each slot if they lie side by side."""
        return self._lane.offset

    def __getitem__(self, number: int) -> View:
        """Return the view of one of a layer's several caches."""
        return View(self._lane, [cache[number] for cache in self.caches])

    def make_mask(
        self, num_rows: int, return_array: bool = False, window_size: int | None = None
    ) -> LaneMask | mx.array:
        """Return each slot's mask for its own rows; called by mlx-lm's models as for a single cache."""
        places = enumerate(zip(self.caches, self._lane.places, strict=True))
        return LaneMask({i: cache.make_mask(p.num_rows, return_array, window_size) for i, (cache, p) in places}, [])

    def run(self, layer: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the layer over the lane; `args` begin with its hidden states [1, sum L, D] or [B, L, D]."""
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
    """Packed caches of windows that lie side by side: rows [B, H, L, K], as in an ordinary batch."""

    def __init__(self, lane: Lane, caches: Sequence[KVCache], group: _Group) -> None:
        super().__init__(lane, caches)
        self._group = group

    @property
    def offset(self) -> mx.array:
        """The position of each slot's first row."""
        return self._group.bases

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self._group.mask(window_size)

    def run(self, layer: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return layer(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, H, L, K] and return what all slots hold, right-padded."""
        return self._group.append(self.caches, keys, values)


class LaneCache(View):
    """Caches of rows that lie end to end; attention calls `attend` with what `update_and_fetch` returned."""

    def __init__(self, lane: Lane, caches: Sequence[KVCache], groups: Sequence[_Group], together: bool) -> None:
        """`together` means that one group holds all slots, so the layer may run on a batch."""
        super().__init__(lane, caches)
        self._groups = groups
        self._together = together
        grouped = {number for group in groups for number in group.numbers}
        self._alone = [number for number in range(len(caches)) if number not in grouped]

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> LaneMask:
        places = self._lane.places
        alone = {i: self.caches[i].make_mask(places[i].num_rows, return_array, window_size) for i in self._alone}
        return LaneMask(alone, [group.mask(window_size) for group in self._groups])

    def run(self, layer: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
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
        """Append each slot's rows of [1, H, sum L, K] and return what each group and each single slot holds now."""
        k, v = self._lane.split(keys, axis=2), self._lane.split(values, axis=2)
        held = [group.append(self.caches, group.stack(k), group.stack(v)) for group in self._groups]
        held += [self.caches[number].update_and_fetch(k[number], v[number]) for number in self._alone]
        return [keys for keys, _ in held], [values for _, values in held]

    def attend(
        self, attention: Attention, queries: mx.array, keys: list[Any], values: list[Any], mask: LaneMask, **more: Any
    ) -> mx.array:
        """Run attention for each slot's queries of [1, H, sum L, K] on its own keys and values."""
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
    """B windows of the same length L whose caches are packed together where they are `packable`."""

    def __init__(
        self, numbers: Sequence[int], places: Sequence[LaneWindow], capacity: int, packable: frozenset[int]
    ) -> None:
        """`numbers` are the group's slots in the lane, `packable` the entries of the model's list of caches."""
        self.packable = packable
        self.numbers = numbers
        self._capacity = capacity
        self._places = [places[number] for number in numbers]
        L = self._places[0].num_rows
        self.bases = mx.array([place.base for place in self._places], mx.int32)
        self._rows = self.bases[:, None, None, None] + mx.arange(L)[:, None]  # [B, 1, L, 1]
        self._end = max(place.base for place in self._places) + L
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window_size: int | None) -> mx.array:
        """Return which rows each row sees [B, 1, L, end]: of the last `window_size`, or of all."""
        if window_size not in self._masks:
            in_sight = mx.arange(self._end) <= self._rows
            self._masks[window_size] = in_sight & self._is_near(window_size) if window_size else in_sight
        return self._masks[window_size]

    def _is_near(self, window_size: int) -> mx.array:
        """Return which rows lie less than `window_size` positions before each row."""
        own = mx.stack([_positions(place) for place in self._places])[:, None, :, None]
        held = mx.broadcast_to(mx.arange(self._end), (len(self._places), 1, 1, self._end))
        return mx.put_along_axis(held, self._rows.swapaxes(2, 3), own.swapaxes(2, 3), axis=3) > own - window_size

    def append(self, caches: Sequence[KVCache], keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, H, L, K] of one layer and return what the group's slots hold there, right-padded."""
        pack = packed([caches[number] for number in self.numbers], self._capacity, (keys, values))
        pack.update(keys, values, self._rows)
        return pack.keys[:, :, : self._end], pack.values[:, :, : self._end]

    def stack(self, rows: Sequence[mx.array]) -> mx.array:
        """Return the group's windows, [1, H, L, K] each, as [B, H, L, K]."""
        return mx.concatenate([rows[number] for number in self.numbers])


def _groups(places: Sequence[LaneWindow]) -> Iterator[_Group]:
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        listed = enumerate(place.caches.listed)
        packable = frozenset(n for n, cache in listed if isinstance(cache, KVCache) and cache.can_be_packed)
        alike[*place.batch_key[:2], packable].append(number)
    for (_, capacity, packable), numbers in alike.items():
        if len(numbers) > 1 and capacity is not None:
            yield _Group(numbers, places, capacity, packable)


def _has_rows(part: Any) -> bool:
    """Return whether a part of a layer's result is something that other layers could use."""
    return isinstance(part, mx.array) and part.ndim >= 3


def _positions(place: LaneWindow) -> mx.array:
    return mx.arange(place.base, place.base + place.num_rows) if place.positions is None else place.positions
