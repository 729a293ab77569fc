"""What the one pure module says of a cache is what real caches hold and do: alone, sliding, quantised, in packs."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from protos.brigade_pb2 import CACHE_INT4, CACHE_INT8, CACHE_ROTATING, Cache
from tests.tiny import make_model
from worker.compute.batching import LaneWindow
from worker.compute.shard import Shard
from worker.errors import CacheMismatch
from worker.memory.kv_cache import KVCache, QuantisedCache, join
from worker.memory.slot_caches import LayerCache, make_cache
from worker.model.cache_spec import MOST_CANVAS, ROW_BLOCK, Memory, cache_spec, pack_capacity
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

H, K, ITEM = 2, 64, 2  # heads, head size, bytes of bfloat16


def memory(window: int | None = None) -> Memory:
    return Memory(window, H, K, K, ITEM)


STATE = Memory(state_arrays=2)
FULL, INT8 = Cache(), Cache(kind=CACHE_INT8)


def rotating(size: int) -> Cache:
    return Cache(kind=CACHE_ROTATING, size=size, keep=4)


def rows(count: int) -> mx.array:
    return mx.zeros((1, H, count, K), mx.bfloat16)


def feed(cache: LayerCache, count: int) -> None:
    assert isinstance(cache, KVCache)
    cache.reserve(count, None)
    cache.update_and_fetch(rows(count), rows(count))


def most_held(cache: LayerCache, num_rows: int, chunk: int) -> int:
    """The most bytes while a session grows to so many rows: its prompt in chunks, then drafts, half of them cut."""
    most = fed = 0
    while fed < num_rows:
        count = min(chunk if fed < num_rows // 2 else 16, num_rows - fed)
        feed(cache, count)
        most = max(most, cache.nbytes)
        fed += count if count != 16 else 8
        cache.cut(fed)
    return most


@pytest.mark.parametrize(
    ("num_rows", "chunk"),
    [(1, 1), (255, 1), (256, 1), (257, 256), (700, 64), (2100, 256), (4096, 256), (4097, 64), (5000, 1024)],
)
@pytest.mark.parametrize(
    ("kept", "choice"),
    [
        (memory(), INT8),
        (memory(), Cache(kind=CACHE_INT4)),
        (memory(window=1), FULL),
        (memory(window=2), FULL),
        (memory(window=512), FULL),
        (memory(window=513), FULL),
        (memory(window=512), INT8),
        (memory(), rotating(100)),
        (memory(), rotating(1024)),
        (memory(window=300), rotating(1024)),
        (memory(window=3000), rotating(1024)),
    ],
)
def test_a_cache_that_is_never_packed_comes_to_hold_just_what_is_reserved(
    kept: Memory, choice: Cache, chunk: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chunk <= (cache_spec(kept, choice).longest_chunk or chunk)
    monkeypatch.setattr("worker.model.cache_spec.WINDOW_CHUNK", max(chunk, ROW_BLOCK))  # the longest of this session
    reserved = cache_spec(kept, choice).nbytes(memory(), num_rows)
    assert most_held(make_cache(kept, choice), num_rows, chunk) == reserved


@pytest.mark.parametrize(("key_size", "value_size"), [(96, 64), (64, 32)])
def test_keys_and_values_of_two_sizes_are_quantised_in_groups_of_one(key_size: int, value_size: int) -> None:
    kept = Memory(None, H, key_size, value_size, ITEM)
    cache = make_cache(kept, INT8)
    assert isinstance(cache, QuantisedCache)
    cache.reserve(1, None)
    cache.update_and_fetch(*(mx.zeros((1, H, 1, size), mx.bfloat16) for size in (key_size, value_size)))
    assert cache.group_size == 32 and cache.nbytes == cache_spec(kept, INT8).nbytes(kept, 1)


@pytest.mark.parametrize(("kept", "choice"), [(memory(window=128), FULL), (memory(window=128), INT8)])
def test_a_window_takes_long_chunks_within_its_reservation_and_is_small_again(kept: Memory, choice: Cache) -> None:
    spec, cache = cache_spec(kept, choice), make_cache(kept, choice)
    assert isinstance(cache, KVCache) and spec.longest_chunk == 1024, "32 rows for each of 128 experts, of which 4 run"
    sizes = []
    for count in (1024, 1024, 1024, 300, 1):
        feed(cache, count)
        sizes.append(cache.nbytes)
    assert max(sizes) == spec.nbytes(kept, 9000) > sizes[-1]
    assert sizes[-1] == 512 * spec.row_bytes(kept), "a step does not read what only the chunk before it needed"


@pytest.mark.parametrize("window", [16, 1024])
@pytest.mark.parametrize("length", [64, 256, MOST_CANVAS])
def test_canvases_and_the_text_before_them_stay_within_what_a_sliding_cache_reserves(window: int, length: int) -> None:
    spec, cache = cache_spec(memory(window), FULL), make_cache(memory(window), FULL)
    assert isinstance(cache, KVCache)
    most, fed = 0, 0
    for unfed in (37, length, length, length):  # the end of a prompt, then finished canvases
        for count in (unfed + length, length, length):
            feed(cache, count)
            most = max(most, cache.nbytes)
            reserved = spec.nbytes(memory(), fed + unfed + length)
            assert most <= reserved
            cache.cut(fed + unfed)
        fed += unfed


@pytest.mark.parametrize("num_rows", [1, 256, 257, 700, 2100, 4096, 4097, 5000])
def test_a_full_cache_comes_to_hold_what_is_reserved_alone_and_beside_others(num_rows: int) -> None:
    spec, members = cache_spec(memory(), FULL), [KVCache(), KVCache()]
    reserved = spec.nbytes(memory(), num_rows)
    assert most_held(members[0], num_rows, 256) == reserved
    feed(members[1], num_rows)
    join(members, pack_capacity(num_rows))
    assert spec.can_be_packed and [member.nbytes for member in members] == [reserved] * 2


CHOICES = {
    "full": (FULL, mx.bfloat16),
    "full32": (FULL, mx.float32),
    "int8": (INT8, mx.float32),
    "rotating": (rotating(100), mx.float32),
}
PAIRS = [("qwen3", "full"), ("gemma3_text", "full32"), ("gemma3_text", "rotating"), ("qwen3_5", "int8")]


@pytest.mark.parametrize(
    ("family", "choice", "dtype"),
    [
        pytest.param(
            family, *CHOICES[name], id=f"{family}-{name}", marks=() if (family, name) in PAIRS else pytest.mark.matrix
        )
        for family in ("qwen3", "gemma3_text", "qwen3_5")
        for name in CHOICES
    ],
)
def test_layers_of_a_lane_hold_what_is_reserved(family: str, choice: Cache, dtype: mx.Dtype, tmp_path: Path) -> None:
    """Full, sliding and recurrent layers, in a lane of two."""
    config = {"head_dim": 64, "linear_key_head_dim": 32} if family == "qwen3_5" else {"head_dim": 64}
    checkpoint = open_folder(make_model(tmp_path / "model", family, dtype=dtype, config=config))
    spec, shard = replace(describe(checkpoint), cache=choice), Shard(checkpoint, 0, 4)
    slots = [shard.make_caches(choice) for _ in range(2)]
    for base, count in ((0, 60), (60, 199), (259, 2)):
        places = [LaneWindow(caches, base, count, has_drafts=count == 2) for caches in slots]
        mx.eval(shard(mx.zeros((1, 2 * count), mx.int32), places))
    for caches in slots:
        assert [cache.nbytes for cache in caches.own] == [spec.reserved_bytes(i, i + 1, 261) for i in range(4)]


@pytest.mark.parametrize(
    ("kept", "choice", "limit"),
    [
        (memory(), FULL, None),
        (memory(), INT8, None),
        (memory(window=12), FULL, 11),
        (memory(window=12), INT8, 11),
        (memory(), rotating(16), 15),
        (memory(window=9), rotating(16), 8),
    ],
)
def test_up_to_the_length_that_is_named_a_cache_can_be_cut_anywhere_and_not_beyond(
    kept: Memory, choice: Cache, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "step", 1)  # so that rows are let go of as soon as they may be
    assert cache_spec(kept, choice).rows_that_can_be_cut == limit
    assert cache_spec(STATE, choice).rows_that_can_be_cut == 0

    def can_be_cut(length: int, to: int) -> bool:
        cache = make_cache(kept, choice)
        for _ in range(length):
            feed(cache, 1)
        cache.drop_unseen()  # as where another node's rows come
        try:
            cache.cut(to)
        except CacheMismatch:
            return False
        return True

    assert all(can_be_cut(limit or 30, to) for to in range(limit or 30))
    assert limit is None or not can_be_cut(limit + 1, (0 if kept.window else choice.keep) + 1)
