"""All caches of one slot on one stage, in the order of the model's own list of caches.

The list is as long as the whole model. For a stub layer it holds the cache of a layer of the same kind on this stage,
or one that only counts: a model that makes a mask from its first layer's cache then gets the right mask.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import mlx.core as mx

from protos.brigade_pb2 import Cache
from worker.memory.layer_cache import LayerCache, RecurrentState, make_cache
from worker.model.probe_pass import Entry

Listed = LayerCache | tuple[LayerCache, ...]  # a layer with several caches indexes them by number


class Caches:
    """One slot's caches: `listed` as the model expects them, and those that are its `own`, without nesting."""

    def __init__(self, entries: Sequence[Entry], own_numbers: Sequence[int], cache: Cache) -> None:
        """Make empty caches.

        Args:
            entries: the model's own list of caches.
            own_numbers: the numbers of the entries whose layers are on this stage.
            cache: the kind of cache that the session chose.
        """
        self._entries, self.own_numbers, self._cache = entries, own_numbers, cache
        self._fill({number: _make(entries[number], cache) for number in own_numbers})

    def _fill(self, own: dict[int, Listed]) -> None:
        alike: dict[Any, Listed] = {}
        for number, listed in own.items():
            alike.setdefault(_kind(self._entries[number]), listed)
        self.own = [cache for listed in own.values() for cache in members(listed)]
        self._counting: list[LayerCache] = []
        self.listed: list[Listed] = []
        for number, entry in enumerate(self._entries):
            if number not in own and _kind(entry) not in alike:
                alike[_kind(entry)] = _make(entry, self._cache)
                self._counting += members(alike[_kind(entry)])
            self.listed.append(own.get(number, alike[_kind(entry)]))
        # states cannot be cut
        self.states = [each for each in (*self.own, *self._counting) if isinstance(each, RecurrentState)]
        self._settled: int | None = None  # the common length of its own caches between two passes

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.own)

    def arrays(self) -> list[mx.array]:
        """Return the buffers of the last layer that has any: they depend on all that the pass computed before."""
        layers = (members(self.listed[number]) for number in reversed(self.own_numbers))
        return next((arrays for layer in layers if (arrays := [a for cache in layer for a in cache.arrays()])), [])

    def state_arrays(self) -> list[mx.array]:
        """Return the recurrent states: no other result of a pass depends on them, and they hold what they depend on."""
        return [array for cache in self.own if isinstance(cache, RecurrentState) for array in cache.arrays()]

    def changing(self) -> list[object]:
        """Return the objects whose attributes a pass changes, for a `Snapshot`."""
        return [each for cache in (*self.own, *self._counting) for each in cache.changing()]

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
        for cache in self._counting:
            cache.cut(0)  # an embedding that runs here for another stage still fills its cache at every step
            cache.settle(length)

    def begin(self) -> None:
        """Record that a pass begins or was undone: the caches' lengths are unknown until `settle` or `cut`."""
        self._settled = None

    def reserve(self, num_rows: int, positions: mx.array | None, in_pack: Container[int] = ()) -> None:
        """Make room for a window [L], except in the entries `in_pack`, whose pack has the room."""
        for number in self.own_numbers:
            if number not in in_pack:
                for cache in members(self.listed[number]):
                    cache.reserve(num_rows, positions)

    def settle(self, length: int) -> None:
        """Record the end of a pass, after `length` tokens."""
        for cache in (*self.own, *self._counting):
            cache.settle(length)
        self._settled = length

    def fork(self, length: int) -> Caches:
        """Return another slot's caches that continue from the first `length` tokens. Raises CacheMismatch as `cut`."""
        other = Caches(self._entries, (), self._cache)
        other.own_numbers = self.own_numbers
        other._fill({number: _fork(self.listed[number], length) for number in self.own_numbers})
        for cache in other._counting:
            cache.settle(length)
        return other

    def close(self, besides: Sequence[Caches] = ()) -> None:
        """Free everything. `besides` are caches that are about to close too."""
        for number, cache in enumerate(self.own):
            cache.close(besides=[other.own[number] for other in besides])


def members(listed: Listed) -> tuple[LayerCache, ...]:
    return listed if isinstance(listed, tuple) else (listed,)


def _make(entry: Entry, cache: Cache) -> Listed:
    return tuple(make_cache(part, cache) for part in entry) if isinstance(entry, tuple) else make_cache(entry, cache)


def _fork(listed: Listed, length: int) -> Listed:
    return tuple(cache.fork(length) for cache in listed) if isinstance(listed, tuple) else listed.fork(length)


def _kind(entry: Entry) -> Any:
    """Return a key that is equal for entries with equal masks and offsets."""
    return tuple(map(_kind, entry)) if isinstance(entry, tuple) else (entry.window, entry.state_arrays)


class Snapshot:
    """Attributes of caches before a pass is built, to restore if the pass is never computed.

    It shares their arrays, so MLX would copy a buffer before writing to it: drop the snapshot before computing.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        unique = {id(each): each for each in objects}  # several caches may share a pack
        # lists are copied: a layer replaces the arrays in its own
        self._saved = [
            (each, {name: list(value) if isinstance(value, list) else value for name, value in vars(each).items()})
            for each in unique.values()
        ]

    def restore(self) -> None:
        for each, attributes in self._saved:
            now = vars(each)
            now.update(attributes)  # before deleting: other threads read these objects
            for name in now.keys() - attributes.keys():
                del now[name]
