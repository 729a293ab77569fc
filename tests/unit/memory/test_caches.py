"""All caches of a slot on one stage: its own, those that stand for layers elsewhere, and layers that have several."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from protos.brigade_pb2 import CACHE_FULL, CACHE_INT8, CACHE_ROTATING, Cache, CacheKind
from worker.errors import CacheMismatch
from worker.memory.kv_cache import KVCache, QuantisedCache
from worker.memory.recurrent_state import RecurrentState
from worker.memory.slot_caches import Caches, CacheSegment, members
from worker.model.cache_spec import Memory
from worker.model.probe_pass import Entry

H, K = 2, 4
FULL, WINDOW, STATE = Memory(None, H, K, K, 4), Memory(6, H, K, K, 4), Memory(state_arrays=2, state_bytes=24)
ENTRIES: tuple[Entry, ...] = (WINDOW, FULL, FULL, WINDOW, STATE, (FULL, WINDOW))


def rows(tokens: range) -> mx.array:
    return mx.broadcast_to(mx.array(list(tokens), mx.float32)[None, None, :, None], (1, H, len(tokens), K))


def feed(caches: Caches, tokens: range) -> None:
    """One pass, as a shard has it."""
    caches.begin()
    caches.reserve(len(tokens), None)
    for cache in caches.own:
        if isinstance(cache, KVCache):
            cache.update_and_fetch(rows(tokens), -rows(tokens))
        else:
            cache[0] = mx.full((1, 3), tokens[-1])
    caches.settle(tokens.stop)


def lengths(caches: Caches) -> set[int]:
    return {cache.length for listed in caches.listed for cache in members(listed)}


def held(cache: Any) -> list[int]:
    keys, values = cache.fetch()
    assert mx.array_equal(keys, -values)
    return keys[0, 0, :, 0].astype(mx.int32).tolist()


def test_a_layer_elsewhere_is_stood_in_for_by_one_of_its_kind_that_is_here_or_by_one_that_counts() -> None:
    caches = Caches(ENTRIES, [1, 2], Cache())
    assert len(caches.listed) == len(ENTRIES) and caches.own == caches.listed[1:3]
    assert caches.own[0] is not caches.own[1]
    window, state, several = caches.listed[0], caches.listed[4], caches.listed[5]
    assert caches.listed[3] is window and isinstance(window, KVCache) and window.window == 6
    assert isinstance(state, RecurrentState) and isinstance(several, tuple)
    elsewhere = Caches(ENTRIES, [3], Cache())
    assert elsewhere.listed[0] is elsewhere.own[0] and elsewhere.listed[1] is elsewhere.listed[2]


@pytest.mark.parametrize("own", [[], [0], [1, 2], [4], [5], [0, 1, 2, 3, 4, 5]], ids=str)
def test_after_every_pass_all_stand_where_the_slot_is(own: list[int]) -> None:
    caches = Caches(ENTRIES, own, Cache())
    for tokens in (range(3), range(3, 4), range(4, 9)):
        feed(caches, tokens)
        assert lengths(caches) == {tokens.stop}
    caches.cut(0)
    assert lengths(caches) == {0}


def test_only_what_is_here_takes_memory() -> None:
    caches = Caches(ENTRIES, [1, 2], Cache())
    feed(caches, range(10))
    one = 2 * H * 256 * K * 4
    assert caches.nbytes == 2 * one and sum(array.nbytes for array in caches.arrays()) == one
    caches.close()
    assert caches.nbytes == 0
    nothing = Caches(ENTRIES, [], Cache())
    feed(nothing, range(10))
    assert nothing.nbytes == 0 and nothing.arrays() == []


def test_the_buffers_to_wait_for_are_there_though_the_last_layer_keeps_nothing() -> None:
    caches = Caches([FULL, Memory()], [0, 1], Cache())
    caches.reserve(3, None)
    caches.own[0].update_and_fetch(rows(range(3)), rows(range(3)))  # type: ignore[attr-defined]
    assert [array.shape[1] for array in caches.arrays()] == [H, H]


def test_a_stand_in_forgets_what_an_embedding_left_in_it() -> None:
    caches = Caches([STATE, FULL], [1], Cache())
    stand_in = caches.listed[0]
    assert isinstance(stand_in, RecurrentState)
    stand_in[0] = mx.ones(1)
    caches.cut(0)
    assert stand_in.arrays() == []


def test_a_cut_is_one_of_all_or_refused() -> None:
    caches = Caches(ENTRIES[:4], [0, 1], Cache())
    feed(caches, range(9))
    caches.cut(7)
    assert lengths(caches) == {7}
    with_state = Caches(ENTRIES, [1, 4], Cache())
    feed(with_state, range(9))
    with pytest.raises(CacheMismatch, match="a recurrent layer cannot be cut to 7 tokens: its state is at 9"):
        with_state.cut(7)


def test_a_fork_goes_on_by_itself() -> None:
    caches = Caches(ENTRIES[:4], [1, 2, 3], Cache())
    feed(caches, range(6))
    other = caches.fork(4)
    assert lengths(other) == {4} and lengths(caches) == {6}
    feed(other, range(4, 8))
    caches.cut(3)
    feed(caches, range(3, 5))
    assert [held(cache) for cache in other.own] == [list(range(8))] * 3
    assert [held(cache) for cache in caches.own] == [list(range(5))] * 3
    assert lengths(other) == {8} and lengths(caches) == {5} and other.own_numbers == [1, 2, 3]


def test_a_fork_of_states_goes_on_where_they_are_and_nowhere_else() -> None:
    caches = Caches(ENTRIES, [4, 5], Cache())
    feed(caches, range(6))
    other = caches.fork(6)
    feed(other, range(6, 7))
    assert [caches.own[0][0][0, 0].item(), other.own[0][0][0, 0].item()] == [5, 6]  # type: ignore[index]
    with pytest.raises(CacheMismatch, match="cannot be cut to 5"):
        caches.fork(5)
    assert caches.fork(0).own[0].arrays() == []


def test_a_slot_that_takes_another_ones_place_copies_only_what_is_smaller_then_or_in_a_snapshot() -> None:
    for entries, length, is_copy in ((ENTRIES[1:3], 280, False), (ENTRIES[1:3], 200, True), (ENTRIES, 256, True)):
        caches = Caches(entries, range(len(entries)), Cache())
        feed(caches, range(256))
        caches.take_snapshot()
        feed(caches, range(256, 290))
        caches.take_snapshot()
        feed(caches, range(290, 300))
        taken = caches.taken_over(length, [256, 290])  # longer ones count where stored rows follow
        assert (taken is not caches) is is_copy and lengths(taken) == {length}
        assert list(taken.snapshots) == [256, 290]
        feed(taken, range(length, length + 1))
        full = [cache for cache in taken.own if isinstance(cache, KVCache) and not cache.window]
        assert all(held(cache)[-2:] == [length - 1, length] for cache in full)
        assert sum(cache.nbytes for cache in taken.own) <= sum(cache.nbytes for cache in caches.own)


def test_a_fork_goes_on_from_a_snapshot_where_a_cache_can_no_longer_be_cut() -> None:
    caches = Caches(ENTRIES, range(6), Cache())
    feed(caches, range(9))
    caches.take_snapshot()
    feed(caches, range(9, 1100))  # the windows have dropped what a query at 9 sees
    caches.keep_snapshots([9])
    caches.take_snapshot()
    feed(caches, range(1100, 2300))
    for length, snapshots in ((9, [9]), (1100, [9, 1100])):
        for _ in range(2):  # a fork leaves the snapshot what it was
            other = caches.fork(length, snapshots)
            feed(other, range(length, length + 3))
            ends = [held(cache)[-5:] for cache in other.own if isinstance(cache, KVCache)]
            assert ends == [list(range(length - 2, length + 3))] * 6
            assert other.own[4][0][0, 0].item() == length + 2 and list(other.snapshots) == snapshots  # type: ignore[index]
            deeper = other.fork(9)
            assert lengths(deeper) == {9} and not deeper.snapshots
    with pytest.raises(CacheMismatch, match="cannot cut the cache to 8 tokens"):
        caches.fork(8)
    with pytest.raises(CacheMismatch, match=r"expected snapshots at \[10\] tokens, found those at \[9, 1100\]"):
        caches.fork(9, [9, 10])


def test_a_snapshot_holds_only_what_later_rows_push_out_and_goes_with_what_is_cut() -> None:
    caches = Caches(ENTRIES, range(6), Cache())
    feed(caches, range(700))
    caches.cut(700)
    before = caches.nbytes
    arrays = caches.take_snapshot()
    window = 2 * H * 5 * K * 4  # five rows, since the next query sees itself
    assert caches.nbytes - before == sum(array.nbytes for array in arrays) == 3 * window + 3 * 4
    only_full = Caches(ENTRIES, [1, 2], Cache())
    feed(only_full, range(20))
    assert only_full.take_snapshot() == []
    only_full.cut(19)
    assert not only_full.snapshots


@pytest.mark.parametrize("kind", [CACHE_FULL, CACHE_INT8])
@pytest.mark.parametrize("begin", [0, 5])
def test_what_one_node_holds_of_some_tokens_another_one_goes_on_with(kind: CacheKind, begin: int) -> None:
    """In parts as small as rows, between slots of other capacities."""
    wide = Memory(None, H, 32, 32, 4)
    entries: tuple[Entry, ...] = (wide, (wide, wide), wide)
    one, other = (Caches(entries, own, Cache(kind=kind)) for own in ((1, 2), (0, 1, 2)))

    def fed(caches: Caches, tokens: range, own: Sequence[Any]) -> None:
        caches.begin()
        caches.reserve(len(tokens), None)
        for cache in own:
            keys = mx.broadcast_to(mx.array(list(tokens), mx.float32)[None, None, :, None], (1, H, len(tokens), 32))
            cache.update_and_fetch(keys, -keys)
        caches.settle(tokens.stop)

    fed(one, range(300), one.own)
    fed(other, range(300), other.own[:1])  # which has its first layer only
    segments = list(one.segments(begin, 300, 1))
    assert len(segments) == 3 * (300 - begin)
    for segment in [*one.segments(0, begin, 1 << 20), *segments] if begin else segments:
        mx.eval(other.put_segment(segment))
    for cache, expected in zip(other.own[1:], one.own, strict=True):
        pairs = zip(cache.arrays(), expected.arrays(), strict=True)
        assert all(mx.array_equal(a[:, :, :300], b[:, :, :300]) for a, b in pairs)


PLANNED = "expected what is planned for cache"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"number": 0}, "expected a segment of one of its caches, got one of 0"),
        ({"part": 1}, "expected a segment of one of its caches"),
        ({"number": 4, "keys": (mx.zeros(2),), "values": ()}, "expected a whole state of cache 4, got rows"),
        ({"base": 1}, "expected rows of the 9 tokens held"),
        ({"keys": ()}, PLANNED),
        ({"keys": (), "values": (mx.zeros((1, H, 9, 2 * K)),)}, PLANNED),
        ({"values": (mx.zeros((1, H + 1, 9, K)),)}, PLANNED),
        ({"values": (mx.zeros((1, H, 9, 1)),)}, PLANNED),  # which MLX would spread
        ({"keys": (mx.zeros((1, H, 0, 2**30)),), "values": (mx.zeros((1, H, 0, 2**30)),)}, PLANNED),
        ({"values": (mx.zeros((1, K, 9, H)),)}, PLANNED),
        ({"values": (mx.zeros((9, K)),)}, PLANNED),
        ({"values": (mx.zeros((1, H, 9, K), mx.bfloat16),)}, PLANNED),
        ({"number": 4, "length": 9, "values": ()}, PLANNED),  # a state of more bytes
    ],
)
def test_a_segment_that_fits_no_cache_is_refused(changes: dict[str, Any], said: str) -> None:
    caches = Caches(ENTRIES, [1, 4], Cache())
    feed(caches, range(9))
    keys = rows(range(9))
    caches.put_segment(CacheSegment(1, 0, 0, (keys,), (keys,)))
    with pytest.raises(CacheMismatch, match=said):
        caches.put_segment(replace(CacheSegment(1, 0, 0, (keys,), (keys,)), **changes))


def test_several_caches_of_a_layer_are_asked_for_by_their_numbers_and_all_are_one() -> None:
    caches = Caches([(FULL, WINDOW)], [0], Cache())
    [several] = caches.listed
    feed(caches, range(7))
    assert isinstance(several, tuple) and list(several) == caches.own
    assert [several[0].window, several[1].window] == [None, 6]  # type: ignore[union-attr]
    assert caches.nbytes == several[0].nbytes + several[1].nbytes and len(caches.arrays()) == 4
    assert several[0].make_mask(3) == "causal"
    other = caches.fork(5)
    assert [each.length for each in other.own] == [5, 5] and isinstance(other.listed[0], tuple)
    caches.cut(6)
    assert [held(each) for each in caches.own] == [list(range(6))] * 2
    caches.close()
    assert caches.nbytes == 0 and [held(each) for each in other.own] == [list(range(5))] * 2
    first, second = Caches([(FULL, STATE)], [0], Cache(kind=CACHE_INT8)).own
    assert isinstance(first, QuantisedCache) and isinstance(second, RecurrentState), "as the session chose"


def test_after_a_pass_or_a_cut_that_ended_in_its_middle_all_are_cut_again() -> None:
    caches = Caches([FULL, FULL], [0, 1], Cache())
    feed(caches, range(4))
    caches.begin()
    caches.own[0].update_and_fetch(rows(range(4, 5)), rows(range(4, 5)))  # type: ignore[attr-defined]
    caches.cut(4)
    assert lengths(caches) == {4}
    with_state = Caches([FULL, STATE], [0, 1], Cache())
    feed(with_state, range(4))
    with pytest.raises(CacheMismatch):
        with_state.cut(2)
    with pytest.raises(CacheMismatch, match="cannot cut the cache to 4 tokens: it holds 2"):
        with_state.cut(4)


def test_what_was_saved_has_the_arrays_that_a_recurrent_layer_replaced_since() -> None:
    state, before, after = RecurrentState(1), mx.zeros(2), mx.ones(2)
    state[0] = before
    saved = state.saved()
    state[0] = after
    state.restore(saved)
    assert state[0] is before


def test_snapshots_of_another_node_take_the_place_of_what_was_not_computed_here() -> None:
    """The window of a layer that was computed here then holds the same rows, for both share a mask."""
    whole = Caches(ENTRIES, range(6), Cache())
    part = Caches(ENTRIES, range(6), Cache())  # computes its first two layers only
    for begin in range(0, 40, 4):
        feed(whole, range(begin, begin + 4))
        part.begin()
        part.reserve(4, None)
        for cache in part.own[:2]:
            cache.update_and_fetch(rows(range(begin, begin + 4)), -rows(range(begin, begin + 4)))  # type: ignore[union-attr]
        part.settle(begin + 4)
        if begin == 36:
            whole.take_snapshot()
            part.take_snapshot()
        for segment in whole.segments(begin, begin + 4, 1 << 20):
            if segment.number >= 2:
                mx.eval(part.put_segment(segment))
    window = 2 * H * 5 * K * 4  # bytes
    copies = [copy for copy in part.snapshots[40] if isinstance(copy, KVCache)]
    assert [copy.nbytes for copy in copies] == [window] * 3, "as much as is planned for a snapshot"
    for snapshot in (part, part.fork(40)):
        kept = [cache for cache in snapshot.own if isinstance(cache, KVCache)]
        assert [held(cache) for cache in kept if cache.window] == [list(range(35, 40))] * 3
        assert [held(cache) for cache in kept if not cache.window] == [list(range(40))] * 3
        [state] = [cache for cache in snapshot.own if isinstance(cache, RecurrentState)]
        assert state[0].tolist() == [[39] * 3]
    for begin in range(40, 1000, 20):
        feed(part, range(begin, begin + 20))
        windows = [held(cache) for cache in part.own if isinstance(cache, KVCache) and cache.window]
        assert windows == [windows[0]] * 3, "they drop rows at the same steps"


def test_stored_rows_and_snapshots_make_another_slot_the_same() -> None:
    one = Caches(ENTRIES, range(6), Cache())
    ends = (300, 340)
    for begin, end in zip((0, *ends), ends, strict=False):
        for at in range(begin, end, 20):
            feed(one, range(at, at + 20))
        one.take_snapshot()
    other = Caches(ENTRIES, range(6), Cache())
    for begin, end in zip((0, *ends), ends, strict=False):
        mx.eval(other.put_stored(one.stored(begin, end), begin, end))
        assert lengths(other) == {end}
    forks = one.fork(340), other
    for cache, expected in zip(forks[1].own, forks[0].own, strict=True):
        if isinstance(cache, KVCache):
            assert held(cache)[-5:] == held(expected)[-5:] and len(held(cache)) in (5, 340)
        else:
            assert cache[0].tolist() == expected[0].tolist()
    for caches in forks:
        feed(caches, range(340, 345))
    with pytest.raises(CacheMismatch, match="expected a snapshot of 345 tokens"):
        one.stored(340, 345)
    with pytest.raises(CacheMismatch, match="nothing is of"):
        other.put_stored(one.stored(300, 340)[1:], 300, 340)
    with pytest.raises(CacheMismatch, match=r"expected rows \[20, 340\)"):
        other.put_stored(one.stored(300, 340), 20, 340)


def test_a_layer_that_remembers_nothing_is_stored_beside_one_that_drops_tokens() -> None:
    one, other = (Caches([FULL, Memory()], [0, 1], Cache(kind=CACHE_ROTATING, size=8, keep=2)) for _ in range(2))
    for at in range(0, 60, 4):
        one.begin()
        one.reserve(4, None)
        one.own[0].update_and_fetch(rows(range(at, at + 4)), -rows(range(at, at + 4)))  # type: ignore[union-attr]
        one.settle(at + 4)
    one.take_snapshot()
    mx.eval(other.put_stored(one.stored(0, 60), 0, 60))
    assert lengths(other) == {60} and held(other.own[0])[-5:] == held(one.own[0])[-5:]
