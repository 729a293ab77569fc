"""A stage's loop and its hop by themselves, with an engine that does as a test wants."""

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import mlx.core as mx
import pytest

from protos.brigade_pb2 import DTYPE_FLOAT32, Credit, Frame, Opening, Result, Timing
from protos.brigade_pb2_grpc import NodeServicer
from tests.integration.conftest import NETWORK, Models, load, load_request, serving
from tests.integration.upstream import feeding, frame, parts_of, tensor
from worker.compute.shard import Shard
from worker.errors import CacheMismatch, FrameError, OutOfMemory
from worker.node.hop import Link, add_node
from worker.node.stage import Send, Stage
from worker.platform.threads import MlxThread

WAITING = 64  # frames that a stage takes beside the one that it is at


class HeldEngine:
    """Notes what it begins, and finishes once it is let go: by results, or what `outputs` says, errors or shapes."""

    num_slots = cache_bytes = weight_bytes = 0
    runs_ahead = is_whole = False

    def __init__(self, **outputs: Any) -> None:
        self.begun: list[int] = []
        self.taken: list[bytes | None] = []
        self.began, self.release = threading.Event(), threading.Event()
        self._outputs = {int(step.removeprefix("step")): output for step, output in outputs.items()}

    def check(self, header: Frame) -> None:
        pass

    def close(self) -> None:
        pass

    def awaited(self, header: Frame) -> None:
        pass

    def build_ahead(self) -> None:
        pass

    def launch_ahead(self, step: Frame, *, is_finished: bool) -> None:
        pass

    def begin(self, header: Frame, x: mx.array | None, received: int, taken: int) -> Frame:
        self.begun.append(header.step)
        self.taken.append(None if x is None else bytes(memoryview(x.view(mx.uint8))))  # type: ignore[arg-type]
        self.began.set()
        return header

    def finish(self, header: Frame) -> tuple[Any, mx.array | None]:
        assert self.release.wait(60)
        output = self._outputs.get(header.step)
        if isinstance(output, Exception):
            raise output
        if output is not None:
            return Frame(step=header.step, timings=[Timing()]), mx.ones(output)
        return Result(step=header.step, timings=[Timing()]), None


@asynccontextmanager
async def started(engine: Any, send: Send | None = None) -> AsyncIterator[Stage]:
    thread = MlxThread()
    stage = Stage(engine, thread, epoch=1, send=send)
    stage.start()
    try:
        yield stage
    finally:
        await stage.stop()
        engine.release.set()
        await thread.run(lambda: None)
        thread.close()


async def test_what_waits_for_the_thread_runs_only_once_a_stopped_stage_has_left_it() -> None:
    """A load, perhaps, for which the memory of that stage is needed."""
    engine = HeldEngine()
    async with started(engine) as stage, asyncio.timeout(60):
        for step in range(2):
            stage.submit(Frame(epoch=1, step=step))
        await asyncio.to_thread(engine.began.wait, 60)
        await stage.stop()
        callers = stage._thread.submit(lambda: [frame.name for frame in traceback.extract_stack()])
        engine.release.set()
        assert "_run_frames" not in await callers


async def test_a_stage_is_not_idle_while_a_frame_that_opens_a_slot_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no slot was open when it was asked, right before the frame's step ended."""

    class OpeningEngine(HeldEngine):
        num_open = 0

        @property
        def num_slots(self) -> int:  # type: ignore[override]
            found = self.num_open
            self.release.set()
            assert ended.wait(60)
            return found

        def finish(self, header: Frame) -> tuple[Any, mx.array | None]:
            if header.opened:
                assert self.release.wait(60)
                self.num_open = 1
            return Result(step=header.step, timings=[Timing()]), None

    ended = threading.Event()
    engine = OpeningEngine()
    async with started(engine) as stage, asyncio.timeout(60):
        monkeypatch.setattr(stage._thread, "give_way", lambda: ended.set() if engine.num_open else None)
        stage.submit(Frame(epoch=1, step=0))
        stage.submit(Frame(epoch=1, step=1, opened=[Opening(slot=0)]))
        await stage.next_result()
        engine.release.set()
        await stage.next_result()
        assert not stage._idle.is_set()


async def test_a_stopped_stage_leaves_the_frames_that_wait() -> None:
    """Whoever joins the node next would wait behind them."""
    engine = HeldEngine()
    async with started(engine) as stage:
        for step in range(20):
            stage.submit(Frame(epoch=1, step=step))
        await asyncio.to_thread(engine.began.wait, 60)
    assert engine.begun == [0]


# --- failures -------------------------------------------------------------------------------------------------------


async def test_a_stage_with_frames_without_end_lets_other_calls_run_on_its_thread() -> None:
    """Such as a digest's: they wait for one step at most, not for the last frame."""
    engine = HeldEngine()
    async with started(engine) as stage, asyncio.timeout(60):
        for step in range(20):
            stage.submit(Frame(epoch=1, step=step))
        await asyncio.to_thread(engine.began.wait, 60)
        begun = asyncio.create_task(stage._thread.run(lambda: list(engine.begun)))
        await asyncio.sleep(0)
        engine.release.set()
        assert await begun == [0]
        assert [(await stage.next_result()).step for _ in range(20)] == list(range(20))


async def test_a_failed_stage_fails_every_call_from_then_on() -> None:
    engine = HeldEngine(step1=FrameError("odd"))
    engine.release.set()
    async with started(engine) as stage, asyncio.timeout(60):
        for step in range(3):
            stage.submit(Frame(epoch=1, step=step))
        assert (await stage.next_result()).step == 0
        depths = []
        for _ in range(4):
            with pytest.raises(FrameError, match=r"^odd$") as caught:
                await stage.next_result()
            stage.deliver(Result(step=7))  # of a worker that has not heard yet
            depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert len(set(depths)) == 1, "one exception raised again and again must not keep every frame it passed"
        with pytest.raises(FrameError, match=r"^odd$"):
            stage.submit(Frame(epoch=1, step=3))
        with pytest.raises(FrameError, match=r"^odd$"):
            await anext(stage.take_hop(endless()))
    assert engine.begun == [0, 1]


async def test_the_failure_of_a_stage_ends_its_hop_with_the_same_words() -> None:
    engine = HeldEngine(step0=CacheMismatch("odd"))
    async with started(engine) as stage, asyncio.timeout(60):
        credit = stage.take_hop(endless())
        assert await anext(credit) == Credit(frames=WAITING)
        stage.submit(Frame(epoch=1))
        engine.release.set()
        with pytest.raises(CacheMismatch, match=r"^odd$"):
            await anext(credit)


async def test_a_stage_whose_memory_is_exhausted_names_its_node_and_the_size(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*anything: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")

    async with feeding(models("qwen3").folder) as worker:
        monkeypatch.setattr(Shard, "__call__", fail)
        await worker.send(frame(1, [5, 6, 7]))
        with pytest.raises(
            OutOfMemory, match=r"^worker node-1: out of memory at a step: could not get 16\.00 GiB; give"
        ):
            await worker.next_result()


async def test_a_shard_that_does_not_fit_names_its_node_and_its_size(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 17179869184 bytes.")

    expected = r"^worker node-1: out of memory with layers \[2, 4\), \d+\.\d\d GiB: could not get 16\.00 GiB; "
    async with serving(1) as [node]:
        monkeypatch.setattr("worker.compute.shard.mx.eval", fail)
        with pytest.raises(OutOfMemory, match=expected):
            await load(node, load_request(models("qwen3").folder, 2, 4))


# --- hops -----------------------------------------------------------------------------------------------------------


class Receiver(NodeServicer):
    """A server that has nothing but a stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        async for credit in self._stage.take_hop(parts):
            yield credit


@asynccontextmanager
async def linked(stage: Stage) -> AsyncIterator[Link]:
    """A hop into the stage, over a real connection."""
    server = NETWORK.server()
    add_node(Receiver(stage), server)
    port = NETWORK.listen(server, "127.0.0.1:0")
    await server.start()
    link = Link(NETWORK, "next", f"127.0.0.1:{port}", 1, 0)
    try:
        await link.wait_open()
        yield link
    finally:
        await link.close()
        await server.stop(None)


async def endless() -> AsyncIterator[bytes]:
    """A hop on which nothing comes."""
    await asyncio.Event().wait()
    yield b""


async def of(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def large(step: int, size: int = 1_000_000) -> list[bytes]:
    return parts_of(Frame(epoch=1, step=step, hidden=tensor([1, size // 4, 1])), bytes([step]) * size)


async def test_a_closed_hop_reads_nothing_more() -> None:
    is_closed = False

    async def parts() -> AsyncIterator[bytes]:
        nonlocal is_closed
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            is_closed = True

    async with started(HeldEngine()) as stage, asyncio.timeout(60):
        hop = stage.take_hop(parts())
        assert await anext(hop) == Credit(frames=WAITING)
        await asyncio.sleep(0)  # the reading begins
        await hop.aclose()
        assert is_closed


async def test_frames_of_any_size_arrive_whole_and_in_order() -> None:
    engine = HeldEngine()
    engine.release.set()
    sizes = [4, 1_000_000, 4, 3_000_000, 262_144]
    async with started(engine) as stage, linked(stage) as link, asyncio.timeout(60):
        for step, size in enumerate(sizes, start=1):
            await link.send(large(step, size))
        assert [(await stage.next_result()).step for _ in sizes] == [1, 2, 3, 4, 5]
    assert engine.taken == [bytes([step]) * size for step, size in enumerate(sizes, start=1)]


async def test_a_sender_waits_once_as_many_frames_wait_as_the_receiver_takes() -> None:
    engine = HeldEngine()
    async with started(engine) as stage, linked(stage) as link, asyncio.timeout(60):
        for step in range(WAITING):
            await link.send(parts_of(Frame(epoch=1, step=step), b""))
        one_more = asyncio.create_task(link.send(parts_of(Frame(epoch=1, step=WAITING), b"")))
        _, waiting = await asyncio.wait([one_more], timeout=0.05)
        assert waiting == {one_more}
        engine.release.set()
        await one_more
        assert [(await stage.next_result()).step for _ in range(WAITING + 1)] == list(range(WAITING + 1))


async def test_a_sender_that_does_not_wait_is_refused() -> None:
    engine = HeldEngine()
    async with started(engine) as stage, asyncio.timeout(60):
        stage.submit(Frame(epoch=1))
        await asyncio.to_thread(engine.began.wait, 60)
        sent = [part for step in range(WAITING + 1) for part in parts_of(Frame(epoch=1, step=1 + step), b"")]
        expected = rf"expected at most {WAITING} frames .*got one more \(step {1 + WAITING}\)"
        with pytest.raises(FrameError, match=expected):
            async for _ in stage.take_hop(of(sent)):
                pass


async def test_a_hop_that_ends_within_a_frame_is_refused() -> None:
    async with started(HeldEngine()) as stage, asyncio.timeout(60):
        with pytest.raises(FrameError, match=r"^expected part 1 \(step 1\), got the end of the hop$"):
            async for _ in stage.take_hop(of(large(1)[:1])):
                pass


async def test_a_stage_counts_what_it_sends() -> None:
    sent: list[bytes] = []
    done = asyncio.Event()

    async def send(parts: Sequence[bytes]) -> None:
        sent.extend(parts)
        done.set()

    engine = HeldEngine(step0=(1, 100, 1000))
    engine.release.set()
    async with started(engine, send) as stage, asyncio.timeout(60):
        stage.submit(Frame(epoch=1))
        await done.wait()
        assert stage.status().sent_bytes == sum(map(len, sent)) > 400_000
    assert Frame(hidden=tensor([1, 100, 1000], DTYPE_FLOAT32)).SerializeToString() in sent[0]
