"""All caches of one slot on one stage, in the order of the model's own list of caches.

The list is as long as the whole model. For a stub layer it holds the cache of a layer of the same kind on this stage,
or one that only counts: a model that makes a mask from its first layer's cache then gets the right mask.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from protos.brigade_pb2 import Cache
from worker.memory.cache import Int8Cache, KVCache, LayerCache, Mask, RecurrentState
from worker.model.cachespec import INT8, STATE, WHOLE, CacheSpec, Form, Memory, cache_spec
from worker.model.model_info import Entry


class CacheGroup:
    """The caches of a layer that has several; the layer indexes them by number."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = list(caches)

    def __getitem__(self, number: int) -> LayerCache:
        return self.caches[number]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches for array in cache.arrays()]

    def changing(self) -> list[object]:
        return [each for cache in self.caches for each in cache.changing()]

    @property
    def has_room(self) -> bool:
        return all(cache.has_room for cache in self.caches)

    def cut(self, length: int) -> None:
        for cache in self.caches:
            cache.cut(length)

    def reserve(self, num_rows: int, positions: mx.array | None) -> None:
        for cache in self.caches:
            cache.reserve(num_rows, positions)

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        return self.caches[0].make_mask(num_rows, return_array, window_size)

    def settle(self, length: int) -> None:
        for cache in self.caches:
            cache.settle(length)

    def fork(self, length: int) -> "CacheGroup":
        return CacheGroup([cache.fork(length) for cache in self.caches])

    def close(self, besides: Sequence[LayerCache] = ()) -> None:
        for cache in self.caches:
            cache.close()


class Caches:
    """One slot's caches: its `own`, whose numbers are `own_numbers`, and `listed` as the model expects them."""

    def __init__(self, entries: Sequence[Entry], own: Sequence[int], cache: Cache) -> None:
        """Empty caches.

        Args:
            entries: the model's own list of caches.
            own: the numbers of the caches whose layers are on this stage.
            cache: the kind that the session wants.
        """
        self._entries, self.own_numbers, self._cache = entries, own, cache
        self._fill([_make(entries[number], cache) for number in own])

    def _fill(self, own: list[LayerCache]) -> None:
        here = dict(zip(self.own_numbers, own, strict=True))
        alike: dict[Any, LayerCache] = {}
        for number, cache in here.items():
            alike.setdefault(_kind(self._entries[number]), cache)
        self.own = own
        self._counting: list[LayerCache] = []
        self.listed: list[LayerCache] = []
        for number, entry in enumerate(self._entries):
            if number not in here and _kind(entry) not in alike:
                alike[_kind(entry)] = _make(entry, self._cache)
                self._counting.append(alike[_kind(entry)])
            self.listed.append(here.get(number, alike[_kind(entry)]))
        self.states = [each for each in self.changing() if isinstance(each, RecurrentState)]  # which cannot be cut
        self._settled: int | None = None  # the common length of its own caches between two passes

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.own)

    def arrays(self) -> list[mx.array]:
        """The buffers of the last layer that has any: they depend on all that the pass has computed for others."""
        return next((arrays for cache in reversed(self.own) if (arrays := cache.arrays())), [])

    def changing(self) -> list[object]:
        """The objects whose attributes a pass changes, for a `Snapshot`."""
        return [each for cache in [*self.own, *self._counting] for each in cache.changing()]

    @property
    def has_room(self) -> bool:
        """Whether one more row fits without another buffer."""
        return all(cache.has_room for cache in self.own)

    def cut(self, length: int) -> None:
        """Raises CacheMismatch if one of them cannot be cut there."""
        if length != self._settled:
            self._settled = None
            for cache in self.own:
                cache.cut(length)
            self._settled = length
        for cache in self._counting:
            cache.cut(0)  # an embedding that runs here for another stage still fills its cache at every step
            cache.settle(length)

    def reserve(self, num_rows: int, positions: mx.array | None) -> None:
        for cache in self.own:
            cache.reserve(num_rows, positions)

    def begin(self) -> None:
        """Note that a pass begins or was undone: the caches' lengths are unknown until `settle` or `cut`."""
        self._settled = None

    def settle(self, length: int) -> None:
        """Note the end of a pass: there are `length` tokens now."""
        for cache in [*self.own, *self._counting]:
            cache.settle(length)
        self._settled = length

    def fork(self, length: int) -> "Caches":
        """Return another slot's caches that continue from the first `length` tokens. Raises CacheMismatch as `cut`."""
        other = Caches.__new__(Caches)
        other._entries, other.own_numbers, other._cache = self._entries, self.own_numbers, self._cache
        other._fill([cache.fork(length) for cache in self.own])
        for cache in other._counting:
            cache.settle(length)
        return other

    def close(self, besides: "Sequence[Caches]" = ()) -> None:
        """Free everything. `besides` are caches that are about to close too."""
        for number, cache in enumerate(self.own):
            cache.close(besides=[other.own[number] for other in besides])


def _make(entry: Entry, cache: Cache) -> LayerCache:
    return (
        CacheGroup([make_cache(part, cache) for part in entry])
        if isinstance(entry, tuple)
        else make_cache(entry, cache)
    )


def _kind(entry: Entry) -> Any:
    """Return a key that is equal for caches with equal masks and offsets."""
    if isinstance(entry, tuple):
        return tuple(map(_kind, entry))
    return entry.window, entry.state_arrays


def make_cache(memory: Memory, cache: Cache) -> LayerCache:
    """Return an empty cache for one memory of a layer, of the kind that the session chose."""
    spec = cache_spec(memory, cache)
    return RecurrentState(memory.state_arrays) if spec.form is STATE else _FRESH[spec.form](spec)


_FRESH: dict[Form, Callable[[CacheSpec], LayerCache]] = {
    WHOLE: lambda spec: KVCache(spec.window, spec.keep),
    INT8: lambda spec: Int8Cache(spec.window, spec.keep),
}


class Snapshot:
    """Attributes of caches before a pass is built, to restore if the pass is never computed.

    It shares their arrays, so MLX would copy a buffer before writing to it: drop the snapshot before computing.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        unique = {id(each): each for each in objects}  # several caches may share a pack
        self._saved = [(each, _copied(vars(each))) for each in unique.values()]

    def restore(self) -> None:
        for each, attributes in self._saved:
            now = vars(each)
            now.update(attributes)  # before deleting: other threads read these objects
            for name in now.keys() - attributes.keys():
                del now[name]


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Lists are copied: a layer replaces the arrays in its own."""
    return {name: list(value) if isinstance(value, list) else value for name, value in attributes.items()}
