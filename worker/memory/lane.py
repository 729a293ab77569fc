"""A lane: the windows of several slots in one pass. Their rows lie end to end, so every matrix product takes them all.

Only attention tells the slots apart: windows of equal length on caches of similar length attend together (pack.py), the
others one by one.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx

from worker.memory.cache import KVCache, LayerCache, Mask
from worker.memory.pack import packed
from worker.model.cachespec import LayerKind, pack_capacity

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class Place:
    """Where one window goes: its slot's caches, one per layer, already cut to `base`."""

    caches: Sequence[LayerCache]
    base: int
    num_rows: int
    positions: mx.array | None = None  # [L] int32; None: they count up from the base


class Lane:
    """Several places, and what all layers need to know of them; made once per pass."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        self.splits = tuple(accumulate(place.num_rows for place in places[:-1]))
        self._counts_up = all(place.positions is None for place in places)
        self._offset = mx.concatenate([_positions(place) for place in places])
        self._masks: dict[LayerKind, list[Mask]] = {}
        alike: dict[tuple[int, int | None, tuple[bool, ...]], list[int]] = defaultdict(list)
        for number, place in enumerate(places):
            suited = tuple(isinstance(cache, KVCache) and cache.can_be_packed for cache in place.caches)
            alike[place.num_rows, pack_capacity(place.base + place.num_rows), suited].append(number)
        self._groups = [
            _Group(numbers, places, capacity, suited)
            for (_, capacity, suited), numbers in alike.items()
            if len(numbers) > 1 and capacity is not None
        ]

    def run(self, layer: Any, number: int, kind: LayerKind, h: mx.array) -> mx.array:
        """One of the shard's layers over the lane: hidden states [1, sum L, D] to the same."""
        caches: list[Any] = [place.caches[number] for place in self.places]
        if kind.recurrent:  # a state has no rows that could be told apart: slot by slot
            rows = zip(h.split(self.splits, axis=1), caches, strict=True)
            return mx.concatenate([layer(x, None, cache) for x, cache in rows], axis=1)
        groups = [group for group in self._groups if group.suited[number]]
        if groups and len(groups[0].numbers) == len(caches) and self._counts_up:  # a batch as any other
            batch = layer(h.reshape(len(caches), -1, h.shape[-1]), groups[0].mask, BatchCache(groups[0], caches))
            return batch.reshape(h.shape)
        return layer(h, None, self._cache(caches, kind, groups))

    def _cache(self, caches: list[Any], kind: LayerKind, groups: Sequence["_Group"]) -> "LaneCache":
        together = {number for group in groups for number in group.numbers}
        alone = [number for number in range(len(caches)) if number not in together]
        for number in alone:
            caches[number].reserve(self.places[number].num_rows, self.places[number].positions)
        if kind not in self._masks:
            self._masks[kind] = [
                caches[number].mask(place.num_rows) if number in alone else None
                for number, place in enumerate(self.places)
            ]
        return LaneCache(caches, self._masks[kind], self.splits, self._offset, groups, alone)


class BatchCache:
    """One layer's packed caches of a lane whose windows are all of one length: rows [B, H, L, K], as in any batch."""

    def __init__(self, group: "_Group", caches: Sequence[KVCache]) -> None:
        self.offset = group.bases
        self._group = group
        self._caches = caches

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, H, L, K]; returns what all slots hold, right-padded."""
        return self._group.append(self._caches, keys, values)


class LaneCache:
    """One layer's caches of all slots of a lane, where mlx-lm's layer expects one cache."""

    def __init__(
        self,
        caches: Sequence[Any],
        masks: Sequence[Mask],
        splits: tuple[int, ...],
        offset: mx.array,
        groups: Sequence["_Group"],
        alone: Sequence[int],
    ) -> None:
        """`offset` has the position of every row, for RoPE."""
        self.offset = offset
        self._caches = caches
        self._masks = masks
        self._splits = splits
        self._groups = groups
        self._alone = alone

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[list[Any], list[Any]]:
        """Append each slot's rows of [1, H, sum L, K]; returns what each group and each single slot holds now."""
        k, v = self._split(keys), self._split(values)
        held = [group.append(self._caches, group.stack(k), group.stack(v)) for group in self._groups]
        held += [self._caches[number].update_and_fetch(k[number], v[number]) for number in self._alone]
        return [keys for keys, _ in held], [values for _, values in held]

    def attend(self, attention: Attention, queries: mx.array, keys: list[Any], values: list[Any], scale: float) -> Any:
        """Each slot's queries of [1, H, sum L, K] on its own keys and values."""
        q = self._split(queries)
        outputs: dict[int, mx.array] = {}
        for group, k, v in zip(self._groups, keys, values, strict=False):
            together = attention(group.stack(q), k, v, cache=None, scale=scale, mask=group.mask)
            outputs |= zip(group.numbers, together.split(len(group.numbers)), strict=True)
        singles = zip(self._alone, keys[len(self._groups) :], values[len(self._groups) :], strict=True)
        for number, k, v in singles:
            cache, mask = self._caches[number], self._masks[number]
            outputs[number] = attention(q[number], k, v, cache=cache, scale=scale, mask=mask)
        return mx.concatenate([outputs[number] for number in range(len(q))], axis=2)

    def _split(self, rows: mx.array) -> list[mx.array]:
        return rows.split(self._splits, axis=2)


class _Group:
    """Windows of the same length L whose caches are packed together, in the layers that are `suited`."""

    def __init__(
        self, numbers: Sequence[int], places: Sequence[Place], capacity: int, suited: tuple[bool, ...]
    ) -> None:
        self.suited = suited
        self.numbers = numbers
        self.capacity = capacity
        L = places[numbers[0]].num_rows
        self.bases = mx.array([places[number].base for number in numbers], mx.int32)
        self._rows = self.bases[:, None, None, None] + mx.arange(L)[:, None]  # [B, 1, L, 1]
        self._end = max(places[number].base for number in numbers) + L
        self.mask = mx.arange(self._end) <= self._rows  # [B, 1, L, end]

    def append(self, caches: Sequence[KVCache], keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, H, L, K] of one layer; returns what the group's slots hold there, right-padded."""
        pack = packed([caches[number] for number in self.numbers], self.capacity, (keys, values))
        pack.update(keys, values, self._rows)
        return pack.keys[:, :, : self._end], pack.values[:, :, : self._end]

    def stack(self, rows: Sequence[mx.array]) -> mx.array:
        """The group's [1, H, L, K] of all windows' as [B, H, L, K]."""
        return mx.concatenate([rows[number] for number in self.numbers])


def _positions(place: Place) -> mx.array:
    return mx.arange(place.base, place.base + place.num_rows) if place.positions is None else place.positions


def serve_lanes(attention_layer: Any) -> None:
    """Let this kind of attention layer work on a LaneCache; on any other cache it does what it did.

    mlx-lm's layers all call the `scaled_dot_product_attention` of their own module with the cache.
    """
    module: Any = sys.modules[type(attention_layer).__module__]
    alone = module.scaled_dot_product_attention
    if getattr(alone, "serves_lanes", False):
        return

    def attend(queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **more: Any) -> Any:
        if isinstance(cache, LaneCache):
            return cache.attend(partial(alone, **more), queries, keys, values, scale)
        return alone(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)

    attend.serves_lanes = True  # type: ignore[attr-defined]
    module.scaled_dot_product_attention = attend
