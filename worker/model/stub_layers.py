"""Stub layers: a gate before every layer decides whether the layer runs, while mlx-lm's own forward runs unchanged.

The forward makes masks, scales, positions and cache indices for the whole list of layers, wherever they are. With a
gate before every layer the model can be cut between any two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import mlx.nn as nn

Run = Callable[..., Any]


class LayerGate(Protocol):
    """Decides what each layer of one model does."""

    def enter(self, index: int, run: Run, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of layer `index`; `run` runs the layer itself."""


@dataclass(frozen=True)
class _Entry:
    """A layer's gate and index. It holds no module: a reference cycle would keep weights alive."""

    gate: LayerGate
    index: int


def install_gates(layers: Sequence[nn.Module], gate: LayerGate) -> None:
    """Put the gate before every layer. `isinstance`, parameters and attributes of a layer stay as they are."""
    for index, layer in enumerate(layers):
        layer.__class__ = _with_gate(type(layer))
        object.__setattr__(layer, "_gate", _Entry(gate, index))


@cache
def _with_gate(cls: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry: _Entry = self._gate
        return entry.gate.enter(entry.index, lambda *a, **k: cls.__call__(self, *a, **k), args, kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
