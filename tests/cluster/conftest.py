"""Models and started processes that the cluster tests share."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from tests.cluster.models import make_reciter, make_talker
from tests.cluster.processes import Starter, starting

RECITED = "aé日😀-xyz"  # characters of one to four bytes, each byte a token


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def` test on a loop of its own, as a server does."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    uvloop.run(
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters})
    )
    return True


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of four layers with a byte-level tokenizer."""
    return make_talker(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture(scope="session")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says RECITED over and over."""
    return make_reciter(tmp_path_factory.mktemp("reciter") / "model", RECITED)


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts processes; ends what is left of them after the test."""
    with starting() as starter:
        yield starter


@pytest.fixture(scope="module")
def module_start() -> Iterator[Starter]:
    """Starts processes; ends what is left of them after the module's tests."""
    with starting() as starter:
        yield starter
