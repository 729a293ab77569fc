"""The command line in this process: its flags are read, and what it would do is looked at instead of done."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.cli.app import app

Command = Callable[..., Any]


@pytest.fixture
def brigade() -> Command:
    """Runs `brigade` with these arguments; raises what it refuses with."""
    return lambda *arguments: app(list(arguments), standalone_mode=False)
