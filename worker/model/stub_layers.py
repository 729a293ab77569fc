"""Stub layers: a gate before every layer decides whether the layer runs, while mlx-lm's own forward runs unchanged.

The forward still makes masks, scales, positions and cache indices for all layers, so the model can be cut between any
two of them. Modules of other stages lose their arrays.
Shapes: B slots, L window length.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

RunLayer = Callable[..., Any]  # a layer without its gate
Gate = Callable[[int, RunLayer, Sequence[Any], dict[str, Any]], Any]  # takes a layer's index and call; returns a result
Shapes = Sequence[tuple[int, ...]]  # per tensor that travels between layers, the shape of one row


def install_gates(layers: Sequence[nn.Module], gate: Gate) -> None:
    """Put the gate before every layer, without changing `isinstance`, parameters and attributes of the layers.

    The gate must not refer to the model: a reference cycle would keep weights alive.
    """
    for index, layer in enumerate(layers):
        layer.__class__ = _with_gate(type(layer))
        object.__setattr__(layer, "_gate", (gate, index))


@cache
def _with_gate(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        gate, index = self._gate
        return gate(index, lambda *a, **k: cls.__call__(self, *a, **k), args, kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


def as_returned(rows: mx.array, shapes: Shapes, num_parts: int) -> Any:
    """Turn received rows [B, L, sum of shapes] into a layer's result: a tuple of `num_parts`, or an array if 0."""
    if not num_parts:
        return rows
    splits = tuple(accumulate(map(math.prod, shapes[:-1])))
    parts = rows.split(splits, axis=-1) if splits else [rows]
    shaped = [part.reshape(*rows.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)]
    return (*shaped, *[None] * (num_parts - len(shaped)))


def as_rows(result: Any, shapes: Shapes) -> mx.array:
    """Return the tensors of a layer's result that travel, concatenated to rows [B, L, sum of shapes]."""
    if len(shapes) == 1:
        return first_part(result)
    return mx.concatenate([part.reshape(*part.shape[:2], -1) for part in result[: len(shapes)]], axis=-1)


def first_part(result: Any) -> mx.array:
    """Return the hidden state of a layer's result: the result itself, or the first of its parts."""
    return result[0] if isinstance(result, tuple | list) else result


def modules_in(part: Any) -> list[nn.Module]:
    """Return the modules of a module's part: itself, or those of a list."""
    return [each for each in (part if isinstance(part, list) else [part]) if isinstance(each, nn.Module)]


class StubEmbedding:
    """A stand-in for an embedding on another node: its output has the right shape and dtype, and is never computed."""

    def __init__(self, shape: Sequence[int], dtype: mx.Dtype) -> None:
        self._shape, self._dtype = shape, dtype

    def __call__(self, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return mx.zeros((*ids.shape[:2], *self._shape), self._dtype)


def drop_part(parent: nn.Module, key: str, besides: Sequence[nn.Module] = ()) -> None:
    """Remove all arrays from a part of a module, except those shared with the modules `besides`."""
    part = parent[key]
    if isinstance(part, mx.array):
        del parent[key]
    for module in modules_in(part):
        drop_arrays(module, besides)


def drop_arrays(module: nn.Module, besides: Sequence[nn.Module] = ()) -> None:
    """Remove all arrays from a module, except those shared with the modules `besides`."""
    kept = {id(part) for other in besides for part in other.modules()}
    for part in module.modules():
        for key in [key for key, value in part.items() if isinstance(value, mx.array) and id(part) not in kept]:
            del part[key]
