"""What mlx-lm's attention layers need to work on a lane: attention by slot, and a position for every row.

They all call the `scaled_dot_product_attention` of their own module with the cache, and a rope with an offset.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.memory.lane import Attention, LaneCache


def serve_lanes(layer: nn.Module) -> None:
    """Let one of the model's layers work on a lane whose rows lie end to end; on any other it does what it did."""
    for module in list(layer.modules()):
        _serve(sys.modules[type(module).__module__])
        for name, rope in list(_ropes(module)):
            setattr(module, name, WindowRope(rope))


class LaneAttention:
    """A module's own attention, which may also be given a lane's cache."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    def __call__(
        self, queries: mx.array, keys: Any, values: Any, cache: Any = None, *rest: Any, **more: Any
    ) -> mx.array:
        """As mlx-lm's `scaled_dot_product_attention`; with a LaneCache, each slot's queries on its own keys."""
        if isinstance(cache, LaneCache):
            named = dict(zip(("scale", "mask", "sinks"), rest, strict=False)) | more
            return cache.attend(self._attention, queries, keys, values, **named)
        return self._attention(queries, keys, values, cache, *rest, **more)


class WindowRope:
    """A layer's own rope, which may also be given the position of every row (WeDLM, arXiv 2512.22737, section 4)."""

    def __init__(self, rope: Callable[..., mx.array]) -> None:
        self._rope = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **more: Any) -> mx.array:
        """Rotate [B, H, L, K]; `offset` is the first row's position, [B] of each slot's first, or for one slot [L]."""
        if isinstance(offset, int) or offset.ndim == 0 or x.shape[0] > 1:
            return self._rope(x, offset=offset, **more)
        return self._rope(x.transpose(2, 1, 0, 3), offset=offset, **more).transpose(2, 1, 0, 3)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rope, name)


def _ropes(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Parts of this module that rotate rows by an offset, whatever their names."""
    for name, part in module.items():
        is_leaf = isinstance(part, nn.Module) and not part.parameters() and not part.children()
        if is_leaf and "offset" in inspect.signature(type(part).__call__).parameters:
            yield name, part


def _serve(module: Any) -> None:
    attention = getattr(module, "scaled_dot_product_attention", None)
    if attention is not None and not isinstance(attention, LaneAttention):
        module.scaled_dot_product_attention = LaneAttention(attention)
