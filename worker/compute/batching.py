"""A lane: the windows of several slots in one pass.

All rows lie end to end, so that each matrix product processes all of them. In place of a cache a layer gets a `View` of
one cache per slot. A module that takes a cache is a *unit*. By its `LaneForm` a unit processes the lane, or windows of
equal length side by side as an ordinary batch, or one window after another. A `Run` is windows side by side; if their
slots are adjacent in a `Pack`, the slots that share buffers, nothing is copied for it.
Shapes: B slots, L window length, D hidden, H heads, K head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from worker.memory.kv_cache import KVCache, Mask, append_together, fetch_together, row_sights, wait_for
from worker.memory.recurrent_state import LayerCall, RecurrentState, StateStack, can_be_stacked
from worker.memory.slot_caches import Caches, pack_together
from worker.model.families import LaneForm
from worker.model.stub_layers import RunLayer, first_part

Attention = Callable[..., mx.array]


@dataclass(frozen=True)
class LaneWindow:
    """The place of one window: its slot's caches, already cut to `base`, and its rows."""

    caches: Caches
    base: int
    num_rows: int
    positions: mx.array | None = None  # [L] int32; None if they count up from the base
    has_drafts: bool = False  # some rows may be rejected, so the next window may cut inside this one
    num_canvas: int = 0  # trailing rows that see all rows

    @property
    def row_positions(self) -> mx.array:
        """The position of every row [L]."""
        return mx.arange(self.base, self.base + self.num_rows) if self.positions is None else self.positions

    def reserve(self) -> None:
        """Make room for the rows in the slot's caches."""
        self.caches.reserve(self.num_rows, self.positions, has_drafts=self.has_drafts, num_canvas=self.num_canvas)


def canvas_rows(places: Sequence[LaneWindow]) -> mx.array | None:
    """Return which rows of all windows [1, sum L] belong to a canvas; None if none does."""
    if not any(place.num_canvas for place in places):
        return None
    return mx.array(np.concatenate([np.arange(p.num_rows) >= p.num_rows - p.num_canvas for p in places]))[None]


class Lane:
    """The windows of one pass, with indices and masks that all layers share."""

    def __init__(self, places: Sequence[LaneWindow]) -> None:
        self.places = places
        self.starts = [0, *accumulate(place.num_rows for place in places)]  # each window's first row
        self.num_rows = self.starts.pop()
        self._orders: dict[tuple[int, ...], mx.array] = {}
        self.offset = _joined_positions(places)
        pack_together([place.caches for place in places], [place.base + place.num_rows for place in places])
        for place in places:
            place.caches.begin()
            place.reserve()
        self.runs = list(_runs(self))

    def views(self) -> list[View]:
        """Return the views that replace the model's list of caches."""
        return [View(self, entries) for entries in zip(*(place.caches.listed for place in self.places), strict=True)]

    @cached_property
    def equal(self) -> list[Run]:
        """Runs of windows of equal length, regardless of packs; windows at base 0 have runs of their own."""
        alike: dict[Any, list[int]] = defaultdict(list)
        for number, place in enumerate(self.places):
            alike[place.num_rows, place.base == 0].append(number)
        return [Run(numbers, self) for numbers in alike.values()]

    @cached_property
    def singles(self) -> list[Run]:
        """Runs of one window each."""
        return [Run([number], self) for number in range(len(self.places))]

    def singles_besides(self, runs: Sequence[Run]) -> list[Run]:
        """Return the single runs of windows that are in none of these runs."""
        if runs and runs[0].is_lane:
            return []
        grouped = {number for run in runs for number in run.numbers}
        return [single for single in self.singles if single.numbers[0] not in grouped]

    def in_order(self, parts: Sequence[mx.array], runs: Sequence[Run], axis: int = 1) -> mx.array:
        """Join the runs' rows, which lie end to end in each part, in the lane's order."""
        if runs[0].is_lane:
            return parts[0]
        joined = mx.concatenate(list(parts), axis=axis) if len(parts) > 1 else parts[0]
        numbers = tuple(number for run in runs for number in run.numbers)
        if numbers == tuple(range(len(self.places))):
            return joined
        if numbers not in self._orders:
            self._orders[numbers] = mx.array(np.argsort(np.concatenate([run.rows for run in runs])))
        return mx.take(joined, self._orders[numbers], axis=axis)

    def settle(self) -> None:
        for place in self.places:
            place.caches.settle(place.base + place.num_rows)


class Run:
    """Windows of equal length that go side by side; in `Lane.runs` their slots are adjacent in a pack."""

    def __init__(self, numbers: Sequence[int], lane: Lane) -> None:
        """`numbers` are the windows' indices in the lane, in the order of their slots in a pack."""
        places = lane.places
        self.numbers = numbers
        self.is_lane = list(numbers) == list(range(len(places)))  # has all windows in the lane's order
        self._starts = [lane.starts[number] for number in numbers]
        self.counts_up = all(places[number].positions is None for number in numbers)
        self._places = [places[number] for number in numbers]
        self._end = max(place.base for place in self._places) + self._places[0].num_rows
        self._masks: dict[int | None, mx.array | None] = {}
        self._found_rows: dict[tuple[int, int], mx.array] = {}  # by the arguments of `_buffer_rows`

    @cached_property
    def rows(self) -> np.ndarray:
        """The indices of its rows in the lane [B * L]."""
        return (np.array(self._starts)[:, None] + np.arange(self._places[0].num_rows)).reshape(-1)

    @cached_property
    def _selection(self) -> slice | mx.array:
        """The index that selects its rows from all rows; a slice if possible, which copies nothing."""
        first, last = int(self.rows[0]), int(self.rows[-1])
        is_span = (np.diff(self.rows) == 1).all()
        return slice(first, last + 1) if is_span else mx.array(self.rows)

    def take(self, rows: mx.array, axis: int = 1) -> mx.array:
        """Select its rows, end to end, from the rows of all windows."""
        return rows if self.is_lane else rows[(slice(None),) * axis + (self._selection,)]

    def heads(self, rows: mx.array) -> mx.array:
        """Return its part of [1, H, sum L, K] as [B, H, L, K]."""
        own = self.take(rows, axis=2)
        _, H, _, K = own.shape
        return own.reshape(H, len(self.numbers), -1, K).swapaxes(0, 1) if len(self.numbers) > 1 else own

    @cached_property
    def bases(self) -> mx.array:
        """The position of each slot's first row [B]."""
        return mx.array([place.base for place in self._places], mx.int32)

    @cached_property
    def _cache_rows(self) -> mx.array:
        """The index in the cache at which each row is written [B, L]."""
        return self.bases[:, None] + mx.arange(self._places[0].num_rows)

    def _buffer_rows(self, num_heads: int, capacity: int) -> mx.array:
        """Return the index of each new row [B, H, L] among all rows of a pack's flattened buffer."""
        key = num_heads, capacity
        if key not in self._found_rows:
            caches = self._places[0].caches
            first = caches.pack.slots.index(caches) if caches.pack else 0
            slots = np.arange(first, first + len(self._places))[:, None, None]
            bases = np.array([place.base for place in self._places])[:, None, None]
            found = (slots * num_heads + np.arange(num_heads)[:, None]) * capacity + bases
            self._found_rows[key] = mx.array((found + np.arange(self._places[0].num_rows)).astype(np.uint32))
        return self._found_rows[key]

    def mask(self, window_size: int | None) -> mx.array | None:
        """Return which held rows each row sees [B, 1, L, end]: the last `window_size` ones, or all.

        None if every row sees all of them: attention needs no mask then, and is faster.
        """
        if window_size not in self._masks:
            self._masks[window_size] = None if self._sees_all(window_size) else self._in_sight(window_size)
        return self._masks[window_size]

    def _sees_all(self, window_size: int | None) -> bool:
        """Return whether the windows have one row each, at the same base, from which nothing is out of sight."""
        is_short = window_size is None or self._end <= window_size
        return is_short and all(place.num_rows == 1 and place.base == self._end - 1 for place in self._places)

    def _in_sight(self, window_size: int | None) -> mx.array:
        last_seen = self.bases[:, None] + self._sights[0]
        in_sight = mx.arange(self._end) <= last_seen[:, None, :, None]
        return in_sight & self._is_near(window_size) if window_size else in_sight

    @cached_property
    def _sights(self) -> tuple[mx.array, mx.array]:
        """The `row_sights` of all windows: two arrays [B, L]."""
        sights = (row_sights(place.num_rows, place.num_canvas, place.caches.grid) for place in self._places)
        last, back = zip(*sights, strict=True)
        return mx.array(np.stack(last)), mx.array(np.stack(back))

    def _is_near(self, window_size: int) -> mx.array:
        """Return which held rows are less than `window_size` positions before the row whose window applies."""
        own = mx.stack([place.row_positions for place in self._places])[:, None, :, None]
        held = mx.broadcast_to(mx.arange(self._end), (len(self._places), 1, 1, self._end))
        near = mx.take_along_axis(own, self._sights[1][:, None, :, None], axis=2)
        return mx.put_along_axis(held, self._cache_rows[:, None, None], own.swapaxes(2, 3), axis=3) > near - window_size

    def append(self, caches: Sequence[KVCache], keys: mx.array, values: mx.array) -> None:
        """Append [B, H, L, K] to one layer's caches of the run."""
        append_together(caches, keys, values, self._buffer_rows)

    def fetch(self, caches: Sequence[KVCache]) -> tuple[mx.array, mx.array]:
        """Return the right-padded contents of one layer's caches of the run."""
        return fetch_together(caches, self._end)


class LaneMask:
    """The mask that a model passes to its layers: one per slot, made before the layers append, and one per run."""

    def __init__(self, alone: Sequence[Mask], window_size: int | None) -> None:
        self.alone, self._window_size = alone, window_size

    def of_run(self, run: Run) -> mx.array | None:
        return run.mask(self._window_size)


class View:
    """Several slots' caches in place of one, for one entry of the model's list of caches or for the whole list."""

    def __init__(self, lane: Lane, caches: Sequence[Any]) -> None:
        self._lane, self._caches = lane, caches
        self._runs = [run for run in lane.runs if _is_packed(caches[run.numbers[0]])]
        self._alone = lane.singles_besides(self._runs)

    @property
    def is_batch(self) -> bool:
        """Whether these are keys and values only, side by side in one pack in the lane's order."""
        return self._is_stateless and any(run.is_lane and run.counts_up for run in self._runs)

    @cached_property
    def _is_stateless(self) -> bool:
        return all(isinstance(cache, KVCache) for cache in flat(self._caches[0]))

    @property
    def offset(self) -> mx.array:
        """Every row's position."""
        return self._lane.offset

    def __getitem__(self, number: int) -> View:
        """Return the view of cache `number` of a layer with several caches."""
        return View(self._lane, [cache[number] for cache in self._caches])

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> LaneMask | None:
        """Return the masks for each slot's rows; called by mlx-lm's models as on a single cache."""
        if isinstance(self._caches[0], RecurrentState):
            return None
        places = zip(self._caches, self._lane.places, strict=True)
        return LaneMask([c.make_mask(p.num_rows, return_array, window_size) for c, p in places], window_size)

    def layer_calls(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Callable[[], LayerCall]]]:
        """Yield each slot's caches, and a function that returns a layer's call for its window."""

        def call(number: int) -> LayerCall:
            own_args = [self._recorded(arg, number) for arg in args]
            own_kwargs = {key: self._recorded(arg, number) for key, arg in kwargs.items()}
            return LayerCall(own_args, own_kwargs, self._lane.places[number].num_rows)

        for number, caches in enumerate(self._caches):
            yield caches, partial(call, number)

    def run(self, unit: RunLayer, args: Sequence[Any], kwargs: dict[str, Any], form: LaneForm) -> Any:
        """Run a unit over the lane. Its arguments include this view and arrays with all windows' rows [1, sum L, D].

        Args:
            form: how the unit can process the windows of a lane.
        """
        if form is LaneForm.ROWS and isinstance(self._caches[0], KVCache):
            groups = [run for run in self._runs if run.is_lane and run.counts_up]
            if not groups:
                return unit(*args, **kwargs)
        else:
            groups = self._groups(form)
        results = []
        for number, group in enumerate(groups, 1):
            results.append(_end_to_end(self._run_group(group, unit, args, kwargs)))
            if number < len(groups):
                kept = [cache for entry in self._caches for cache in flat(entry) if isinstance(cache, KVCache)]
                wait_for(kept, [first_part(results[-1])])
        if not isinstance(results[0], tuple | list):
            return self._lane.in_order(results, groups)
        parts = zip(*results, strict=True)
        return tuple(None if part[0] is None else self._lane.in_order(part, groups) for part in parts)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[list[Any], list[Any]]:
        """Append each slot's rows of [1, H, sum L, K]; return all keys and values per run and per single slot."""
        runs = [(run, [self._caches[number] for number in run.numbers]) for run in self._runs]
        alone = [(single, self._caches[single.numbers[0]]) for single in self._alone]
        for run, caches in runs:
            run.append(caches, run.heads(keys), run.heads(values))
        for single, cache in alone:
            cache.append(single.heads(keys), single.heads(values))
        # read after all writes: a pending read would force a copy before the next write
        held = [run.fetch(caches) for run, caches in runs] + [cache.fetch() for _, cache in alone]
        return [keys for keys, _ in held], [values for _, values in held]

    def attend(
        self, attention: Attention, queries: mx.array, keys: list[Any], values: list[Any], mask: LaneMask, **more: Any
    ) -> mx.array:
        """Run attention for each slot's queries of [1, H, sum L, K] on the results of `update_and_fetch`."""
        parts = []
        for run, k, v in zip([*self._runs, *self._alone], keys, values, strict=True):
            is_alone, [number, *_] = len(run.numbers) == 1, run.numbers
            cache, own_mask = (self._caches[number], mask.alone[number]) if is_alone else (None, mask.of_run(run))
            found = attention(run.heads(queries), k, v, cache=cache, mask=own_mask, **more)
            _, H, _, K = found.shape
            parts.append(found if is_alone else found.swapaxes(0, 1).reshape(1, H, -1, K))
        return self._lane.in_order(parts, [*self._runs, *self._alone], axis=2)

    def _groups(self, form: LaneForm) -> list[Run]:
        """Return the runs for which a unit is called separately; a run of several windows is a batch."""
        if form is LaneForm.ALONE:
            candidates = []
        elif any(isinstance(cache, KVCache) for cache in flat(self._caches[0])):
            candidates = self._runs
        else:
            candidates = self._lane.equal
        batches = [run for run in candidates if len(run.numbers) > 1 and self._can_be_batch(run)]
        return batches + self._lane.singles_besides(batches)

    def _can_be_batch(self, run: Run) -> bool:
        """Return whether the run's positions count up, and its states, if any, can be put side by side."""
        if not run.counts_up or self._is_stateless:
            return run.counts_up
        states = [[each for each in flat(self._caches[n]) if isinstance(each, RecurrentState)] for n in run.numbers]
        return all(map(can_be_stacked, zip(*states, strict=True)))

    def _run_group(self, run: Run, unit: RunLayer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a unit for one slot or for a batch and return its result [B, ...]."""
        if len(run.numbers) == 1:
            return unit(*[self._of_slot(arg, *run.numbers) for arg in args],
                        **{key: self._of_slot(arg, *run.numbers) for key, arg in kwargs.items()})  # fmt: skip
        stacks: dict[int, StateStack] = {}
        result = unit(*[self._of_batch(arg, run, stacks) for arg in args],
                      **{key: self._of_batch(arg, run, stacks) for key, arg in kwargs.items()})  # fmt: skip
        for stack in stacks.values():
            stack.give_back()
        return result

    def _recorded(self, value: Any, number: int) -> Any:
        """Return an argument of one slot for a `LayerCall`."""
        if isinstance(value, View):
            return LayerCall.HERE
        own = self._of_slot(value, number)
        return mx.contiguous(own) if self._holds_rows(value) else own  # a slice would keep the rows of other slots

    def _of_slot(self, value: Any, number: int) -> Any:
        """Return one slot's part of an argument: its mask, caches, rows or position."""
        if isinstance(value, LaneMask):
            return value.alone[number]
        if isinstance(value, View):
            return value._caches[number]
        if value is self._lane.offset:
            place = self._lane.places[number]
            return place.base if place.positions is None else place.positions
        return self._lane.singles[number].take(value) if self._holds_rows(value) else value

    def _of_batch(self, value: Any, run: Run, stacks: dict[int, StateStack]) -> Any:
        """Return a batch's part of an argument; add the stacks of states that are made for it to `stacks`."""
        if isinstance(value, LaneMask):
            return value.of_run(run)
        if isinstance(value, View):
            return _batch([value._caches[number] for number in run.numbers], run, stacks)
        if value is self._lane.offset:
            return run.bases
        if not self._holds_rows(value):
            return value
        return run.take(value).reshape(len(run.numbers), -1, *value.shape[2:])

    def _holds_rows(self, value: Any) -> bool:
        return isinstance(value, mx.array) and value.shape[:2] == (1, self._lane.num_rows)


class BatchCache:
    """Packed caches of a run, used like the cache of an ordinary batch: rows [B, H, L, K]."""

    def __init__(self, caches: Sequence[KVCache], run: Run) -> None:
        self._caches, self._run = caches, run

    @property
    def offset(self) -> mx.array:
        """The position of each slot's first row."""
        return self._run.bases

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        return self._run.mask(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, H, L, K] and return all slots' right-padded keys and values."""
        self._run.append(self._caches, keys, values)
        return self._run.fetch(self._caches)

    @property
    def keys(self) -> mx.array:
        """The buffer, for models that add a dependency on another array to it."""
        return self._caches[0].keys

    @keys.setter
    def keys(self, buffer: mx.array) -> None:
        self._caches[0].keys = buffer

    @property
    def values(self) -> mx.array:
        return self._caches[0].values

    @values.setter
    def values(self, buffer: mx.array) -> None:
        self._caches[0].values = buffer


def _batch(caches: Sequence[Any], run: Run, stacks: dict[int, StateStack]) -> Any:
    """Return the cache of a batch for these slots' caches."""
    if isinstance(caches[0], tuple | list):
        return tuple(_batch(parts, run, stacks) for parts in zip(*caches, strict=True))
    if isinstance(caches[0], KVCache):
        return BatchCache(caches, run)
    return stacks.setdefault(id(caches[0]), StateStack(caches))  # a state may occur several times in the list


def _joined_positions(places: Sequence[LaneWindow]) -> mx.array:
    """Return the position of every row [sum L]."""
    if any(place.positions is not None for place in places):
        return mx.concatenate([place.row_positions for place in places])
    return mx.array(np.concatenate([np.arange(p.base, p.base + p.num_rows, dtype=np.int32) for p in places]))


def _runs(lane: Lane) -> Iterator[Run]:
    """Yield the longest runs of at least two windows."""
    packs: dict[Any, dict[int, int]] = defaultdict(dict)  # by pack and length: windows by their slots' indices
    for number, place in enumerate(lane.places):
        if pack := place.caches.pack:
            packs[id(pack), place.num_rows][pack.slots.index(place.caches)] = number
    for numbers in packs.values():
        run: list[int] = []
        for slot in sorted(numbers):
            if run and slot - 1 not in numbers:
                if len(run) > 1:
                    yield Run(run, lane)
                run = []
            run.append(numbers[slot])
        if len(run) > 1:
            yield Run(run, lane)


def _is_packed(entry: Any) -> bool:
    """Return whether an entry has keys and values, all of them in the buffers of the slot's pack."""
    kept = [cache for cache in flat(entry) if isinstance(cache, KVCache)]
    return bool(kept) and all(cache.can_be_packed for cache in kept)


def flat(entry: Any) -> Iterator[Any]:
    """Yield the items of nested tuples and lists."""
    if not isinstance(entry, tuple | list):
        yield entry
        return
    for part in entry:
        if isinstance(part, tuple | list):
            yield from flat(part)
        else:
            yield part


def _end_to_end(result: Any) -> Any:
    """Return a batch's result [B, L, ...] as [1, B * L, ...], with None for parts that do not have rows."""
    if isinstance(result, tuple | list):
        return tuple(_end_to_end(part) if isinstance(part, mx.array) and part.ndim >= 3 else None for part in result)
    return result.reshape(1, -1, *result.shape[2:])
