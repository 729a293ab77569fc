"""A local worker that ends, and ends: how often it is started again, and what the user reads."""

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.local import LocalWorker, keep_running
from coordinator.cluster.nodes import Nodes
from tests.unit.virtual_time import VirtualTime
from worker.errors import StageLost


@dataclass
class ShortLived:
    """A worker whose process ends after so long."""

    ran_s: float = 0.0
    name, model, draft_model = "worker-1", "demo", None

    async def wait_ended(self) -> str:
        await asyncio.sleep(self.ran_s)
        return "was ended by signal 9"


def keep(
    lives: Sequence[float | Exception], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], list[str], list[bool]]:
    """Return the pause before each start, what is said, and whether a worker runs, until the last of the lives."""
    virtual, left = VirtualTime(), [*lives]
    pauses, said, told = list[float](), list[str](), list[bool]()
    worker: Any = ShortLived()

    async def start(name: str, model: str, draft_model: str | None) -> Any:
        nonlocal ended
        assert (name, model, draft_model) == ("worker-1", "demo", None)
        pauses.append(virtual.now - ended)
        life = left.pop(0) if left else asyncio.CancelledError()
        ended = virtual.now
        if isinstance(life, BaseException):
            raise life
        ended += life
        return ShortLived(life)

    async def keep_all() -> None:
        async for running in keep_running(worker, said.append):
            told.append(running is not None)

    monkeypatch.setattr(LocalWorker, "start", start)
    ended = virtual.now
    with pytest.raises(asyncio.CancelledError):
        virtual.run(keep_all())
    assert not virtual.close()
    return pauses, said, told


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (StageLost("ended while starting", node="worker-1"), "ended while starting"),
        (BlockingIOError(errno.EAGAIN, "no process left"), "cannot be started (no process left)"),
    ],
)
def test_pauses_grow_and_each_try_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, how: str) -> None:
    """Also where the machine has no process or no memory left for now."""
    pauses, said, told = keep([error] * 9, monkeypatch)
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5])
    assert said == [
        "worker worker-1: was ended by signal 9; it is started again",
        *[f"worker worker-1: {how}; it is started again"] * 9,
    ]
    assert told == [False]


@pytest.mark.parametrize(
    ("is_given_up", "code", "expected"),
    [
        (True, -9, "did not answer, and was ended"),
        (False, -9, "was ended by signal 9"),
        (False, 3, "ended with exit code 3"),
    ],
)
def test_the_user_reads_who_ended_it(is_given_up: bool, code: int, expected: str) -> None:
    async def wait() -> int:
        return code

    process: Any = SimpleNamespace(returncode=None, wait=wait, send_signal=lambda number: None)
    worker = LocalWorker("worker-1", "demo", None, process)
    if is_given_up:
        worker.kill()
    assert asyncio.run(worker.wait_ended()) == expected


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ((0.0,) * 9, [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 5]),
        ((1.0,) * 9, [0.2, 0, 0, 0.6, 2.2, 4, 4, 4, 4, 4]),
        ((0.0, 0.0, 25.0, 0.0, 0.0), [0.2, 0.4, 0.8, 0, 0.4, 0.8]),  # one that ran for long ends the growing
    ],
    ids=["ends at once", "ends soon", "ran for long"],
)
def test_one_that_ends_as_soon_as_it_runs_is_tried_no_more_often(
    monkeypatch: pytest.MonkeyPatch, lives: tuple[float, ...], expected: list[float]
) -> None:
    pauses, _, told = keep(lives, monkeypatch)
    assert pauses == pytest.approx(expected)
    assert told == [False, True] * len(lives) + [False]


def test_the_user_is_told_once_a_worker_is_not_kept_running_any_more() -> None:
    class Odd(ShortLived):
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
