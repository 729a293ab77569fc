"""What layers of mlx-lm need to work on a lane: attention slot by slot, a position for every row."""

import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from protos.brigade_pb2 import Cache
from worker.compute.batching import Lane, LaneWindow
from worker.compute.shard import WindowRope, accept_rows
from worker.memory.slot_caches import Caches
from worker.model.cache_spec import Memory

H, K = 2, 4


def rows(count: int) -> mx.array:
    return mx.random.normal((1, H, count, K))


def test_what_a_layer_says_of_attention_beyond_the_cache_holds_for_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as attention sinks: for slots whose caches are packed together, and for one by itself."""
    seen: list[tuple[int, object]] = []

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        seen.append((queries.shape[0], more["sinks"]))
        return queries

    class Layer(nn.Module):
        pass

    module = ModuleType("a_type_to_come")
    module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Layer, "__module__", module.__name__)
    accept_rows(Layer())
    lane = Lane([LaneWindow(Caches([Memory()], [0], Cache()), 0, count) for count in (1, 1, 2)])
    view, queries = lane.views()[0], rows(4)
    keys, values = view.update_and_fetch(rows(4), rows(4))
    mask = view.make_mask(4)
    output = module.scaled_dot_product_attention(queries, keys, values, cache=view, scale=1.0, mask=mask, sinks=5)
    assert mx.array_equal(output, queries) and seen == [(2, 5), (1, 5)]


def test_a_rope_takes_positions_as_a_number_as_one_of_each_slot_and_as_one_of_each_row() -> None:
    rope = nn.RoPE(K)
    windows, x = WindowRope(rope), rows(3)
    expected = rope(x, offset=7)
    for offset in (7, mx.array(7), mx.array([7, 8, 9])):  # gemma4 gives an array of no dimensions
        assert mx.allclose(windows(x, offset=offset), expected, atol=1e-5)
    turned = windows(x, offset=mx.array([9, 7, 8]))
    apart = [rope(x[:, :, row : row + 1], offset=position) for row, position in enumerate((9, 7, 8))]
    assert mx.allclose(turned, mx.concatenate(apart, axis=2), atol=1e-5)
    two = mx.concatenate([x, x])
    of_each = mx.concatenate([expected, rope(x, offset=2)])
    assert mx.allclose(windows(two, offset=mx.array([7, 2])), of_each, atol=1e-5)
    assert windows.dims == K
