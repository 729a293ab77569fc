"""The command line in this very process: its flags are read, and what it would do is looked at instead of done."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.cli import commands
from coordinator.cli import generate as generate_module
from coordinator.cli import run_async as run_async_module
from coordinator.cli.app import app
from coordinator.cli.wish import Wish
from coordinator.cluster.options import ClusterOptions

Command = Callable[..., Any]


@pytest.fixture
def brigade() -> Command:
    """Runs `brigade` with these arguments; raises what it refuses with."""
    return lambda *arguments: app(list(arguments), standalone_mode=False)


@pytest.fixture
def chosen() -> list[ClusterOptions]:
    """Those of each command whose wish is noted."""
    return []


@pytest.fixture
def wished(brigade: Command, chosen: list[ClusterOptions], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Wish]:
    """What `brigade` with these arguments would ask a chain for."""
    found: list[Wish] = []

    def note(options: ClusterOptions, wish: Any, **more: Any) -> None:
        chosen.append(options)
        found.append(wish)

    monkeypatch.setattr(generate_module, "run_generate", note)
    monkeypatch.setattr(commands, "run_verify", note)
    monkeypatch.setattr(run_async_module, "run_async", lambda work: None)

    def wished(*arguments: str) -> Wish:
        brigade(*arguments)
        return found.pop()

    return wished
