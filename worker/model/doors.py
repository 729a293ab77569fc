"""Doors: before a layer of a model runs, it asks. So a model can be cut between its layers, its own forward untouched.

mlx-lm's forward makes masks, scales, positions and caches' places for the whole list of layers, whichever of them are
here. A door stands in front of every layer: what asks decides whether the layer runs, and on what.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import mlx.nn as nn

Run = Callable[..., Any]


class Keeper(Protocol):
    """Who is asked at the doors of one model."""

    def enter(self, index: int, run: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What layer `index` returns; `run` is the layer itself."""


@dataclass(frozen=True)
class _Door:
    """What a layer with a door knows. It must not know the model: the model's memory goes when nobody holds it."""

    keeper: Keeper
    index: int


def put_doors(layers: Sequence[nn.Module], keeper: Keeper) -> None:
    """Put a door before every layer. It stays what it is for `isinstance`, for its parameters and its attributes."""
    for index, layer in enumerate(layers):
        layer.__class__ = _with_door(type(layer))
        object.__setattr__(layer, "_door", _Door(keeper, index))


@cache
def _with_door(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        door: _Door = self._door
        return door.keeper.enter(door.index, lambda *a, **k: cls.__call__(self, *a, **k), args, kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "without_door": cls})
