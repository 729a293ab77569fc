"""What all tests share: MLX's streams on this thread, and the times of the folders at the end of a run."""

import gc
import os
import threading
from collections import Counter
from collections.abc import Generator, Iterator

import mlx.core as mx
import pytest

import worker  # noqa: F401 - before any test imports gRPC, which takes part in forks unless it is told not to
from worker.platform.machine import freeze_heap

_unfreeze = gc.unfreeze


@pytest.fixture(scope="session", autouse=True)
def streams() -> Iterator[None]:
    """A command that a test runs on this thread must not take from the next test what it computes on."""
    clear = mx.clear_streams

    def clear_elsewhere() -> None:
        if threading.current_thread() is not threading.main_thread():
            clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "clear_streams", clear_elsewhere)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this code keeps between two runs goes into a folder of this run, which its processes share."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def left_frozen() -> Iterator[None]:
    """A cluster that ends thaws the heap: to look for garbage among the modules of all tests takes a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is let go of: as in a process that has loaded nothing."""
    monkeypatch.setattr(gc, "unfreeze", _unfreeze)
    freeze_heap.cache_clear()
    gc.collect()


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[None]:
    """For a CPU MLX compiles with a C++ compiler: a second for every kind of activation, and parameter of a filter."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is let go of has to be gone at once: memory must not wait for Python to find cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the modules of all tests: it took a third of the time that they need to import."""
    gc.disable()
    found = yield
    gc.enable()
    gc.freeze()
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests of each folder there were, and how long they took."""
    seconds: Counter[str] = Counter()
    tests: dict[str, set[str]] = {}
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            folder = "/".join(report.nodeid.split("/")[:2])
            seconds[folder] += report.duration
            tests.setdefault(folder, set()).add(report.nodeid)
    for folder, taken in sorted(seconds.items()):
        terminalreporter.write_line(f"{folder}: {len(tests[folder])} tests, {taken:.0f} s")
