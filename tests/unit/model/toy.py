"""A model that mlx-lm has not: as plain as can be, to be made odd in one way per test."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

LAYERS, WIDTH, HEADS, VOCAB = 4, 8, 2, 11

Between = Callable[[list[Any], mx.array, Sequence[Any]], Any]


class Layer(nn.Module):
    """Adds to each row; keeps keys and values, if it is told where."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        B, L, D = x.shape
        rows = self.up(x).reshape(B, L, HEADS, -1).transpose(0, 2, 1, 3)
        if cache is not None:
            rows = cache.update_and_fetch(rows, rows)[0][..., -L:, :]
        return x + rows.transpose(0, 2, 1, 3).reshape(B, L, D)


def one_after_another(layers: list[Any], h: mx.array, caches: Sequence[Any]) -> Any:
    for layer, cache in zip(layers, caches, strict=True):
        h = layer(h, None, cache)
    return h


class Toy(nn.Module):
    """Four layers between an embedding and a head; `between` calls them."""

    def __init__(
        self, between: Between = one_after_another, layer: Callable[[], Any] = Layer, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = [layer() for _ in range(LAYERS)]
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.between = between

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in self.layers]

    def __call__(self, ids: mx.array, cache: Sequence[Any]) -> mx.array:
        return self.head(self.norm(self.between(self.layers, self.embed(ids), cache)))
