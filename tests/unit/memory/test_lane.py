"""Whatever way windows of several slots lie in a lane, each sees what it would see alone."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention

from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, Cache
from worker.memory.lane import BatchCache, Lane, LaneCache, LaneMask, LaneWindow, View
from worker.memory.slot_caches import Caches, members
from worker.model.cache_spec import Memory
from worker.model.probe_pass import Entry

H, K = 2, 32
FULL, WINDOW, STATE = Memory(None, H, K, K, 4), Memory(6, H, K, K, 4), Memory(state_arrays=1)
BOTH = FULL, STATE
CHOICES = Cache(), Cache(kind=CACHE_INT8), Cache(kind=CACHE_ROTATING, size=8, keep=2)


def attention_layer(x: mx.array, mask: Any, cache: Any) -> mx.array:
    """Rows [B, L, H * K] are queries, keys and values at once."""
    B, L, _ = x.shape
    q = x.reshape(B, L, H, K).transpose(0, 2, 1, 3)
    k, v = cache.update_and_fetch(q, -q)
    if isinstance(cache, LaneCache):
        found = cache.attend(scaled_dot_product_attention, q, k, v, mask=mask, scale=0.1)
    else:
        found = scaled_dot_product_attention(q, k, v, cache=cache, scale=0.1, mask=mask)
    return found.transpose(0, 2, 1, 3).reshape(B, L, -1)


def recurrent_layer(x: mx.array, mask: Any, cache: Any) -> mx.array:
    """Each row and all before it, of which the state has the sum."""
    assert mask is None
    total = mx.cumsum(x, axis=1) + (0 if cache[0] is None else cache[0])
    cache[0] = total[:, -1:]
    return total


def layer_of_both(x: mx.array, mask: Any, cache: Any) -> mx.array:
    return attention_layer(x, mask, cache[0]) + recurrent_layer(x, None, cache[1])


LAYERS = {FULL: attention_layer, WINDOW: attention_layer, STATE: recurrent_layer, BOTH: layer_of_both}


def make(entry: Entry, held: Sequence[int], choices: Sequence[Cache]) -> list[Caches]:
    """A slot's caches per length, filled with rows of their own."""
    slots = [Caches([entry], [0], choice) for choice in choices]
    for number, (caches, length) in enumerate(zip(slots, held, strict=True)):
        if length:
            mx.random.seed(number)
            alone(entry, mx.random.normal((1, length, H * K)), LaneWindow(caches, 0, length))
    return slots


def alone(entry: Entry, x: mx.array, place: LaneWindow, window: int | None = None) -> mx.array:
    place.caches.reserve(place.num_rows, place.positions)
    [cache] = place.caches.listed
    mask = members(cache)[0].make_mask(place.num_rows, window_size=window)
    h = LAYERS[entry](x, mask, cache)
    place.caches.settle(place.base + place.num_rows)
    return h


def lane_of(x: Sequence[mx.array], places: Sequence[LaneWindow], side_by_side: bool) -> tuple[Lane, mx.array]:
    lane = Lane(places, side_by_side=side_by_side)
    return lane, mx.concatenate(x, axis=0 if side_by_side else 1)


def check(
    entry: Entry, steps: Sequence[tuple[int, ...]], *, held: Sequence[int] = (3, 5, 9), window: int | None = None,
    choices: Sequence[Cache] = (CHOICES[0],) * 3, side_by_side: bool = False,
) -> list[type]:  # fmt: skip
    """Steps of three slots, together and alone, are the same to rounding. Returns the kinds of views there were."""
    together, single = make(entry, held, choices), make(entry, held, choices)
    bases, kinds = list(held), []
    for number, counts in enumerate(steps):
        mx.random.seed(100 + number)
        x = [mx.random.normal((1, count, H * K)) for count in counts]
        lane, joined = lane_of(
            x, [LaneWindow(*each) for each in zip(together, bases, counts, strict=True)], side_by_side
        )
        [view] = lane.views
        mask = view[0].make_mask(9, window_size=window) if entry is BOTH else view.make_mask(9, window_size=window)
        result = view.run(LAYERS[entry], [joined, mask], {"cache": view})
        lane.settle()
        found = lane.split(result)
        for i, (caches, base, count) in enumerate(zip(single, bases, counts, strict=True)):
            expected = alone(entry, x[i], LaneWindow(caches, base, count), window)
            assert found[i].shape == expected.shape
            assert mx.allclose(found[i], expected, atol=1e-5), (entry, counts, i)
        bases = [base + count for base, count in zip(bases, counts, strict=True)]
        kinds.append(type(view))
        for caches, base in zip((*together, *single), (*bases, *bases), strict=True):
            caches.cut(base)  # as every window begins
    return kinds


EQUAL, MIXED = (2, 2, 2), (1, 4, 1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("steps", [[(1, 1, 1)] * 3, [EQUAL, EQUAL], [MIXED, MIXED], [MIXED, (1, 1, 1), EQUAL]], ids=str)
def test_rows_end_to_end_over_full_caches(steps: list[tuple[int, ...]], window: int | None) -> None:
    assert set(check(FULL, steps, window=window)) == {LaneCache}


@pytest.mark.parametrize("window", [None, 4])
def test_windows_side_by_side_over_full_caches_are_a_batch(window: int | None) -> None:
    assert set(check(FULL, [(1, 1, 1), EQUAL, (1, 1, 1)], window=window, side_by_side=True)) == {BatchCache}


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    ("entry", "view"), [(WINDOW, LaneCache), (STATE, View), (BOTH, View)], ids=["window", "state", "both"]
)
def test_caches_that_cannot_be_packed_take_slot_after_slot(entry: Entry, view: type, side_by_side: bool) -> None:
    steps = [(1, 1, 1), EQUAL, EQUAL] if side_by_side else [(1, 1, 1), MIXED, EQUAL]
    assert set(check(entry, steps, side_by_side=side_by_side)) == {View if side_by_side else view}


def test_slots_of_caches_of_all_kinds_share_a_lane() -> None:
    check(FULL, [(1, 1, 1), MIXED, EQUAL, (1, 1, 1)], choices=CHOICES)
    two_alike = CHOICES[0], CHOICES[0], CHOICES[1]
    for held, choices in (((3, 5, 9), CHOICES), ((0, 0, 9), two_alike), ((255, 255, 9), two_alike)):
        kinds = check(FULL, [(1, 1, 1), EQUAL, (1, 1, 1)], held=held, choices=choices, side_by_side=True)
        assert set(kinds) == {View}


def test_caches_of_very_different_lengths_share_a_lane() -> None:
    check(FULL, [(1, 1, 1), MIXED, EQUAL], held=(0, 300, 255))
    check(FULL, [(1, 1, 1), EQUAL, EQUAL], held=(0, 300, 255), side_by_side=True)


@pytest.mark.parametrize(
    ("bases", "order", "side_by_side", "window"),
    [
        ((0, 5), (1, 0, 2), True, None),  # as a diffusion decoder has them
        ((4, 5), (4, 0, 1), False, 4),  # of a model whose mask is a window though its caches hold all rows
    ],
    ids=["side by side", "end to end"],
)
def test_reordered_windows_see_as_far_as_their_positions_say(
    bases: tuple[int, int], order: tuple[int, ...], side_by_side: bool, window: int | None
) -> None:
    together, single = (make(FULL, bases, CHOICES[:1] * 2) for _ in range(2))
    x = [mx.random.normal((1, 3, H * K)) for _ in range(2)]
    positions = [mx.array([base + place for place in order], mx.int32) for base in bases]
    places = [LaneWindow(c, b, 3, p) for c, b, p in zip(together, bases, positions, strict=True)]
    lane, joined = lane_of(x, places, side_by_side)
    [view] = lane.views
    mask = view.make_mask(3, window_size=window)
    found = lane.split(view.run(attention_layer, [joined, mask], {"cache": view}))
    for i, caches in enumerate(single):
        expected = alone(FULL, x[i], LaneWindow(caches, bases[i], 3, positions[i]), window)
        assert mx.allclose(found[i], expected, atol=1e-5)


def test_every_row_has_its_position_and_side_by_side_every_slot_the_one_of_its_first() -> None:
    slots = make(FULL, (3, 5, 0), CHOICES[:1] * 3)
    reordered = mx.array([9, 5, 7], mx.int32)
    places = [LaneWindow(slots[0], 3, 2), LaneWindow(slots[1], 5, 3, reordered), LaneWindow(slots[2], 0, 1)]
    lane = Lane(places)
    assert lane.views[0].offset.tolist() == [3, 4, 9, 5, 7, 0] and not lane.counts_up
    batch = Lane([LaneWindow(slots[0], 3, 2), LaneWindow(slots[2], 0, 2)], side_by_side=True)
    assert batch.views[0].offset.tolist() == [3, 0]


def test_rows_are_parted_as_they_were_joined() -> None:
    slots = make(FULL, (0, 0, 0), CHOICES[:1] * 3)
    lane = Lane([LaneWindow(caches, 0, count) for caches, count in zip(slots, MIXED, strict=True)])
    x = mx.random.normal((1, 6, 5))
    parts = lane.split(x)
    assert [part.shape[1] for part in parts] == list(MIXED) and mx.array_equal(lane.join(parts), x)
    heads = x.reshape(1, 5, 6, 1)
    assert mx.array_equal(lane.join(lane.split(heads, axis=2), axis=2), heads)


def test_slot_after_slot_each_gets_its_own_mask_cache_and_numbers() -> None:
    """And what layers return beside their rows comes together again, if it has rows."""
    slots = make(STATE, (2, 4), CHOICES[:1] * 2)
    lane = Lane([LaneWindow(slots[0], 2, 3), LaneWindow(slots[1], 4, 3)], side_by_side=True)
    [view] = lane.views
    seen: list[tuple[Any, ...]] = []

    def layer(x: mx.array, mask: Any, offset: mx.array, scale: mx.array, *, cache: Any) -> Any:
        seen.append((mask, offset.tolist(), scale.tolist(), cache))
        return x + 1, {"not": "rows"}, 2 * x, mx.zeros((2,))

    mask = LaneMask({0: "first", 1: "second"}, [])
    x = mx.random.normal((2, 3, 5))
    h, other, more, none = view.run(layer, [x, mask, view.offset, mx.array(0.5)], {"cache": view})
    assert seen == [("first", [2], 0.5, slots[0].own[0]), ("second", [4], 0.5, slots[1].own[0])]
    assert mx.array_equal(h, x + 1) and mx.array_equal(more, 2 * x) and other is none is None


def test_a_slot_leaves_its_lane_with_its_own_rows() -> None:
    slots = make(FULL, (3, 5, 9), CHOICES[:1] * 3)
    lane, x = lane_of(
        [mx.random.normal((1, 1, H * K))] * 3,
        [LaneWindow(c, b, 1) for c, b in zip(slots, (3, 5, 9), strict=True)],
        False,
    )
    lane.views[0].run(attention_layer, [x, lane.views[0].make_mask(3)], {"cache": lane.views[0]})
    lane.settle()
    packs = {id(caches.own[0].pack) for caches in slots}  # type: ignore[attr-defined]
    assert len(packs) == 1
    before = [caches.own[0].held_rows() for caches in slots]  # type: ignore[attr-defined]
    slots[0].close(besides=slots[:1])
    for caches, (keys, values) in zip(slots[1:], before[1:], strict=True):
        after = caches.own[0].held_rows()  # type: ignore[attr-defined]
        assert mx.array_equal(after[0], keys) and mx.array_equal(after[1], values)
    assert [keys.shape[2] for keys, _ in before] == [4, 6, 10] and all(a < b for a, b in pairwise([4, 6, 10]))
