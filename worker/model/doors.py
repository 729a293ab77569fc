"""Doors: whether a layer of a model runs, and on what, is decided by a keeper, and the model's forward is untouched.

That forward makes masks, scales, positions and caches' places for the whole list of layers, whichever of them are here.
With a door before every layer the model can be cut between any two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import mlx.nn as nn

Run = Callable[..., Any]


class Keeper(Protocol):
    """Decides at the doors of one model."""

    def enter(self, index: int, run: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What layer `index` returns; `run` is the layer itself."""


@dataclass(frozen=True)
class _Door:
    """What a layer's door knows. Not the model: that would be a cycle, and keep weights that nobody holds any more."""

    keeper: Keeper
    index: int


def put_doors(layers: Sequence[nn.Module], keeper: Keeper) -> None:
    """Put a door before every layer; for `isinstance`, parameters and attributes the layer stays what it is."""
    for index, layer in enumerate(layers):
        layer.__class__ = _with_door(type(layer))
        object.__setattr__(layer, "_door", _Door(keeper, index))


@cache
def _with_door(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        door: _Door = self._door
        return door.keeper.enter(door.index, lambda *a, **k: cls.__call__(self, *a, **k), args, kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
