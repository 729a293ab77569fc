"""Clocks of workers that run faster or slower than ours: a chain of hours knows how far they are from it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster import chain
from coordinator.cluster.chain import Chain
from coordinator.planning.plan import Assignment, Plan
from protos.brigade_pb2 import Frame, Result, Sample, Timing
from tests.unit.cluster.fake_network import SPEC
from tests.unit.virtual_time import VirtualTime
from worker.errors import StageLost
from worker.node.framing import PLAIN

DRIFT = 20e-6  # what cheap quartzes differ by
OFF_NS = 1_500_000  # what may be wrong of an offset: the drift of little more than a minute


class FakeStage:
    """Stage 0 and all others: answers at once."""

    def __init__(self, executor: Any, thread: Any, epoch: int, send: Any, wire: Any) -> None:
        self._results: list[Result] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *watched: Coroutine[Any, Any, None]) -> None:
        self._tasks = [asyncio.create_task(each) for each in watched]

    def submit(self, frame: Frame) -> None:
        samples = [Sample(slot=window.slot) for window in frame.windows]
        timings = [Timing(stage=stage) for stage in range(3)]
        self._results.append(Result(epoch=frame.epoch, step=frame.step, samples=samples, timings=timings))

    async def next_result(self) -> Result:
        return self._results.pop(0)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class FakeLink:
    wire, send = PLAIN, None

    async def wait_open(self) -> None:
        pass

    async def wait_lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


class DriftingPeer:
    """A worker whose clock gains or loses."""

    def __init__(self, name: str, drift: float) -> None:
        self.name, self.addresses, self.is_draining = name, ["192.168.1.7:50070"], False
        self.drift = drift
        self.is_silent = False
        self._began = time.monotonic_ns()

    @property
    def true_offset(self) -> int:
        """Nanoseconds."""
        return round((time.monotonic_ns() - self._began) * self.drift)

    async def clock_offset(self) -> int:
        if self.is_silent:
            raise StageLost("does not say", node=self.name)
        return self.true_offset

    async def attach(self, request: Any) -> None:
        pass

    def detach(self) -> None:
        pass

    def link(self, epoch: int, stage: int, sender: str) -> FakeLink:
        return FakeLink()

    async def results(self, on_draining: Callable[[], None]) -> AsyncIterator[Result]:
        await asyncio.Event().wait()
        yield Result()


def test_offsets_stay_right_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what stages compute shows as what the wire takes: 72 ms after an hour."""
    virtual = VirtualTime()
    monkeypatch.setattr(chain, "Stage", FakeStage)
    monkeypatch.setattr(chain, "Executor", lambda *args, **kwargs: None)

    async def run() -> None:
        peers = [DriftingPeer("a", DRIFT), DriftingPeer("b", -DRIFT)]
        names = ("coordinator", "a", "b")
        plan = Plan(tuple(Assignment(name, at, at + 1, 0, 0, 0) for at, name in enumerate(names)), 100)
        deployment: Any = SimpleNamespace(
            plan=plan, peers=peers, spec=SPEC, coordinator=None, check_finite=False, load_request=lambda stage: None
        )
        own: Any = SimpleNamespace(shard=object(), thread=None)
        async with Chain(own, deployment) as found:
            await found.open()
            offsets = found.clock_offsets
            for minute in range(180):
                await asyncio.sleep(60)
                peers[0].is_silent = minute % 10 == 5  # for one measurement of ten
                for peer, offset in zip(peers, offsets[1:], strict=True):
                    assert abs(peer.true_offset - offset) <= OFF_NS * (
                        2 if peers[0].is_silent or minute % 10 == 6 else 1
                    )
            assert offsets[0] == 0 and min(map(abs, offsets[1:])) > 100 * OFF_NS

    virtual.run(run())
    assert not virtual.close()
