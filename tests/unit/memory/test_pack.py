"""Packs: slots that share buffers hold what each would hold by itself, in any order of joining and leaving."""

import gc
import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, Cache
from worker.compute.batching import Lane, LaneWindow
from worker.memory.kv_cache import KVCache
from worker.memory.slot_caches import Caches, close_all, move_apart
from worker.model.cache_spec import Memory, pack_capacity

H, K = 2, 4
ENTRIES = (Memory(None, H, K, K, 4),) * 2
ONE = 2 * 2 * H * K * 4  # bytes of a row: two layers, keys and values


def rows_of(tokens: Sequence[int]) -> mx.array:
    """Keys [1, H, L, K] that tell token, head and number apart."""
    at = mx.array(list(tokens), mx.float32)[:, None]
    return (100 * at + 10 * mx.arange(H)[:, None, None] + mx.arange(K))[None]


class Model:
    """A slot's caches and the tokens that they ought to hold."""

    def __init__(self, cache: Cache | None = None) -> None:
        self.caches, self.tokens = Caches(ENTRIES, range(2), cache or Cache()), list[int]()

    def alone(self, tokens: Sequence[int]) -> None:
        self.caches.reserve(len(tokens), None)
        for cache in self.caches.own:
            assert isinstance(cache, KVCache)
            cache.update_and_fetch(rows_of(tokens), -rows_of(tokens))
        self.tokens += tokens
        self.caches.settle(len(self.tokens))

    def cut(self, length: int) -> None:
        self.caches.cut(length)
        self.tokens = self.tokens[:length]

    def fork(self, length: int) -> "Model":
        other = Model()
        other.caches, other.tokens = self.caches.fork(length), self.tokens[:length]
        return other

    def check(self) -> None:
        for cache in self.caches.own:
            assert isinstance(cache, KVCache) and cache.length == len(self.tokens)
            if cache.arrays():
                keys, values = cache.fetch()
                assert mx.array_equal(keys, rows_of(self.tokens)) and mx.array_equal(values, -rows_of(self.tokens))


def step(models: Sequence[Model], new: Sequence[Sequence[int]]) -> int:
    """One step of several; returns in how many parts the first layer's rows were read."""
    windows = [LaneWindow(m.caches, len(m.tokens), len(tokens)) for m, tokens in zip(models, new, strict=True)]
    lane, rows = Lane(windows), rows_of([token for tokens in new for token in tokens])
    parts = [len(view.update_and_fetch(rows, -rows)[0]) for view in lane.views()]
    lane.settle()
    for m, tokens in zip(models, new, strict=True):
        m.tokens += tokens
    return parts[0]


def filled(lengths: Sequence[int]) -> list[Model]:
    models = [Model() for _ in lengths]
    for model, length in zip(models, lengths, strict=True):
        model.alone(range(length))
    return models


def memory() -> int:
    mx.synchronize()
    gc.collect()
    return mx.get_active_memory()


@pytest.mark.parametrize(
    ("rows", "capacity"),
    [(1, 256), (256, 256), (257, 512), (4096, 4096), (4097, 5120), (5000, 5120), (8193, 10240), (30_000, 32_768)],
)
def test_capacities_double_and_then_grow_by_eighths(rows: int, capacity: int) -> None:
    assert pack_capacity(rows) == capacity


def test_windows_of_one_length_attend_together_and_odd_ones_by_themselves() -> None:
    models = filled([3, 5, 9, 2])
    parts = [step(models, new) for new in ([[1]] * 4, [[1]] * 4, [[1], [1, 2, 3], [1], [1]], [[1, 2]] * 4)]
    assert parts == [1, 1, 3, 1]
    assert step(models[1:3], [[4], [5]]) == 1, "two neighbours of four"
    assert step([models[0], models[2]], [[4], [5]]) == 2
    for model in models:
        model.check()


def test_nothing_is_copied_while_windows_differ_and_slots_come_back_or_end() -> None:
    """The buffers stay where they are: only a larger capacity, or a slot that joins, needs others."""
    models = filled([30, 50, 90, 20, 10])
    step(models, [[1]] * 5)
    before = [cache.keys.shape for cache in models[0].caches.packable], memory()
    for number, new in enumerate(([[1]] * 5, [[1, 2, 3], [1], [2], [1, 2], [4]], [[1]] * 5)):
        step(models, new)
        models[number].alone([7])
        assert [cache.keys.shape for cache in models[4].caches.packable] == before[0] == [(5, H, 256, K)] * 2
    close_all([models.pop(1).caches])
    step(models, [[1]] * 4)
    assert [cache.keys.shape for cache in models[3].caches.packable] == before[0] and memory() <= before[1] + 8192
    for model in models:
        model.check()


def test_slots_of_other_capacities_attend_apart_and_move_together_when_they_grow() -> None:
    models = filled([250, 250, 300, 20])
    assert step(models, [[1]] * 4) == 2, "three of 256 rows side by side, one of 512"
    assert step(models, [[1, 2, 3, 4, 5, 6]] * 4) == 2, "two of them have joined the third"
    assert [model.caches.capacity for model in models] == [512, 512, 512, 256]
    for model in models:
        model.check()


def test_slots_that_move_apart_from_others_share_buffers_only_with_each_other() -> None:
    models = filled([3, 5, 9, 2])
    step(models, [[1]] * 4)
    move_apart([models[1].caches, models[3].caches])
    packs = [model.caches.pack for model in models]
    assert packs[0] is packs[2] and packs[1] is packs[3] and None not in packs and packs[0] is not packs[1]
    move_apart([models[0].caches])
    assert models[0].caches.pack is models[2].caches.pack is None
    for model in models:
        model.check()


def test_kinds_that_do_not_hold_every_row_as_it_is_are_never_packed() -> None:
    wide = (Memory(None, H, 64, 64, 4),)
    for choice in (Cache(kind=CACHE_INT8), Cache(kind=CACHE_ROTATING, size=8, keep=2)):
        slots = [Caches(wide, [0], choice) for _ in range(2)]
        Lane([LaneWindow(slot, 0, 1) for slot in slots])
        assert [slot.pack for slot in slots] == [None, None] and slots[0].capacity == 0


@pytest.mark.parametrize("num_left", [0, 1])
def test_when_slots_end_their_memory_comes_back(num_left: int) -> None:
    before = memory()
    models = filled([1000] * 4)
    step(models, [[1], [2], [3], [4]])
    mx.eval([array for cache in models[0].caches.own for array in cache.arrays()])
    assert memory() - before >= 4 * 1024 * ONE
    while len(models) > num_left:
        close_all([models.pop().caches])
        assert sum(each.caches.nbytes for each in models) <= (len(models) + 1) * 1024 * ONE
    for each in models:
        each.check()
    assert memory() - before <= (num_left + 0.5) * 1024 * ONE


def test_all_slots_that_end_together_are_copied_nowhere_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done where memory is needed."""
    models = filled([3, 4, 5])
    step(models, [[1, 2, 3]] * 3)
    monkeypatch.setattr(KVCache, "move_out", None)
    close_all([model.caches for model in models])
    assert all(not model.caches.nbytes and not model.caches.arrays() for model in models)


def test_a_fork_of_a_packed_slot_and_its_source_go_on_apart() -> None:
    models = filled([3, 3])
    step(models, [[1, 2, 3], [4, 5, 6]])
    copy = models[0].fork(2)
    copy.alone([9])
    models[0].alone([7])
    step([*models, copy], [[8], [8], [8]])
    for model in (*models, copy):
        model.check()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_they_do_every_slot_holds_its_own_tokens(seed: int) -> None:
    numbers = random.Random(seed)
    models = [Model() for _ in range(5)]
    for _ in range(50):
        chosen = numbers.sample(models, numbers.randint(1, 5))
        choice = numbers.random()
        tokens = [[numbers.randrange(90) for _ in range(numbers.choice([1, 1, 1, 3, 200]))] for _ in chosen]
        before = [(model.caches.saved(), list(model.tokens)) for model in models]
        if choice < 0.6 and len(chosen) > 1:
            step(chosen, tokens)
        elif choice < 0.75:
            chosen[0].alone(tokens[0])
        elif choice < 0.9 and chosen[0].tokens:
            chosen[0].cut(numbers.randrange(len(chosen[0].tokens) + 1))
        elif chosen[0].tokens:
            fork = chosen[0].fork(numbers.randrange(len(chosen[0].tokens) + 1))
            models[models.index(chosen[0])] = fork
            close_all([chosen[0].caches])
            continue
        if numbers.random() < 0.3:  # a step that was built and is not wanted
            for model, (saved, held) in zip(models, before, strict=True):
                model.caches.restore(saved)
                model.tokens = held
        for model in models:
            model.check()
