"""A chain of fake stages and peers: its clocks over hours, and which node is named if it opens or answers late."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from coordinator.cluster import chain
from coordinator.cluster.chain import Chain
from coordinator.planning.plan import Assignment, Plan
from protos.brigade_pb2 import Frame, Result, Sample, StatusReply, Timing, Window
from tests.unit.cluster.fake_network import SPEC
from tests.unit.virtual_time import SameThread, VirtualTime
from worker.errors import BrigadeError, EngineHung, NodeSilent, StageLost
from worker.node.framing import PLAIN
from worker.node.stage import Work

T = TypeVar("T")
DRIFT = 20e-6  # what cheap quartzes differ by
OFF_NS = 1_500_000  # what may be wrong of an offset: the drift of little more than a minute


class BusyThread(SameThread):
    """An MLX thread that is at a step until a time."""

    free_at = 0.0

    async def run(self, call: Callable[[], T]) -> T:
        await asyncio.sleep(max(0.0, self.free_at - time.monotonic()))
        return call()


class FakeStage:
    """Stage 0 and all others: answers as soon as the thread is free, or never."""

    answers, takes_s, busy_s, last_step = True, 0.0, 0.0, 0

    def __init__(self, executor: Any, epoch: int, wire: Any) -> None:
        self._results: list[Result] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None

    async def start(self, thread: SameThread, connect: Callable[[], None], *watched: Work) -> None:
        connect()
        self._thread = thread
        self._tasks = [asyncio.create_task(each()) for each in watched]

    async def wait_ended(self) -> None:
        await asyncio.Event().wait()

    def submit(self, frame: Frame) -> None:
        samples = [Sample(slot=window.slot) for window in frame.windows if window.wanted]
        timings = [Timing(stage=stage) for stage in range(1 if frame.stays else 3)]
        self._results.append(Result(epoch=frame.epoch, step=frame.step, samples=samples, timings=timings))

    async def next_result(self) -> Result:
        if not self.answers:
            await asyncio.Event().wait()
        await asyncio.sleep(self.takes_s)
        await self._thread.run(lambda: None)
        if self._failure:
            raise self._failure
        return self._results.pop(0)

    def fail(self, error: BaseException) -> None:
        self._failure = error

    def deliver(self, result: Result) -> None:
        raise AssertionError

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_released(self) -> None:
        pass


class FakePeer:
    """A worker whose clock gains or loses, that may never join, and reports how long its engine has been at a step."""

    address, addresses, is_draining, wire = "192.168.1.7:50070", ["192.168.1.7:50070"], False, PLAIN
    is_silent, takes_s = False, 0.0

    def __init__(self, name: str, drift: float = 0.0, *, joins: bool = True, busy_s: float | None = 0.0) -> None:
        self.name, self.drift, self.joins, self.busy_s = name, drift, joins, busy_s
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
        await asyncio.sleep(self.takes_s)
        if not self.joins:
            await asyncio.Event().wait()

    async def status(self, within_s: float) -> StatusReply:
        if self.busy_s is None:
            raise StageLost("does not answer", node=self.name)
        return StatusReply(busy_s=self.busy_s)

    def detach(self) -> None:
        pass

    def link(self, epoch: int, stage: int, sender: str) -> None:
        pass

    async def results(self, epoch: int, deliver: Callable[[Result], None], *, of_prompts: bool = False) -> None:
        await asyncio.Event().wait()

    async def watch(self, on_draining: Callable[[], None]) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualTime]:
    monkeypatch.setattr(chain, "Stage", FakeStage)
    monkeypatch.setattr(chain, "Executor", lambda *args, **kwargs: None)
    found = VirtualTime()
    yield found
    assert not found.close()


@asynccontextmanager
async def chain_over(peers: Sequence[FakePeer], *, answers_alone: bool = False) -> AsyncIterator[Chain]:
    """A chain that is not open yet, over this node and two workers with a layer each."""
    assignments = tuple(Assignment(name, at, at + 1, 0, 0, 0) for at, name in enumerate(("here", "a", "b")))
    plan = Plan(assignments, 100, prompt_end=1 if answers_alone else None)
    deployment: Any = SimpleNamespace(
        plan=plan,
        peers=peers,
        spec=SPEC,
        coordinator=None,
        check_finite=False,
        prefix_bytes=0,
        load_request=lambda stage: None,
        drafter_request=lambda stage: None,
    )
    shard = SimpleNamespace(tap=lambda *_: None)
    own: Any = SimpleNamespace(shard=shard, part=None, slots={}, drop_part=lambda: None, thread=BusyThread())
    async with Chain(own, deployment) as found:
        yield found


def test_offsets_stay_right_for_hours(virtual: VirtualTime) -> None:
    """Or what stages compute shows as what the wire takes: 72 ms after an hour."""

    async def run() -> None:
        peers = [FakePeer("a", DRIFT), FakePeer("b", -DRIFT)]
        async with chain_over(peers) as found:
            await found.open()
            offsets = found.clock_offsets
            await asyncio.sleep(30)  # to look between two measurements
            for minute in range(180):
                await asyncio.sleep(60)
                peers[0].is_silent = minute % 10 == 5  # for one measurement of ten
                for peer, offset in zip(peers, offsets[1:], strict=True):
                    is_late = peers[0].is_silent or minute % 10 == 6
                    assert abs(peer.true_offset - offset) <= OFF_NS * (2 if is_late else 1)
            assert offsets[0] == 0 and min(map(abs, offsets[1:])) > 100 * OFF_NS

    virtual.run(run())


@pytest.mark.parametrize(
    ("a", "b", "kind", "node"),
    [
        (FakePeer("a", joins=False), FakePeer("b"), EngineHung, "a"),
        (FakePeer("a", busy_s=9.0), FakePeer("b", busy_s=2.0), EngineHung, "a"),
        (FakePeer("a", busy_s=9.0), FakePeer("b", busy_s=None), NodeSilent, "b"),
        (FakePeer("a"), FakePeer("b"), StageLost, ""),
        (FakePeer("a"), FakePeer("b", busy_s=1.4), StageLost, ""),
    ],
    ids=["never joins", "hangs at a step", "falls silent", "no engine is at work", "a step began late"],
)
def test_the_node_that_holds_up_the_opening_is_named(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, a: FakePeer, b: FakePeer, kind: type[BrigadeError], node: str
) -> None:
    monkeypatch.setattr(FakeStage, "answers", False)

    async def run() -> None:
        began = virtual.now
        async with chain_over([a, b]) as found:
            with pytest.raises(kind) as caught:
                await found.open(most_still_s=3.0)
        assert (type(caught.value), caught.value.node) == (kind, node) and virtual.now - began == pytest.approx(3.0)

    virtual.run(run())


def test_a_chain_that_moves_may_take_longer_to_open(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another try would join and warm up anew."""
    for fake in (FakeStage, FakePeer):
        monkeypatch.setattr(fake, "takes_s", 2.0)

    async def run() -> None:
        began = virtual.now
        async with chain_over([FakePeer("a"), FakePeer("b")]) as found:
            await found.open(most_still_s=3.0)
        assert virtual.now - began == pytest.approx(2 * 2.0 + 6 * 2.0), "two joins, six frames"

    virtual.run(run())


def test_no_worker_is_named_while_the_engine_of_this_process_is_at_a_long_step(virtual: VirtualTime) -> None:
    """Every worker has joined: it would be ended, or left out, for what this process does."""

    async def run() -> None:
        async with chain_over([FakePeer("a"), FakePeer("b")]) as found:
            found.thread.free_at = virtual.now + 20  # type: ignore[attr-defined]
            with pytest.raises(EngineHung) as caught:
                await found.open(most_still_s=15.0)
        assert caught.value.node == ""

    virtual.run(run())


def test_an_answer_behind_a_chunk_of_the_first_node_blames_no_worker_that_computes_one(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk, the first of its size, may take a minute, the answer 6 s; it passes the first node alone."""

    async def run() -> None:
        async with chain_over([FakePeer("a", busy_s=9.1), FakePeer("b", busy_s=9.1)], answers_alone=True) as found:
            await found.open()
            monkeypatch.setattr(FakeStage, "busy_s", 9.0)
            found.thread.free_at = virtual.now + 20  # type: ignore[attr-defined]
            found.send(Frame(epoch=1, step=101, windows=[Window(tokens=[0] * 128)]))
            found.send(Frame(epoch=1, step=102, windows=[Window(tokens=[0], wanted=1)], stays=True))
            for step in (101, 102):
                arrival = await found.receive()
                assert arrival.result.step == step
                found.learn(arrival)

    virtual.run(run())
