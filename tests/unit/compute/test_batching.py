"""Whatever way windows of several slots lie in a lane, each sees what it would see alone."""

import gc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention

from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, Cache
from worker.compute.batching import Lane, LaneMask, LaneWindow, Run, View
from worker.memory.recurrent_state import StateStack
from worker.memory.slot_caches import Caches, close_all, members
from worker.model.cache_spec import Memory
from worker.model.families import LaneForm
from worker.model.probe_pass import Entry

H, K = 2, 32
FULL, WINDOW, STATE = Memory(None, H, K, K, 4), Memory(6, H, K, K, 4), Memory(state_arrays=1)
GROWING = Memory(state_arrays=1, of_embedding=True)
BOTH = FULL, STATE
CHOICES = Cache(), Cache(kind=CACHE_INT8), Cache(kind=CACHE_ROTATING, size=8, keep=2)


def attention_layer(x: mx.array, mask: Any, cache: Any) -> mx.array:
    """Rows [B, L, H * K] are queries, keys and values at once."""
    B, L, _ = x.shape
    q = x.reshape(B, L, H, K).transpose(0, 2, 1, 3)
    k, v = cache.update_and_fetch(q, -q)
    if isinstance(cache, View):
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


def growing_layer(x: mx.array, mask: Any, cache: Any) -> mx.array:
    """Each row and those of the last three before the window, which the state has."""
    before = x[:, :0] if cache[0] is None else cache[0]
    cache[0] = mx.concatenate([before, x], axis=1)[:, -3:]
    return x + before.sum(axis=1, keepdims=True)


def layer_of_both(x: mx.array, mask: Any, cache: Any) -> mx.array:
    return attention_layer(x, mask, cache[0]) + recurrent_layer(x, None, cache[1])


def parts_of(lane: Lane, rows: mx.array) -> list[mx.array]:
    """Each window's rows of those of all windows."""
    return [single.take(rows) for single in lane.singles]


def memory() -> int:
    mx.synchronize()
    gc.collect()
    return mx.get_active_memory()


LAYERS = {
    FULL: attention_layer,
    WINDOW: attention_layer,
    STATE: recurrent_layer,
    GROWING: growing_layer,
    BOTH: layer_of_both,
}


def make(entry: Entry, held: Sequence[int], choices: Sequence[Cache]) -> list[Caches]:
    """A slot's caches per length, filled with rows of their own."""
    slots = [Caches([entry], [0], choice) for choice in choices]
    for number, (caches, length) in enumerate(zip(slots, held, strict=True)):
        if length:
            mx.random.seed(number)
            alone(entry, mx.random.normal((1, length, H * K)), LaneWindow(caches, 0, length))
    return slots


def alone(
    entry: Entry, x: mx.array, place: LaneWindow, window: int | None = None, mask: mx.array | None = None
) -> mx.array:
    place.caches.reserve(place.num_rows, place.positions)
    [cache] = place.caches.listed
    own = members(cache)[0].make_mask(place.num_rows, window_size=window)
    h = LAYERS[entry](x, own if mask is None else mask, cache)
    place.caches.settle(place.base + place.num_rows)
    return h


def check(
    entry: Entry, steps: Sequence[tuple[int, ...]], *, held: Sequence[int] = (3, 5, 9), window: int | None = None,
    choices: Sequence[Cache] = (CHOICES[0],) * 3, form: LaneForm = LaneForm.ROWS,
) -> list[int]:  # fmt: skip
    """Steps of three slots, together and alone, are the same to rounding. Returns how often the unit ran in each."""
    together, single = make(entry, held, choices), make(entry, held, choices)
    bases, calls = list(held), []
    for number, counts in enumerate(steps):
        mx.random.seed(100 + number)
        x = [mx.random.normal((1, count, H * K)) for count in counts]
        lane = Lane([LaneWindow(*each) for each in zip(together, bases, counts, strict=True)])
        [view] = lane.views()
        mask = view[0].make_mask(9, window_size=window) if entry is BOTH else view.make_mask(9, window_size=window)
        calls.append(0)

        def unit(*args: Any, calls: list[int] = calls, **kwargs: Any) -> mx.array:
            calls[-1] += 1
            return LAYERS[entry](*args, **kwargs)

        result = view.run(unit, [mx.concatenate(x, axis=1), mask], {"cache": view}, form)
        lane.settle()
        found = parts_of(lane, result)
        for i, (caches, base, count) in enumerate(zip(single, bases, counts, strict=True)):
            expected = alone(entry, x[i], LaneWindow(caches, base, count), window)
            assert found[i].shape == expected.shape
            assert mx.allclose(found[i], expected, atol=1e-5), (entry, counts, i)
        bases = [base + count for base, count in zip(bases, counts, strict=True)]
        for caches, base in zip((*together, *single), (*bases, *bases), strict=True):
            caches.cut(base)  # as every window begins
    return calls


ONES, EQUAL, MIXED = (1, 1, 1), (2, 2, 2), (1, 4, 1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("steps", [[ONES] * 3, [EQUAL, EQUAL], [MIXED, MIXED], [MIXED, ONES, EQUAL]], ids=str)
def test_attention_takes_rows_of_any_lengths_at_once(steps: list[tuple[int, ...]], window: int | None) -> None:
    assert check(FULL, steps, window=window) == [1] * len(steps)


@pytest.mark.parametrize(
    ("held", "count", "window", "is_masked"),
    [
        ((5, 5, 5), 1, None, False),  # as of several answers to one prompt
        ((5, 5, 5), 1, 6, False),
        ((5, 5, 5), 1, 5, True),
        ((5, 5, 4), 1, None, True),
        ((5, 5, 5), 2, None, True),
    ],
)
def test_attention_has_a_mask_only_where_something_is_out_of_sight(
    held: tuple[int, ...], count: int, window: int | None, is_masked: bool
) -> None:
    places = [
        LaneWindow(caches, base, count) for caches, base in zip(make(FULL, held, CHOICES[:1] * 3), held, strict=True)
    ]
    lane = Lane(places)
    [view], [run] = lane.views(), lane.runs
    mask = view.make_mask(3 * count, window_size=window)
    assert mask is not None and (mask.of_run(run) is not None) == is_masked
    assert check(FULL, [(count,) * 3], held=held, window=window) == [1]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("entry", [FULL, STATE, BOTH], ids=["full", "state", "both"])
def test_a_unit_that_must_not_mix_slots_takes_equal_windows_as_a_batch(entry: Entry, window: int | None) -> None:
    assert check(entry, [ONES, EQUAL, ONES], window=window, form=LaneForm.BATCH) == [1, 1, 1]
    mixed = check(entry, [MIXED, ONES, MIXED], window=window, form=LaneForm.BATCH)
    assert mixed == ([2, 1, 2] if entry is STATE else [3, 1, 3]), "keys and values of neighbours only"


def test_states_that_have_not_begun_are_not_put_beside_those_that_have() -> None:
    assert check(STATE, [ONES, ONES], held=(0, 0, 9)) == [2, 1]
    assert check(BOTH, [ONES, ONES], held=(0, 4, 9), form=LaneForm.BATCH) == [3, 1]


def test_states_that_still_grow_are_put_beside_each_other_once_they_have_one_size() -> None:
    """As of n-grams: a prompt of one token beside others."""
    assert check(GROWING, [ONES] * 4, held=(1, 2, 9), form=LaneForm.BATCH) == [3, 3, 1, 1]


@pytest.mark.parametrize("form", [LaneForm.BATCH, LaneForm.ALONE])
def test_windows_that_slide_and_units_that_must_stay_alone_take_slot_after_slot(form: LaneForm) -> None:
    assert check(WINDOW, [ONES, MIXED, EQUAL], form=form) == [3, 3, 3]
    assert check(FULL, [ONES, EQUAL], form=LaneForm.ALONE) == [3, 3]
    assert check(WINDOW, [ONES, MIXED, EQUAL]) == [1, 1, 1], "attention takes them in one call, each on its own rows"


def test_slots_of_caches_of_all_kinds_share_a_lane() -> None:
    check(FULL, [ONES, MIXED, EQUAL, ONES], choices=CHOICES)
    two_alike = CHOICES[0], CHOICES[0], CHOICES[1]
    for held, choices in (((3, 5, 9), CHOICES), ((0, 0, 9), two_alike), ((255, 255, 9), two_alike)):
        calls = check(FULL, [ONES, EQUAL, ONES], held=held, choices=choices, form=LaneForm.BATCH)
        assert calls == [3 if choices is CHOICES else 2] * 3


def test_caches_of_very_different_lengths_share_a_lane() -> None:
    for form in (LaneForm.ROWS, LaneForm.BATCH):
        check(FULL, [ONES, MIXED, EQUAL], held=(0, 300, 255), form=form)
        assert check(FULL, [ONES, ONES], held=(5000, 4500, 5100), form=form) == [1, 1]


class States:
    """Slots whose only layer adds up rows of ones."""

    def __init__(self, num_slots: int, size: int) -> None:
        self.slots, self.size = [Caches([STATE], [0], CHOICES[0]) for _ in range(num_slots)], size
        self.lengths = [0] * num_slots

    def step(self, *numbers: int) -> None:
        lane = Lane([LaneWindow(self.slots[n], self.lengths[n], 1) for n in numbers])
        [view] = lane.views()
        view.run(recurrent_layer, [mx.ones((1, len(numbers), self.size)), None], {"cache": view}, LaneForm.ROWS)
        lane.settle()
        for n in numbers:
            self.lengths[n] += 1

    def check(self) -> None:
        for slot, length in zip(self.slots, self.lengths, strict=True):
            [state] = slot.states
            assert state.length == length and state.nbytes == 4 * self.size
            copy = state.fork(length)
            assert mx.array_equal(copy.cache[0], mx.full((1, 1, self.size), float(length)))


@pytest.mark.parametrize("kept", [(0, 1), (0, 2), (3, 1, 2)], ids=str)
def test_states_of_slots_that_leave_or_stay_behind_go_on(kept: tuple[int, ...]) -> None:
    states = States(4, 8)
    for numbers in ((0, 1, 2, 3), (0, 1, 2, 3), kept, (3, 2, 1, 0), (0, 1, 2, 3)):
        before = [(slot.saved(), length) for slot, length in zip(states.slots, states.lengths, strict=True)]
        states.step(*numbers)  # and is undone, as a step that was built and is not wanted
        for slot, (saved, _) in zip(states.slots, before, strict=True):
            slot.restore(saved)
        states.lengths = [length for _, length in before]
        states.step(*numbers)
    states.check()


def test_a_step_of_the_same_slots_copies_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States(8, 8)
    states.step(*range(8))
    monkeypatch.setattr(StateStack, "arrays_of", None)
    states.step(*range(8))
    states.step(*range(8))
    close_all(states.slots)
    assert all(not slot.nbytes and not slot.arrays() for slot in states.slots)


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_state_that_stays_keeps_no_memory_of_those_that_ended(is_undone: bool) -> None:
    size = 100_000
    states = States(8, size)
    before = memory()
    states.step(*range(8))
    saved = [slot.saved() for slot in states.slots]
    states.step(*range(8))
    if is_undone:
        for slot, each in zip(states.slots, saved, strict=True):
            slot.restore(each)
        del each
    del saved
    mx.eval([array for slot in states.slots for array in slot.arrays()])
    assert memory() - before >= 8 * 4 * size
    close_all(states.slots[:3])
    close_all(states.slots[3:7])
    assert memory() - before < 1.5 * 4 * size


@pytest.mark.parametrize(
    ("bases", "order", "form", "window"),
    [
        ((0, 5), (1, 0, 2), LaneForm.BATCH, None),  # as a diffusion decoder has them
        ((4, 5), (4, 0, 1), LaneForm.ROWS, 4),  # of a model whose mask is a window though its caches hold all rows
    ],
    ids=["a batch", "end to end"],
)
def test_reordered_windows_see_as_far_as_their_positions_say(
    bases: tuple[int, int], order: tuple[int, ...], form: LaneForm, window: int | None
) -> None:
    together, single = (make(FULL, bases, CHOICES[:1] * 2) for _ in range(2))
    x = [mx.random.normal((1, 3, H * K)) for _ in range(2)]
    positions = [mx.array([base + place for place in order], mx.int32) for base in bases]
    places = [LaneWindow(c, b, 3, p) for c, b, p in zip(together, bases, positions, strict=True)]
    lane = Lane(places)
    [view] = lane.views()
    mask = view.make_mask(3, window_size=window)
    found = parts_of(lane, view.run(attention_layer, [mx.concatenate(x, axis=1), mask], {"cache": view}, form))
    for i, caches in enumerate(single):
        expected = alone(FULL, x[i], LaneWindow(caches, bases[i], 3, positions[i]), window)
        assert mx.allclose(found[i], expected, atol=1e-5)


def test_canvas_rows_of_a_lane_see_each_other_and_what_the_first_of_them_sees() -> None:
    """Under a sliding mask all of them look back from the first one, in a lane as alone."""
    together, single = (make(FULL, (5, 7), CHOICES[:1] * 2) for _ in range(2))
    x = [mx.random.normal((1, 4, H * K)) for _ in range(2)]
    windows = [LaneWindow(caches, base, 4, num_canvas=3) for caches, base in zip(together, (5, 7), strict=True)]
    lane = Lane(windows)
    [view] = lane.views()
    mask = view.make_mask(4, window_size=4)
    found = parts_of(lane, view.run(attention_layer, [mx.concatenate(x, axis=1), mask], {"cache": view}, LaneForm.ROWS))
    last, back = mx.array([[0], [3], [3], [3]]), mx.array([[0], [1], [1], [1]])
    for rows, caches, base, each in zip(x, single, (5, 7), found, strict=True):
        held = mx.arange(base + 4)
        in_sight = (held <= base + last) & (held > base + back - 4)
        assert mx.allclose(each, alone(FULL, rows, LaneWindow(caches, base, 4), mask=in_sight), atol=1e-5)


def test_every_row_has_its_position_and_a_batch_the_one_of_each_slots_first() -> None:
    slots = make(FULL, (3, 5, 0), CHOICES[:1] * 3)
    reordered = mx.array([9, 5, 7], mx.int32)
    lane = Lane([LaneWindow(slots[0], 3, 2), LaneWindow(slots[1], 5, 3, reordered), LaneWindow(slots[2], 0, 1)])
    [view] = lane.views()
    assert view.offset.tolist() == [3, 4, 9, 5, 7, 0]
    seen = []

    def unit(x: mx.array, offset: Any, cache: Any) -> mx.array:
        seen.append([each if isinstance(each, int) else each.tolist() for each in (offset, cache.offset)])
        cache.update_and_fetch(*[x.reshape(x.shape[0], -1, H, K).transpose(0, 2, 1, 3)] * 2)
        return x

    view.run(unit, [mx.zeros((1, 6, H * K)), view.offset, view], {}, LaneForm.BATCH)
    lane.settle()
    batch = Lane([LaneWindow(slots[0], 5, 2), LaneWindow(slots[2], 1, 2)])
    [view] = batch.views()
    view.run(unit, [mx.zeros((1, 4, H * K)), view.offset, view], {}, LaneForm.BATCH)
    assert seen == [[3, 3], [[9, 5, 7]] * 2, [0, 0], [5, 5], [1, 1]]
    together = make(FULL, (3, 5), CHOICES[:1] * 2)
    [view] = Lane([LaneWindow(slot, base, 2) for slot, base in zip(together, (3, 5), strict=True)]).views()
    view.run(unit, [mx.zeros((1, 4, H * K)), view.offset, view], {}, LaneForm.BATCH)
    assert seen[-1] == [[3, 5], [3, 5]]


@pytest.mark.parametrize(
    ("numbers", "lengths"),
    [
        ([[0, 1, 2]], (2, 2, 2)),
        ([[0], [1, 2]], (3, 2, 2)),
        ([[2, 1], [0]], (3, 2, 2)),
        ([[2], [0, 1]], (2, 2, 3)),
        ([[0, 2], [1]], (2, 3, 2)),
    ],
)
def test_rows_come_back_in_the_order_of_the_lane(numbers: list[list[int]], lengths: tuple[int, ...]) -> None:
    slots = make(FULL, (0, 0, 0), CHOICES[:1] * 3)
    lane = Lane([LaneWindow(caches, 0, count) for caches, count in zip(slots, lengths, strict=True)])
    runs, x = [Run(each, lane) for each in numbers], mx.random.normal((1, H, sum(lengths), K))
    windows = x.split([lengths[0], lengths[0] + lengths[1]], axis=2)
    for run in runs:
        assert mx.array_equal(run.heads(x), mx.concatenate([windows[number] for number in run.numbers]))
    assert mx.array_equal(lane.in_order([run.take(x, axis=2) for run in runs], runs, axis=2), x)


def test_slots_in_the_order_of_their_pack_are_neither_split_nor_joined(tmp_path: Path) -> None:
    slots = make(FULL, (3, 5, 4), CHOICES[:1] * 3)
    for order, copies in (((0, 1, 2), False), ((1, 0, 2), True)):
        lane = Lane([LaneWindow(slots[number], slots[number].own[0].length, 1) for number in order])
        [view] = lane.views()
        x, mask = mx.ones((1, 3, H * K)), view.make_mask(1)
        mx.eval([cache.arrays() for slot in slots for cache in slot.own])
        h = view.run(attention_layer, [x, mask], {"cache": view}, LaneForm.ROWS)
        mx.export_to_dot(str(tmp_path / "graph"), h)
        names = re.findall(r'label ?= ?"(\w+)', (tmp_path / "graph").read_text())
        assert ("Gather" in names) is copies and not {"Split", "Concatenate"} & set(names)
        mx.eval(h)
        lane.settle()


@pytest.mark.parametrize(
    ("entry", "order", "positions", "expected"),
    [
        (FULL, (0, 1, 2), None, True),
        (FULL, (0, 2, 1), None, False),
        (FULL, (0, 1, 2), (5, 3), False),  # a window whose rows are not in the order of their positions
        (WINDOW, (0, 1, 2), None, False),  # rows of its own
        (BOTH, (0, 1, 2), None, False),
    ],
)
def test_a_lane_is_an_ordinary_batch_where_rows_and_caches_lie_side_by_side_in_its_order(
    entry: Entry, order: Sequence[int], positions: tuple[int, ...] | None, expected: bool
) -> None:
    slots = make(entry, (3, 3, 3), CHOICES[:1] * 3)
    Lane([LaneWindow(caches, 3, 2) for caches in slots])  # they share buffers in this order
    at = mx.array(positions, mx.int32) if positions else None
    lane = Lane([LaneWindow(slots[number], 3, 2, at) for number in order])
    assert View(lane, [slots[number].listed for number in order]).is_batch is expected


def test_slot_after_slot_each_gets_its_own_mask_cache_and_numbers() -> None:
    """And what layers return beside their rows comes together again, if it has rows."""
    slots = make(STATE, (2, 4), CHOICES[:1] * 2)
    lane = Lane([LaneWindow(slots[0], 2, 3), LaneWindow(slots[1], 4, 3)])
    [view] = lane.views()
    seen: list[tuple[Any, ...]] = []

    def layer(x: mx.array, mask: Any, scale: mx.array, *, cache: Any) -> Any:
        seen.append((mask, scale.tolist(), cache))
        return x + 1, {"not": "rows"}, 2 * x, mx.zeros((2,))

    x = mx.random.normal((1, 6, 5))
    args = [x, LaneMask(["first", "second"], None), mx.array(0.5)]  # type: ignore[list-item]
    h, other, more, none = view.run(layer, args, {"cache": view}, LaneForm.ALONE)
    assert seen == [("first", 0.5, slots[0].own[0]), ("second", 0.5, slots[1].own[0])]
    assert mx.array_equal(h, x + 1) and mx.array_equal(more, 2 * x) and other is none is None
