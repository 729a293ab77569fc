"""The command line in this very process: its flags are read, and what it would do is looked at instead of done."""

from collections.abc import Callable
from typing import Any

import pytest

from coordinator.cli import demo as demo_module
from coordinator.cli import generate as generate_module
from coordinator.cli import run as run_async_module
from coordinator.cli import verify as verify_module
from coordinator.cli.app import app
from coordinator.cli.generate import GenerateOptions
from coordinator.cluster.options import ClusterOptions

Command = Callable[..., Any]


@pytest.fixture
def brigade() -> Command:
    """Runs `brigade` with these arguments; raises what it refuses with."""
    return lambda *arguments: app(list(arguments), standalone_mode=False)


@pytest.fixture
def chosen() -> list[ClusterOptions]:
    """Those of each command whose options are noted."""
    return []


@pytest.fixture
def wished(
    brigade: Command, chosen: list[ClusterOptions], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., GenerateOptions]:
    """What `brigade` with these arguments would ask a chain for."""
    found: list[GenerateOptions] = []

    def note(options: ClusterOptions, wish: Any, **more: Any) -> None:
        chosen.append(options)
        found.append(wish)

    monkeypatch.setattr(generate_module, "run_generate", note)
    monkeypatch.setattr(verify_module, "run_verify", note)
    monkeypatch.setattr(demo_module, "run_generate", note)
    monkeypatch.setattr(run_async_module, "run_async", lambda work: None)

    def wished(*arguments: str) -> GenerateOptions:
        brigade(*arguments)
        return found.pop()

    return wished
