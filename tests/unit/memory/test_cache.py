"""The rule of the cache: whatever was cut and appended before, a step sees what it would see in a fresh cache."""

import random
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask

from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, Cache
from worker.errors import CacheMismatch
from worker.memory.kv_cache import KVCache, QuantisedCache, row_sights
from worker.memory.recurrent_state import LayerCall, RecurrentState
from worker.memory.slot_caches import make_cache
from worker.model.cache_spec import Memory


def rows(tokens: list[int], width: int = 1, heads: int = 1) -> mx.array:
    """[1, H, L, width]: every row says which token it is."""
    return mx.broadcast_to(mx.array(tokens, mx.float32)[None, None, :, None], (1, heads, len(tokens), width))


def feed(cache: KVCache, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One step as a layer takes it: keys [n] and values [n] as the queries find them, and who sees whom [L, n]."""
    L = len(tokens)
    cache.reserve(L, None)
    mask = cache.make_mask(L)
    keys, values = cache.update_and_fetch(rows(tokens), -rows(tokens, width=2))
    n = keys.shape[2]
    if mask is None:
        assert L == 1, "without a mask every row would see the rows after it"
        seen = np.ones((1, n), bool)
    elif isinstance(mask, str):
        assert mask == "causal"
        seen = np.tril(np.ones((L, n), bool), n - L)
    else:
        assert mask.shape == (L, n)
        seen = np.array(mask)
    return np.array(keys)[0, 0, :, 0], np.array(values)[0, 0, :, 1], seen


def seen_by_each(cache: KVCache, tokens: list[int]) -> list[list[int]]:
    """The tokens that each query of a step attends to; the keys and the values must agree."""
    keys, values, seen = feed(cache, tokens)
    assert (keys == -values).all()
    return [keys[row].astype(int).tolist() for row in seen]


@dataclass
class Plain:
    """What the cache should be: a list that is never short of anything."""

    window: int | None
    keep: int = 0
    tokens: list[int] = field(default_factory=list)

    def step(self, tokens: list[int]) -> list[list[int]]:
        self.tokens += tokens
        first = len(self.tokens) - len(tokens)
        ends = range(first + 1, len(self.tokens) + 1)
        return [self._seen(end) for end in ends]

    def _seen(self, end: int) -> list[int]:
        recent = max(self.keep, end - (self.window or end))
        return self.tokens[: min(self.keep, end)] + self.tokens[recent:end]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 300])
@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_cuts_behave_as_in_a_list(window: int | None, keep: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut that a sliding cache cannot serve is refused; one that it takes leaves nothing out.

    The last step can always be taken back, as drafts are that fail, and all but the kept tokens can be cut.
    """
    monkeypatch.setattr(KVCache, "step", 8)  # small blocks: growing and sliding happen all the time
    numbers = random.Random(f"{window} {keep} {seed}")
    keep = keep if window else 0
    cache, plain, tokens = KVCache(window, keep), Plain(window, keep), list[int]()
    token = refused = 0
    for _ in range(100):
        back = numbers.choice([0, 0, 0, 1, 2, 3, 9, 15])
        length = keep if keep and numbers.random() < 0.02 else max(0, len(plain.tokens) - back)
        try:
            cache.cut(min(length, len(plain.tokens)))
            plain.tokens = plain.tokens[:length]
        except CacheMismatch:
            refused += 1
            assert window is not None and length > keep and back > len(tokens)
        tokens = [token := token + 1 for _ in range(numbers.choice([1, 1, 1, 2, 5, 11]))]
        assert seen_by_each(cache, tokens) == plain.step(tokens)
        assert cache.offset == cache.length == len(plain.tokens)
    assert refused or window in (None, 300)


@pytest.mark.parametrize("window", [None, 8])
def test_a_cut_beyond_the_end_is_refused_and_changes_nothing(window: int | None) -> None:
    cache = KVCache(window)
    feed(cache, [1, 2, 3])
    for length in (4, 5, 1000):
        with pytest.raises(CacheMismatch, match=rf"cannot cut the cache to {length} tokens"):
            cache.cut(length)
    assert seen_by_each(cache, [4]) == [[1, 2, 3, 4]]


def test_cutting_copies_and_frees_nothing() -> None:
    cache = KVCache()
    feed(cache, list(range(300)))
    before = cache.arrays()
    cache.cut(7)
    assert all(now is then for now, then in zip(cache.arrays(), before, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("held", [0, 1, 7, 8, 9, 20])
@pytest.mark.parametrize("window", [None, 8])
def test_the_mask_is_that_of_mlx_lm(window: int | None, held: int, num_tokens: int) -> None:
    cache = KVCache(window)
    for token in range(held):
        feed(cache, [token])
    keys, _, seen = feed(cache, list(range(held, held + num_tokens)))
    expected = np.array(create_causal_mask(num_tokens, held, window_size=window))
    np.testing.assert_array_equal(seen, expected[:, -len(keys) :])
    assert not expected[:, : -len(keys)].any(), "a row that someone should see is gone"


@pytest.mark.parametrize(("window", "chunk"), [(8, 1), (8, 5), (16, 1), (16, 7), (64, 64)])
def test_a_sliding_cache_stays_as_large_as_its_window_and_a_chunk(window: int, chunk: int) -> None:
    cache = KVCache(window)
    cache.step = 16  # type: ignore[misc]
    capacities = set()
    for start in range(0, 160, chunk):
        feed(cache, list(range(start, start + chunk)))
        capacities.add(cache.arrays()[0].shape[2])
    assert max(capacities) <= window + chunk + 2 * cache.step
    assert cache.nbytes == cache.arrays()[0].shape[2] * (1 + 2) * 4


@pytest.mark.parametrize("window", [None, 8, 16, 32, 33])
def test_room_is_made_a_block_at_a_time(window: int | None) -> None:
    """One token in a block may copy the cache; if every one did, each would cost as much as the whole window."""
    cache = KVCache(window)
    cache.step = 16  # type: ignore[misc]
    feed(cache, list(range(50)))
    num_copies = 0
    for token in range(4 * cache.step):
        before, start = cache.arrays()[0].shape, cache.dropped
        cache.reserve(1, None)
        num_copies += (cache.arrays()[0].shape, cache.dropped) != (before, start)
        cache.update_and_fetch(rows([token]), rows([token]))
    assert num_copies <= 5


def test_heads_widths_and_dtype_stay_as_they_come() -> None:
    cache = KVCache()
    cache.reserve(3, None)
    keys = mx.random.normal((1, 2, 3, 4)).astype(mx.bfloat16)
    values = mx.random.normal((1, 2, 3, 6)).astype(mx.bfloat16)
    found = cache.update_and_fetch(keys, values)
    assert [array.dtype for array in found] == [mx.bfloat16, mx.bfloat16]
    assert mx.array_equal(found[0], keys) and mx.array_equal(found[1], values)


def test_each_kind_of_layer_gets_its_cache() -> None:
    rotating, int8 = Cache(kind=CACHE_ROTATING, size=20, keep=4), Cache(kind=CACHE_INT8)
    assert isinstance(make_cache(Memory(state_arrays=2), rotating), RecurrentState)
    for layer, choice, kind, window, keep in (
        (Memory(), Cache(), KVCache, None, 0), (Memory(window=7), Cache(), KVCache, 7, 0),
        (Memory(), rotating, KVCache, 16, 4), (Memory(window=7), rotating, KVCache, 7, 0),
        (Memory(), int8, QuantisedCache, None, 0), (Memory(window=7), int8, QuantisedCache, 7, 0),
    ):  # fmt: skip
        cache = make_cache(layer, choice)
        assert type(cache) is kind and (cache.window, cache.keep) == (window, keep)


def test_a_recurrent_state_goes_on_where_it_is_or_begins_again_and_is_never_cut() -> None:
    def state_at(num_tokens: int) -> RecurrentState:
        state = RecurrentState(2)
        state[0], state[1] = mx.ones((1, 3, 2)), mx.ones((1, 2, 4, 4))
        state.settle(num_tokens)
        return state

    state, other = state_at(5), RecurrentState(2)
    assert other.arrays() == [] and other.length == 0, "two slots share nothing"
    state.cut(5)
    for length in (1, 4, 6, 100):
        with pytest.raises(CacheMismatch, match=f"cut to {length} tokens: its state is at 5"):
            state.cut(length)
        assert state.length == 5 and len(state.arrays()) == 2
    before = state.nbytes
    state.settle(1001)
    assert (state.length, state.nbytes) == (1001, before) == (1001, (6 + 32) * 4)
    state.cut(0)
    assert state.length == 0
    assert state.arrays() == [] and state[0] is None and state[1] is None


def test_a_recurrent_state_is_cut_inside_its_last_window_and_its_layer_takes_the_rows_that_stand_again() -> None:
    state, x, mask = RecurrentState(1), mx.arange(8.0).reshape(1, 4, 2), mx.zeros((4, 9))
    state[0] = mx.zeros(1)
    state.settle(5)
    state.reserve(4, None, has_drafts=True)
    state.record_window(lambda: LayerCall([x, mask], {"cache": LayerCall.HERE}, 4))
    state[0] = mx.ones(1)
    state.settle(9)
    fork = state.fork(6)
    for length in (8, 7):
        state.cut(length)
        assert state.length == length and state[0].item() == 0.0, "as before the window"
    for length in (4, 10):
        with pytest.raises(CacheMismatch):
            state.cut(length)
    again, none = state.take_replay(), state.take_replay()
    assert again and none is None
    (rows, no_mask), named = again.arguments(state)
    assert rows.tolist() == x[:, :2].tolist() and no_mask == "causal" and named == {"cache": state}
    assert fork.take_replay().num_rows == 1  # type: ignore[union-attr]
    state.cut(5)
    assert state.take_replay() is None and state[0].item() == 0.0
    state.reserve(1, None)
    state.record_window(lambda: LayerCall([x[:, :1]], {}, 1))
    state.settle(6)
    with pytest.raises(CacheMismatch, match="cut to 5 tokens"):
        state.cut(5)


def test_a_fork_takes_the_memory_of_its_part_and_goes_on_by_itself() -> None:
    long = KVCache()
    rows = mx.arange(5000 * 8, dtype=mx.float32).reshape(1, 1, 5000, 8)
    long.reserve(5000, None)
    long.update_and_fetch(rows, rows)
    part, whole = long.fork(20), long.fork(5000)
    assert part.nbytes == 2 * 256 * 8 * 4 and whole.nbytes == long.nbytes
    new = mx.full((1, 1, 1, 8), -1.0)
    for cache, length in ((part, 20), (whole, 5000)):
        cache.reserve(1, None)
        keys, _ = cache.update_and_fetch(new, new)
        assert mx.array_equal(keys[:, :, :length], rows[:, :, :length]) and mx.array_equal(keys[:, :, length:], new)
    long.cut(19)
    long.reserve(1, None)
    assert mx.array_equal(long.update_and_fetch(new, new)[0][:, :, :19], rows[:, :, :19])


@pytest.mark.parametrize(
    ("num_rows", "num_canvas", "grid", "last", "back"),
    [
        (3, 0, 1, [0, 1, 2], [0, 1, 2]),
        (4, 2, 1, [0, 1, 3, 3], [0, 1, 2, 2]),
        (6, 0, 3, [2, 2, 2, 5, 5, 5], [0, 1, 2, 3, 4, 5]),
        (9, 3, 3, [2, 2, 2, 5, 5, 5, 8, 8, 8], [0, 1, 2, 3, 4, 5, 6, 6, 6]),
        (3, 3, 3, [2, 2, 2], [0, 0, 0]),
    ],
)
def test_rows_see_block_or_canvas(num_rows: int, num_canvas: int, grid: int, last: list[int], back: list[int]) -> None:
    found = row_sights(num_rows, num_canvas, grid)
    assert [each.tolist() for each in found] == [last, back]
    cache = KVCache()
    cache.settle(2)
    cache.reserve(num_rows, None, num_canvas=num_canvas, grid=grid)
    mask = cache.make_mask(num_rows)
    if mask is None:
        assert num_canvas == num_rows
    elif isinstance(mask, str):
        assert (mask, num_canvas, grid) == ("causal", 0, 1)
    else:
        assert mask.sum(axis=-1).tolist() == [2 + row + 1 for row in last]
