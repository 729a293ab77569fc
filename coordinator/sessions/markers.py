"""Markers: how a model's text marks its thoughts and its calls, as mlx-lm knows it. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Markers:
    """Of the answer to one prompt."""

    machine: Any  # mlx_lm.generate.TextStateMachine
    begins_in: str  # state
    call_begins: str = ""
    call_ends: str = ""
    parse: Callable[[str, Any], Any] | None = None
    format: str = ""  # of calls, by mlx-lm's name of its parser
    thought_begins: str = ""
    thought_ends: str = ""
