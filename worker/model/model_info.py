"""Anatomy: plain facts about a model that can be cut, and the form that they give to what travels between layers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from worker.model.cachespec import Memory
from worker.model.module_tree import ModuleTree

Entry = Memory | tuple[Memory, ...]  # one of the model's own list of caches: a single one, or several together


@dataclass(frozen=True)
class ModelInfo:
    """Plain facts about a model: nothing here holds an array."""

    num_layers: int
    shapes: tuple[tuple[int, ...], ...]  # of a row of what travels: the hidden state's, and what else goes with it
    vocab_size: int
    dtype: mx.Dtype  # of hidden states
    returns: tuple[int, ...]  # how many parts each layer's result has; 0 for an array by itself
    entries: tuple[Entry, ...]  # the model's own list of caches
    layer_of_entry: tuple[int, ...]  # whose they are; the embedding's is layer 0's
    tied: bool  # whether the head needs the embedding
    int8_refusal: str = ""  # why caches cannot be kept in 8 bits
    rotating_refusal: str = ""  # why they cannot let go of tokens

    @property
    def hidden_size(self) -> int:
        """Numbers of a row that travels between stages."""
        return sum(map(math.prod, self.shapes))

    def entries_of(self, start: int, end: int) -> list[int]:
        """The numbers of the caches of layers [start, end)."""
        return [number for number, layer in enumerate(self.layer_of_entry) if start <= layer < end]

    def memories_of(self, layer: int) -> tuple[Memory, ...]:
        return tuple(memory for number in self.entries_of(layer, layer + 1) for memory in parts(self.entries[number]))


def parts(entry: Entry) -> tuple[Memory, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def as_returned(rows: mx.array, shapes: Sequence[tuple[int, ...]], num_parts: int) -> Any:
    """Rows that travelled, in the form in which a layer returned them: by themselves, or as the first of some parts."""
    if not num_parts:
        return rows
    splits = tuple(accumulate(map(math.prod, shapes[:-1])))
    parts = rows.split(splits, axis=-1) if splits else [rows]
    shaped = [part.reshape(*rows.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)]
    return (*shaped, *[None] * (num_parts - len(shaped)))


def as_rows(result: Any, shapes: Sequence[tuple[int, ...]]) -> mx.array:
    """What travels of what a layer returned, side by side."""
    if len(shapes) == 1:
        return result[0] if isinstance(result, tuple | list) else result
    return mx.concatenate([part.reshape(*part.shape[:2], -1) for part in result[: len(shapes)]], axis=-1)


class Blank:
    """An embedding that another node holds: something of the right shape and dtype, never computed."""

    def __init__(self, shape: Sequence[int], dtype: mx.Dtype) -> None:
        self._shape, self._dtype = shape, dtype

    def __call__(self, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return mx.zeros((*ids.shape[:2], *self._shape), self._dtype)


def strip_front(tree: ModuleTree, info: ModelInfo) -> None:
    """Take the embedding out; something that is never computed stands in for it."""
    for _, (parent, key) in tree.front:
        setattr(parent, key, Blank(info.shapes[0], info.dtype))
