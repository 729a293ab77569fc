"""A stage's loop and its hop by themselves, with an engine that does as a test wants."""

import asyncio
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import pytest

from protos.brigade_pb2 import Credit, Frame, Grammar, Opening, Result, Sampling, Timing, Window
from protos.brigade_pb2_grpc import HopServicer
from tests.integration.conftest import NETWORK, load_request, serving
from tests.integration.upstream import feeding, frame, parts_of, tensor
from tools.worker_process import address_with_hops
from worker.compute.header import MOST_GRAMMAR
from worker.compute.shard import Shard
from worker.errors import BrigadeError, CacheMismatch, FrameError, OutOfMemory, StageLost
from worker.node.framing import PLAIN
from worker.node.hop import Link, add_hops, pack
from worker.node.stage import Stage
from worker.platform.threads import MlxThread

WAITING = 64  # frames that a stage takes beside the one that it is at

T = TypeVar("T")
in_either_mode = pytest.mark.parametrize("runs_ahead", [False, True])


class Begun:
    """A step that has begun."""

    def __init__(self, header: Frame) -> None:
        self.frame = header
        self.has_drafting = self.goes_on = False
        self.segments: list[Any] = []


class FakeEngine:
    """Notes what it begins, and finishes it once it is let go: by a result, or the error of `failures`."""

    cache_bytes = weight_bytes = 0

    def __init__(self, *, runs_ahead: bool = False, **failures: Exception) -> None:
        self.runs_ahead = runs_ahead
        self.num_slots = 0
        self.begun: list[int] = []
        self.taken: list[bytes] = []
        self.built: list[int] = []  # steps whose followers were built beside the next one
        self._finished: list[int] = []
        self.is_closed = False
        self.steps = weakref.WeakSet[Begun]()  # that are still in memory
        self.finishing, self.release = threading.Event(), threading.Event()
        self._failures = failures

    def check(self, header: Frame) -> None:
        pass

    def close(self, *, leaves_slots: bool = False) -> None:
        self.is_closed = True

    def build_ahead(self) -> bool:
        """Build what follows the last finished step."""
        self.built += self._finished
        self._finished.clear()
        return bool(self.built)

    def launch_ahead(self, step: Begun, *, is_finished: bool) -> None:
        pass

    def begin(self, header: Frame, payload: Sequence[memoryview], received: int, taken: int) -> Begun:
        self.begun.append(header.step)
        self.taken.append(b"".join(payload))
        step = Begun(header)
        self.steps.add(step)
        return step

    def finish(self, step: Begun) -> tuple[Result, None]:
        self.finishing.set()
        assert self.release.wait(60)
        header = step.frame
        self._finished = [header.step]
        self.num_slots += len(header.opened) - len(header.closed)
        if failure := self._failures.get(f"step{header.step}"):
            raise failure
        return Result(step=header.step, timings=[Timing()]), None


@dataclass
class Running:
    """A stage that runs on an MLX thread of its own."""

    stage: Stage
    engine: FakeEngine
    thread: MlxThread

    def submit(self, *frames: Frame) -> None:
        """All at once, so that no step ends in between."""
        self.thread.post(lambda: [self.stage.submit(each) for each in frames])

    async def next_result(self) -> Result:
        return await self.call(self.stage.next_result())

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        return await self.thread.call(work)

    async def end_of_hop(self, parts: AsyncIterator[bytes]) -> None:
        """Take a hop to its end."""

        async def receive() -> None:
            async for _ in self.stage.receive(parts):
                pass

        await self.call(receive())


@asynccontextmanager
async def started(outlet: Any = None, *, is_held: bool = False, **engine: Any) -> AsyncIterator[Running]:
    """`is_held`: no step ends before `engine.release` is set."""
    thread, fake = MlxThread(), FakeEngine(**engine)
    if not is_held:
        fake.release.set()
    stage = Stage(fake, epoch=1)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(60):
            await stage.start(thread, (lambda: outlet) if outlet else None)
            yield Running(stage, fake, thread)
    finally:
        stage.stop()
        fake.release.set()
        await thread.run(lambda: None)
        thread.close()


def numbered(*steps: int) -> list[Frame]:
    return [Frame(epoch=1, step=step) for step in steps]


async def test_a_stage_that_always_has_frames_builds_the_steps_of_each_lane_beside_those_of_the_other() -> None:
    """Or it would have to build each step when its frame is there, while the device waits."""
    async with started(is_held=True, runs_ahead=True) as running:
        running.submit(*numbered(0, 1, 2, 3, 4))
        running.engine.release.set()
        for _ in range(5):
            await running.next_result()
        assert running.engine.built[:4] == [0, 1, 2, 3]


@in_either_mode
async def test_a_call_that_is_posted_after_a_stage_is_stopped_finds_its_memory_freed(runs_ahead: bool) -> None:
    """The next load may need that memory, and the next chain must not wait behind these frames."""
    async with started(is_held=True, runs_ahead=runs_ahead) as running:
        engine = running.engine
        running.submit(*numbered(*range(20)))
        await asyncio.to_thread(engine.finishing.wait, 60)
        left = running.stage.stop()
        found = running.thread.submit(lambda: (engine.is_closed, len(engine.steps)))
        assert 0 < left.busy_s < left.busy_s
        engine.release.set()
        assert await found == (True, 0)
        await running.stage.wait_released()
        assert left.busy_s == 0
    assert engine.begun == ([0, 1] if runs_ahead else [0])


@in_either_mode
async def test_a_stage_is_idle_once_no_slot_is_open_nor_about_to_be(runs_ahead: bool) -> None:
    """Though no slot was open when the step before ended."""
    async with started(is_held=True, runs_ahead=runs_ahead) as running:
        stage, waiting = running.stage, list[asyncio.Task[None]]()

        def begin() -> None:
            stage.submit(Frame(epoch=1, step=0))
            stage.submit(Frame(epoch=1, step=1, opened=[Opening(slot=0)]))
            waiting.append(running.thread.loop.create_task(stage.wait_idle()))

        await running.thread.run(begin)
        running.engine.release.set()
        running.submit(*numbered(2))
        for _ in range(3):
            await running.next_result()
        assert not await running.thread.run(waiting[0].done)
        running.submit(Frame(epoch=1, step=3, closed=[0]))
        await running.call(stage.wait_idle())
        await running.call(asyncio.wait_for(waiting[0], None))


async def test_a_stopped_stage_begins_nothing_more_and_tells_those_that_wait_for_it() -> None:
    is_busy, go_on = threading.Event(), threading.Event()
    async with started() as running:
        running.submit(Frame(epoch=1, opened=[Opening(slot=0)]))
        await running.next_result()
        idle = asyncio.ensure_future(running.call(running.stage.wait_idle()))
        ended = asyncio.ensure_future(running.next_result())
        running.thread.post(lambda: is_busy.set() or go_on.wait(60))
        await asyncio.to_thread(is_busy.wait, 60)  # so that the frame and the end come in one turn of its loop
        running.submit(*numbered(1))
        running.stage.stop()
        go_on.set()
        await idle
        for waiting in (ended, running.next_result()):
            with pytest.raises(StageLost, match=r"^left the chain$"):
                await waiting
    assert running.engine.begun == [0]


@in_either_mode
async def test_a_stage_with_frames_without_end_lets_other_calls_run_between_two_of_them(runs_ahead: bool) -> None:
    """Such as a digest's: they wait for one step at most, not for the last frame."""
    async with started(is_held=True, runs_ahead=runs_ahead) as running:
        engine = running.engine

        async def num_begun() -> int:
            return len(engine.begun)

        running.submit(*numbered(*range(20)))
        await asyncio.to_thread(engine.finishing.wait, 60)
        begun = running.thread.submit(lambda: list(engine.begun))
        posted = list[int]()
        running.thread.post(lambda: posted.append(len(engine.begun)))
        called = asyncio.ensure_future(running.call(num_begun()))
        await asyncio.sleep(0)
        engine.release.set()
        assert await begun == ([0, 1] if runs_ahead else [0])
        assert [(await running.next_result()).step for _ in range(20)] == list(range(20))
        assert posted == [len(await begun)] and await called <= posted[0] + 1


# --- failures -------------------------------------------------------------------------------------------------------


async def test_a_failed_stage_ends_its_hop_and_fails_every_call_from_then_on() -> None:
    async with started(step1=CacheMismatch("odd")) as running:
        hop = asyncio.ensure_future(running.end_of_hop(endless()))
        running.submit(*numbered(0, 1, 2))
        assert (await running.next_result()).step == 0
        depths = []
        for _ in range(4):
            with pytest.raises(CacheMismatch, match=r"^odd$") as caught:
                await running.next_result()
            running.thread.post(partial(running.stage.deliver, Result(step=7)))  # of a worker that has not heard yet
            depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(set(depths)) == 1, "one exception raised again and again must not keep every frame it passed"
        running.submit(*numbered(3))
        for call in (running.next_result(), hop, running.end_of_hop(endless()), running.stage.wait_ended()):
            with pytest.raises(CacheMismatch, match=r"^odd$"):
                await call
    assert running.engine.begun == [0, 1]


@pytest.mark.parametrize("how", ["fails", "ends"])
async def test_what_a_stage_watches_ends_it(how: str) -> None:
    async def watched() -> None:
        if how == "fails":
            raise CacheMismatch("odd")

    engine, thread = FakeEngine(), MlxThread()
    stage = Stage(engine, epoch=1)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await stage.start(thread, None, watched)
        with pytest.raises(BrigadeError, match=r"^odd$" if how == "fails" else "ended unexpectedly$"):
            await stage.wait_ended()
        assert await thread.run(lambda: engine.is_closed)
    thread.close()


def exhausted(*anything: Any) -> None:
    raise RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")


async def test_a_stage_out_of_memory_names_its_node_and_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with feeding(folder) as worker:
        monkeypatch.setattr(Shard, "__call__", exhausted)
        await worker.send(frame(1, [5, 6, 7]))
        with pytest.raises(OutOfMemory, match=r"^worker node-1: .* at a step: could not get 16\.00 GiB; give"):
            await worker.next_result()


async def test_a_shard_that_does_not_fit_names_node_and_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(1) as [node]:
        monkeypatch.setattr("worker.compute.shard.mx.eval", exhausted)
        expected = r"^worker node-1: .* layers \[2, 4\), \d+\.\d\d GiB: could not get 16\.00 GiB; "
        with pytest.raises(OutOfMemory, match=expected):
            await node.load(load_request(folder, 2, 4))


# --- hops -----------------------------------------------------------------------------------------------------------


class Receiver(HopServicer):
    """A server that has nothing but a stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        async for credit in self._stage.receive(parts):
            yield credit


@asynccontextmanager
async def linked(running: Running) -> AsyncIterator[Link]:
    """A hop into the stage from this loop, over a real connection."""

    async def serve() -> tuple[Any, int]:
        server = NETWORK.server()
        add_hops(Receiver(running.stage), server)
        port = NETWORK.listen(server, "127.0.0.1:0")
        await server.start()
        return server, port

    server, port = await running.call(serve())
    link = Link(NETWORK, "next", address_with_hops(port), 1, 0)
    try:
        await link.wait_open()
        yield link
    finally:
        await link.close()
        await running.call(server.stop(None))


async def endless() -> AsyncIterator[bytes]:
    """A hop on which nothing comes."""
    await asyncio.Event().wait()
    yield b""


async def of(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def large(step: int, size: int = 1_000_000) -> list[bytes]:
    return parts_of(Frame(epoch=1, step=step, hidden=tensor([1, size // 4, 1])), bytes([step]) * size)


class Refusing:
    """A next stage that refuses the hop."""

    is_closed = False

    async def wait_open(self) -> None:
        raise FrameError("no hop")

    async def close(self) -> None:
        self.is_closed = True


async def test_a_stage_whose_next_one_refuses_the_hop_does_not_start() -> None:
    outlet = Refusing()
    with pytest.raises(FrameError, match=r"^no hop$"):
        async with started(outlet):
            pytest.fail("it has started")
    assert outlet.is_closed


class Silent:
    """A next stage that never answers."""

    async def wait_open(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def test_a_start_that_is_given_up_leaves_nothing_behind() -> None:
    """A worker that ends waits for the tasks of its calls."""
    thread, stage, before = MlxThread(), Stage(FakeEngine(), epoch=1), asyncio.all_tasks()  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await stage.start(thread, Silent)
    stage.stop()
    async with asyncio.timeout(10):
        await stage.wait_released()
        while asyncio.all_tasks() != before:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
    thread.close()


async def test_a_closed_hop_reads_nothing_more() -> None:
    is_closed = False

    async def parts() -> AsyncIterator[bytes]:
        nonlocal is_closed
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            is_closed = True

    async def receive(stage: Stage) -> None:
        async with aclosing(stage.receive(parts())) as hop:
            assert await anext(hop) == Credit(frames=WAITING)
            await asyncio.sleep(0)  # the reading begins
        assert is_closed

    async with started() as running:
        await running.call(receive(running.stage))


async def test_frames_of_any_size_arrive_whole_and_in_order() -> None:
    sizes = [4, 1_000_000, 4, 20_000_000, 262_144]
    async with started() as running, linked(running) as link:
        for step, size in enumerate(sizes, start=1):
            await link.send(large(step, size))
        assert [(await running.next_result()).step for _ in sizes] == [1, 2, 3, 4, 5]
    assert running.engine.taken == [bytes([step]) * size for step, size in enumerate(sizes, start=1)]


async def test_the_longest_grammar_arrives_beside_a_long_chunk_of_tokens() -> None:
    rows = mx.zeros((1, 2048, 7168), mx.bfloat16)
    mx.eval(rows)
    opened = [Opening(sampling=Sampling(grammar=Grammar(text=chr(0x1F600) * MOST_GRAMMAR)))]
    frame = Frame(epoch=1, step=1, opened=opened, windows=[Window(tokens=[2**17] * 2048)], timings=[Timing()])
    async with started() as running, linked(running) as link:
        await link.send(pack(frame, rows, PLAIN))
        assert (await running.next_result()).step == 1


async def test_a_sender_waits_once_as_many_frames_wait_as_the_receiver_takes() -> None:
    async with started(is_held=True) as running, linked(running) as link:
        for each in numbered(*range(WAITING)):
            await link.send(parts_of(each, b""))
        one_more = asyncio.create_task(link.send(parts_of(Frame(epoch=1, step=WAITING), b"")))
        _, waiting = await asyncio.wait([one_more], timeout=0.05)
        assert waiting == {one_more}
        running.engine.release.set()
        await asyncio.wait([one_more], timeout=10)
        assert one_more.done(), "completed frames gave no credit back"
        assert [(await running.next_result()).step for _ in range(WAITING + 1)] == list(range(WAITING + 1))


TOO_MANY = numbered(*range(1 + WAITING))
ONE_MORE = rf"^expected at most {WAITING} frames .*got one more \(step {WAITING}\)$"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([part for each in TOO_MANY for part in parts_of(each, b"")], ONE_MORE),
        (large(1, 16_000_000)[:1], r"^expected part 1 \(step 1\), got the end of the hop$"),
    ],
    ids=["too many frames", "half a frame"],
)
async def test_a_hop_that_breaks_the_protocol_is_refused(sent: list[bytes], message: str) -> None:
    async with started() as running:
        with pytest.raises(FrameError, match=message):
            await running.end_of_hop(of(sent))


@pytest.mark.parametrize(
    ("refused", "message"),
    [(TOO_MANY, ONE_MORE), ([Frame(epoch=2)], r"^expected frames of epoch 1, got epoch 2 \(step 0\)$")],
    ids=["too many", "of another epoch"],
)
async def test_a_frame_of_this_process_that_is_refused_fails_the_stage(refused: list[Frame], message: str) -> None:
    async with started() as running:
        running.submit(*refused)
        with pytest.raises(FrameError, match=message):
            await running.next_result()
