"""A local worker that ends, and ends: how often it is started again, and what the user reads."""

import asyncio
from typing import Any

import pytest

from coordinator.cluster import keeper
from coordinator.cluster.keeper import Keeper
from coordinator.cluster.local import LocalWorker
from worker.errors import StageLost


class Ended:
    """A worker whose process has ended."""

    name, model = "worker-1", "demo"

    async def wait_ended(self) -> str:
        return "was ended by signal 9"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited before each try; the tenth is the last."""
    found: list[float] = []

    async def pause(seconds: float) -> None:
        found.append(seconds)
        if len(found) == 10:
            raise asyncio.CancelledError

    monkeypatch.setattr(keeper.asyncio, "sleep", pause)
    return found


def keep(start: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """What is said and who is told of, until the tenth pause."""
    said: list[str] = []
    told: list[Any] = []

    async def replaced(worker: LocalWorker | None) -> None:
        told.append(worker)

    monkeypatch.setattr(LocalWorker, "start", start)
    worker: Any = Ended()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Keeper(worker, replaced, said.append).run())
    return said, told


def test_pauses_grow_and_each_try_is_one_line(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(name: str, model: str) -> LocalWorker:
        raise StageLost("ended while starting", node=name)

    said, told = keep(fail, monkeypatch)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5]
    assert said == [
        "worker worker-1: was ended by signal 9; it is started again",
        *["worker worker-1: did not start; it is started again"] * 9,
    ]
    assert told == [None]


def test_one_that_ends_as_soon_as_it_runs_is_tried_no_more_often(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(name: str, model: str) -> Any:
        assert model == Ended.model
        return Ended()

    _, told = keep(start, monkeypatch)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5]
    assert [worker is None for worker in told] == [True, False] * 9 + [True]
