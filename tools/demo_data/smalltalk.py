"""Greetings and questions about the model itself, so that a chat does not start with nonsense. Nothing is held out."""

import functools
import random
import tomllib
from pathlib import Path
from typing import Any

from tools.demo_data.turn import Turn

KIND = "smalltalk"


@functools.cache
def exchanges() -> list[dict[str, Any]]:
    """Read smalltalk.toml."""
    return tomllib.loads(Path(__file__).with_name("smalltalk.toml").read_text())["exchange"]


def sample(rng: random.Random, held_out: bool = False) -> Turn:
    """Draw a greeting or a question about the model."""
    exchange = rng.choice(exchanges())
    return Turn(KIND, rng.choice(exchange["prompts"]), exchange["answer"])
