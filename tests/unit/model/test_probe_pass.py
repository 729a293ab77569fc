"""Who can be cut between its layers, and what is said of those that cannot: known types, and oddities of all kinds."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from tests.unit.model.toy import HEADS, LAYERS, VOCAB, WIDTH, Between, Layer, Toy, one_after_another
from tools.model_types.make import build_type
from worker.errors import ModelError
from worker.model.cache_spec import Memory
from worker.model.probe_pass import probe
from worker.model.stub_layers import as_returned, as_rows

FULL = Memory(None, HEADS, WIDTH // HEADS, WIDTH // HEADS, 4)

Caches = Sequence[Any]


def refusal(model: Any) -> str:
    with pytest.raises(ModelError) as caught:
        probe(model)
    return caught.value.message


# Admitted


def test_of_a_plain_model_all_is_found() -> None:
    found = probe(Toy())
    assert (found.num_layers, found.hidden_size, found.vocab_size, found.dtype) == (LAYERS, WIDTH, VOCAB, mx.float32)
    assert (found.shapes, found.returns, found.tied) == (((WIDTH,),), (0,) * LAYERS, False)
    assert (found.entries, found.layer_of_entry) == ((FULL,) * LAYERS, (0, 1, 2, 3))
    assert found.entries_of(1, 3) == [1, 2] and found.memories_of(3) == (FULL,)


class TakesMore(Layer):
    def __call__(self, x: mx.array, *more: Any, cache: Any = None) -> Any:
        return super().__call__(x, None, cache)


def test_masks_positions_and_numbers_that_every_stage_can_make_are_no_obstacle() -> None:
    def between(layers: list[Any], h: mx.array, caches: Caches) -> mx.array:
        L = h.shape[1]
        more = mx.zeros((L, L)), mx.zeros((1, 1, L, L)), mx.arange(L)[None], mx.array(3), 1.5, "causal", None
        for layer, cache in zip(layers, caches, strict=True):
            h = layer(h, *more, cache=cache)
        return h

    assert probe(Toy(between, TakesMore)).entries == (FULL,) * LAYERS


class Forgetful(Layer):
    """Uses no cache, also where it is given one."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        return super().__call__(x)


def test_caches_go_to_the_layers_that_take_them_and_the_embeddings_own_to_the_first() -> None:
    """A state, a window, several at once, one that is never asked; a layer without any."""

    class Mixed(Toy):
        def make_cache(self) -> list[Any]:
            return [ArraysCache(1), RotatingKVCache(5), CacheList(KVCache(), ArraysCache(2)), KVCache()]

    class OfSeveral(Layer):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
            cache[1][0] = x[:, :2]
            return super().__call__(x, None, cache[0])

    def between(layers: list[Any], h: mx.array, caches: Caches) -> mx.array:
        caches[0][0] = h[:, :1]
        return one_after_another(layers, h, [None, *caches[1:]])

    model = Mixed(between)
    model.layers[2:] = [OfSeveral(), Forgetful()]
    found = probe(model)
    first = Memory(state_arrays=1, state_bytes=WIDTH * 4, of_embedding=True)
    window = Memory(5, HEADS, WIDTH // HEADS, WIDTH // HEADS, 4)
    several = FULL, Memory(state_arrays=2, state_bytes=2 * WIDTH * 4)
    assert found.entries == (first, window, several, Memory())
    assert found.layer_of_entry == (0, 1, 2, 3) and found.memories_of(2) == several


class Pair(Layer):
    """Returns something else beside its rows: what the first layer made of them."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, first: mx.array | None = None) -> Any:
        B, L, _ = x.shape
        return super().__call__(x, mask, cache), mx.ones((B, L, 3, 2)) if first is None else first


def test_of_a_pair_that_nobody_takes_on_only_rows_travel() -> None:
    def between(layers: list[Any], h: mx.array, caches: Caches) -> mx.array:
        for layer, cache in zip(layers, caches, strict=True):
            h, _ = layer(h, None, cache)
        return h

    found = probe(Toy(between, Pair))
    assert (found.shapes, found.hidden_size, found.returns) == (((WIDTH,),), WIDTH, (2,) * LAYERS)


def test_of_a_pair_that_is_handed_on_both_travel_side_by_side() -> None:
    found = probe(Toy(handing_on, Pair))
    assert (found.shapes, found.hidden_size) == (((WIDTH,), (3, 2)), WIDTH + 6)
    rows, more = mx.random.normal((2, 5, WIDTH)), mx.random.normal((2, 5, 3, 2))
    back = as_returned(as_rows((rows, more, None), found.shapes), found.shapes, 3)
    assert mx.array_equal(back[0], rows) and mx.array_equal(back[1], more) and back[2:] == (None,)


# Refused


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("afm7", "its layers are in two lists"),
        ("deepseek_v41", "its hidden states have shape [1, 11, 2, 64], not a row for each of 11 tokens"),
        ("gemma3n", "layer 5 takes keys and values of layer 2"),
        ("iquestloopcoder", "its forward takes its layers apart instead of calling them"),
        ("kimi_k3", "layer 1 takes a result of layer 0 besides a hidden state"),
        ("nanbeige:loops", "it calls its layers in the order 0, 1, 2, 3, 4, 5, 0, 1, ..."),
        ("talkie", "layer 1 takes a result from before the layers besides a hidden state"),
    ],
)
def test_a_type_that_cannot_be_cut_is_refused_with_the_reason(name: str, said: str) -> None:
    assert refusal(build_type(name)[1]) == said


class WithHalves(Layer):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, half: Any = None) -> Any:
        return super().__call__(x, mask, cache), x.astype(mx.float16)


def doubled_between(layers: list[Any], h: mx.array, caches: Caches) -> mx.array:
    h = one_after_another(layers[:2], h, caches[:2])
    return one_after_another(layers[2:], 2 * h, caches[2:])


def handing_on(layers: list[Any], h: mx.array, caches: Caches) -> mx.array:
    more = None
    for layer, cache in zip(layers, caches, strict=True):
        h, more = layer(h, None, cache, more)
    return h


def with_the_first(layers: list[Any], h: mx.array, caches: Caches) -> mx.array:
    first = layers[0](h, cache=caches[0])
    h = one_after_another(layers[1:3], first, caches[1:3])
    return layers[3](h, first, cache=caches[3])


def failing(layers: list[Any], h: mx.array, caches: Caches) -> mx.array:
    raise ValueError("no such kernel.\nAnd more.")


@pytest.mark.parametrize(
    ("between", "layer", "said"),
    [
        (doubled_between, Layer, "layer 2 does not take what layer 1 returns as it is"),
        (handing_on, WithHalves, "layer 1 takes results of layer 0 of more than one dtype"),
        (with_the_first, TakesMore, "layer 3 takes a result of layer 0 besides a hidden state"),
        (failing, Layer, "its forward fails: no such kernel"),
    ],
)
def test_a_forward_that_cannot_be_cut_is_refused(between: Between, layer: type[Layer], said: str) -> None:
    assert refusal(Toy(between, layer)) == said


def test_parts_and_caches_that_one_stage_would_need_of_another_are_refused() -> None:
    class OwnCache(KVCache):
        pass

    model = Toy()
    model.layers[2].__class__ = type("Half", (Layer,), {"__call__": lambda s, x, *_: x.astype(mx.float16)})
    assert "its hidden states change their shape or dtype on the way" in refusal(model)
    model = Toy()
    model.make_cache = lambda: [OwnCache() for _ in range(LAYERS)]
    assert refusal(model) == "its caches are of a kind of their own, OwnCache"
    model = Toy(lambda layers, h, caches: one_after_another(layers, model.norm(h), caches))
    assert refusal(model).startswith("a part behind its layers runs before them too (")
    model = Toy(lambda layers, h, caches: one_after_another(layers, h * model.embed.weight[0, 0], caches))
    assert refusal(model).startswith("it asks its embedding for more than rows (")


def test_a_last_stage_that_asks_the_embedding_for_its_dtype_needs_it() -> None:
    class Curious(Toy):
        def __call__(self, ids: mx.array, cache: Caches) -> mx.array:
            return super().__call__(ids, cache).astype(self.embed.weight.dtype)

    assert probe(Curious()).tied


def test_a_refusal_of_caches_is_one_whatever_the_model_raises() -> None:
    """A layer that looks up its own kind of cache by name."""

    class Choosy(Layer):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
            assert {"KVCache": True}[type(cache).__name__]
            return super().__call__(x, mask, cache)

    assert "'RotatingKVCache' is missing" in probe(Toy(layer=Choosy)).rotating_refusal


# Other caches


@pytest.mark.parametrize(
    ("name", "unit", "said"),
    [
        ("qwen3", 32, ""),
        ("minicpm3", 64, ""),  # keys of 96 numbers and values of 64
        ("qwen3", 16, "quantised rows need heads of a multiple of 32 numbers, but they have 16"),
        ("mamba2", 32, "it has no keys and values"),
        ("falcon_h1", 32, "a layer of it has several"),
        ("gpt_oss", 32, "its attention cannot read them (Quantized SDPA does not support attention sinks"),
    ],
)
def test_a_pass_shows_why_caches_cannot_be_kept_in_8_bits(name: str, unit: int, said: str) -> None:
    found = probe(build_type(name, unit)[1]).quantised_refusal
    assert found.startswith(said) and bool(found) == bool(said)


def test_quantised_caches_are_refused_where_the_device_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.model.probe_pass.attends_quantised", lambda: False)
    assert "on this device" in probe(build_type("qwen3", 32)[1]).quantised_refusal


@pytest.mark.parametrize(("name", "refused"), [("qwen3", False), ("gpt_oss", False), ("deepseek_v32", True)])
def test_a_pass_shows_whether_caches_can_let_go_of_tokens(name: str, refused: bool) -> None:
    assert bool(probe(build_type(name)[1]).rotating_refusal) == refused
