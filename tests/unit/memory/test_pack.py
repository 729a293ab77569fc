"""Packs: caches of several slots in one buffer hold what each would hold by itself, whoever comes and goes."""

import gc
import random
import weakref

import mlx.core as mx
import pytest

from worker.memory.layer_cache import Int8Cache, KVCache, Pack, packed
from worker.model.cache_spec import pack_capacity

H, K = 2, 4


def rows_of(tokens: list[int]) -> mx.array:
    """Keys [1, H, L, K] that tell token, head and number apart."""
    heads = [[[100.0 * token + 10 * head + number for number in range(K)] for token in tokens] for head in range(H)]
    return mx.array([heads]).reshape(1, H, len(tokens), K)


class Model:
    """A cache and the tokens that it ought to hold."""

    def __init__(self) -> None:
        self.cache, self.tokens = KVCache(), []

    def alone(self, tokens: list[int]) -> None:
        self.cache.reserve(len(tokens), None)
        keys, values = self.cache.update_and_fetch(rows_of(tokens), -rows_of(tokens))
        self.tokens += tokens
        assert mx.array_equal(keys, rows_of(self.tokens)) and mx.array_equal(values, -rows_of(self.tokens))

    def cut(self, length: int) -> None:
        self.cache.cut(length)
        self.tokens = self.tokens[:length]

    def check(self) -> None:
        assert self.cache.length == len(self.tokens)
        if held := self.cache.held_rows():
            keys, values = held
            assert mx.array_equal(keys, rows_of(self.tokens)) and mx.array_equal(values, -rows_of(self.tokens))


def step(models: list[Model], new: list[list[int]]) -> Pack:
    """One step of all together, with windows of one length."""
    L = len(new[0])
    keys = mx.concatenate([rows_of(tokens) for tokens in new])
    capacity = max(pack_capacity(len(m.tokens) + L) or 0 for m in models)
    pack = packed([m.cache for m in models], capacity, (keys, -keys))
    bases = mx.array([len(m.tokens) for m in models])[:, None, None, None]
    pack.update(keys, -keys, bases + mx.arange(L)[:, None])
    for m, tokens in zip(models, new, strict=True):
        m.tokens += tokens
    return pack


@pytest.mark.parametrize(("rows", "capacity"), [(1, 256), (256, 256), (257, 512), (4096, 4096), (4097, None)])
def test_capacities_are_powers_of_two_of_blocks_up_to_a_bound(rows: int, capacity: int | None) -> None:
    assert pack_capacity(rows) == capacity


def test_the_same_ones_go_on_in_the_same_pack_and_others_in_a_new_one() -> None:
    models = [Model() for _ in range(3)]
    first = step(models, [[1], [2], [3]])
    assert step(models, [[4], [5], [6]]) is first
    second = step(models[:2], [[7], [8]])
    assert second is not first and models[2].cache.pack is None
    for model in models:
        model.check()


def test_who_leaves_keeps_no_more_memory_than_its_own_rows_need() -> None:
    models = [Model() for _ in range(4)]
    step(models, [[1], [2], [3], [4]])
    step(models[:3], [[5], [6], [7]])
    assert models[3].cache.nbytes == 2 * H * 256 * K * 4
    models[3].check()


def test_when_others_are_closed_their_memory_comes_back() -> None:
    gc.collect()
    before = mx.get_active_memory()
    models = [Model() for _ in range(4)]
    for model in models:
        model.alone(list(range(1000)))
    pack = step(models, [[1], [2], [3], [4]])
    mx.eval(pack.arrays())
    one = 2 * H * 1024 * K * 4  # bytes
    assert mx.get_active_memory() - before >= 4 * one
    while len(models) > 1:
        models.pop().cache.close()
    del model, pack
    models[0].check()
    mx.synchronize()
    assert mx.get_active_memory() - before < 2 * one


def test_a_fork_of_a_packed_cache_and_its_source_go_on_apart() -> None:
    models = [Model(), Model()]
    step(models, [[1, 2, 3], [4, 5, 6]])
    copy = Model()
    copy.cache, copy.tokens = models[0].cache.fork(2), [1, 2]
    copy.alone([9])
    models[0].alone([7])
    step([*models, copy], [[8], [8], [8]])
    for model in (*models, copy):
        model.check()


def test_kinds_that_do_not_hold_every_row_as_it_is_are_never_packed() -> None:
    assert KVCache().can_be_packed
    assert not (KVCache(window=8).can_be_packed or KVCache(window=8, keep=4).can_be_packed or Int8Cache().can_be_packed)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_they_do_every_cache_holds_its_own_tokens(seed: int) -> None:
    numbers = random.Random(seed)
    models = [Model() for _ in range(4)]
    for _ in range(40):
        chosen = numbers.sample(models, numbers.randint(1, 4))
        choice = numbers.random()
        tokens = [[numbers.randrange(90) for _ in range(numbers.choice([1, 1, 3]))] for _ in chosen]
        if choice < 0.6 and len(chosen) > 1:
            step(chosen, [each[:1] for each in tokens])
        elif choice < 0.75:
            chosen[0].alone(tokens[0])
        elif choice < 0.9 and chosen[0].tokens:
            chosen[0].cut(numbers.randrange(len(chosen[0].tokens) + 1))
        elif chosen[0].tokens:
            fork = Model()
            fork.tokens = chosen[0].tokens[: numbers.randrange(len(chosen[0].tokens) + 1)]
            fork.cache = chosen[0].cache.fork(len(fork.tokens))
            models[models.index(chosen[0])] = fork
            chosen[0].cache.close()
        for model in models:
            model.check()


def test_caches_that_are_closed_together_get_no_rows_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done where memory is needed."""
    models = [Model(), Model(), Model()]
    step(models, [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    caches = [model.cache for model in models]
    pack = weakref.ref(caches[0].pack)
    monkeypatch.setattr(KVCache, "take_back", None)
    for cache in caches:
        cache.close(besides=caches)
    assert pack() is None and all(cache.nbytes == 0 and not cache.arrays() for cache in caches)
