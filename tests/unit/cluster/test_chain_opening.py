"""A chain that is not open in time: the error names the node that held it up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster import chain
from coordinator.cluster.chain import Chain
from coordinator.planning.plan import Assignment, Plan
from protos.brigade_pb2 import Result, StatusReply
from tests.unit.cluster.fake_network import SPEC
from tests.unit.cluster.test_clocks import DriftingPeer, FakeStage
from tests.unit.virtual_time import VirtualTime
from worker.errors import BrigadeError, EngineHung, NodeSilent, StageLost


class SilentStage(FakeStage):
    """Takes frames, and no result ever comes back."""

    has_outcome, busy_s, last_step = False, 0.0, 0

    async def next_result(self) -> Result:
        await asyncio.Event().wait()
        raise AssertionError


class OpeningPeer(DriftingPeer):
    """A worker that never joins, or that reports how long its engine has been at a step."""

    address = "192.168.1.7:50070"

    def __init__(self, name: str, *, joins: bool = True, busy_s: float | None = 0.0) -> None:
        super().__init__(name, 0.0)
        self._joins = joins
        self._busy_s = busy_s

    async def attach(self, request: Any) -> None:
        if not self._joins:
            await asyncio.Event().wait()

    async def status(self, within_s: float) -> StatusReply:
        if self._busy_s is None:
            raise StageLost("does not answer", node=self.name)
        return StatusReply(busy_s=self._busy_s)


@pytest.mark.parametrize(
    ("a", "b", "kind", "node"),
    [
        (OpeningPeer("a", joins=False), OpeningPeer("b"), EngineHung, "a"),
        (OpeningPeer("a", busy_s=9.0), OpeningPeer("b", busy_s=2.0), EngineHung, "a"),
        (OpeningPeer("a", busy_s=9.0), OpeningPeer("b", busy_s=None), NodeSilent, "b"),
        (OpeningPeer("a"), OpeningPeer("b"), StageLost, ""),
    ],
    ids=["never joins", "hangs at a step", "falls silent", "no engine is at work"],
)
def test_the_node_that_holds_up_the_opening_is_named(
    monkeypatch: pytest.MonkeyPatch, a: OpeningPeer, b: OpeningPeer, kind: type[BrigadeError], node: str
) -> None:
    virtual = VirtualTime()
    monkeypatch.setattr(chain, "Stage", SilentStage)
    monkeypatch.setattr(chain, "Executor", lambda *args, **kwargs: None)

    async def run() -> None:
        plan = Plan(tuple(Assignment(name, at, at + 1, 0, 0, 0) for at, name in enumerate(("here", "a", "b"))), 100)
        deployment: Any = SimpleNamespace(
            plan=plan, peers=[a, b], spec=SPEC, coordinator=None, check_finite=False, load_request=lambda stage: None
        )
        own: Any = SimpleNamespace(shard=object(), thread=None)
        began = virtual.now
        async with Chain(own, deployment) as found:
            with pytest.raises(kind) as caught:
                await found.open(within_s=3.0)
        assert (type(caught.value), caught.value.node) == (kind, node) and virtual.now - began == pytest.approx(3.0)

    virtual.run(run())
    assert not virtual.close()
