"""A local worker that ends, and ends: how often it is started again, and what the user reads."""

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster import local
from coordinator.cluster.local import LocalWorker, keep_running
from coordinator.cluster.nodes import Nodes
from worker.errors import StageLost


class Clock:
    """Seconds, which pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Ended:
    """A worker whose process has ended, after so long."""

    name, model, draft_model = "worker-1", "demo", None

    def __init__(self, clock: Clock | None = None, ran_s: float = 0.0) -> None:
        self._clock = clock or Clock()
        self._ran_s = ran_s

    async def wait_ended(self) -> str:
        self._clock.now += self._ran_s
        return "was ended by signal 9"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(local, "time", found)
    return found


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited before each try; the tenth is the last."""
    found: list[float] = []

    async def pause(seconds: float) -> None:
        found.append(seconds)
        if len(found) == 10:
            raise asyncio.CancelledError

    monkeypatch.setattr(local.asyncio, "sleep", pause)
    return found


def keep(start: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """What is said and who is told of, until the tenth pause."""
    said: list[str] = []
    told: list[Any] = []

    async def keep_all(worker: LocalWorker) -> None:
        async for running in keep_running(worker, said.append):
            told.append(running)  # noqa: PERF401 - the cancellation at the end must not lose them

    monkeypatch.setattr(LocalWorker, "start", start)
    worker: Any = Ended()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(keep_all(worker))
    return said, told


@pytest.mark.parametrize(
    "error",
    [
        StageLost("ended while starting", node="worker-1"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    ],
)
def test_pauses_grow_and_each_try_is_one_line(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also where the machine has no process or no memory left for now."""

    async def fail(name: str, model: str, draft_model: str | None) -> LocalWorker:
        raise error

    said, told = keep(fail, monkeypatch)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5]
    assert said == [
        "worker worker-1: was ended by signal 9; it is started again",
        *["worker worker-1: did not start; it is started again"] * 9,
    ]
    assert told == [None]


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ((), [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5]),
        ((1.0,) * 20, [0.2, 0, 0, 0.6, 2.2, 4, 4, 4, 4, 4]),
        ((0.0, 0.0, 25.0), [0.2, 0.4, 0.8, 0, 0.4, 0.8]),  # one that ran for long ends the growing
    ],
    ids=["ends at once", "ends soon", "ran for long"],
)
def test_one_that_ends_as_soon_as_it_runs_is_tried_no_more_often(
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    lives: tuple[float, ...],
    expected: list[float],
) -> None:
    to_live = iter(lives)

    async def start(name: str, model: str, draft_model: str | None) -> Any:
        assert model == Ended.model
        return Ended(clock, ran_s=next(to_live, 0.0))

    _, told = keep(start, monkeypatch)
    assert pauses[: len(expected)] == pytest.approx(expected)
    assert [worker is None for worker in told] == [True, False] * 9 + [True]


def test_the_user_is_told_once_a_worker_is_not_kept_running_any_more() -> None:
    class Odd(Ended):
        async def wait_ended(self) -> str:
            raise KeyError("odd")

    async def keep_one() -> str:
        peer: Any = SimpleNamespace(name=Odd.name, address="127.0.0.1:1")
        worker: Any = Odd()
        network: Any = None
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        Nodes([peer]).keep([worker], network, told.set_result)
        return await told

    line = asyncio.run(asyncio.wait_for(keep_one(), 60))
    assert line.startswith("worker worker-1 is not started again once it ends: internal error: KeyError('odd')")
