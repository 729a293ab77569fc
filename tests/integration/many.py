"""What the tests of many requests at once share: requests side by side, and budgets of their chains."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.chain import Chain
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine, generate_once
from coordinator.planning.costs import LaneChooser
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Frame, Sampling, StatusReply, Window
from tests.integration.conftest import CHUNK, running

SPLITS = [(4,), (1, 3), (1, 2, 1)]
splits = pytest.mark.parametrize("layers", SPLITS, ids=lambda layers: "+".join(map(str, layers)))


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt below 89 that differs from those of other seeds from its first token on."""
    return tuple((7 * i + i * i * (1 + seed % 5) + 11 * seed) % 89 for i in range(length))


def request(prompt: Sequence[int], max_tokens: int, decode: Decode | None = None, **more: Any) -> Request:
    """`more` are fields of the request, or of its sampling."""
    fields = {name: more.pop(name) for name in ("cache", "eos", "stops", "sampling", "turn_ends") if name in more}
    sampling = fields.pop("sampling", None) or Sampling(**more)
    return Request(tuple(prompt), max_tokens, sampling, decode or Decode(), **fields)


async def solo(chain: Chain, requests: Sequence[Request], chunk: int = CHUNK) -> list[Answer]:
    """Each alone, one after another, with nothing to reuse."""
    return [await generate_once(chain, each, chunk=chunk) for each in requests]


async def together(chain: Chain, requests: Sequence[Request], chunk: int = CHUNK) -> list[Answer]:
    """All at once."""
    async with Engine(chain) as engine:
        return list(await asyncio.gather(*(engine.answer(each, chunk=chunk) for each in requests)))


class Live:
    """A request under way, watched piece by piece."""

    def __init__(self, engine: Engine, each: Request, **more: Any) -> None:
        self.num_pieces = 0
        self._emit: Callable[[str], None] = more.pop("emit", lambda text: None)
        self._pieces: asyncio.Queue[str] = asyncio.Queue()
        self.task = asyncio.create_task(self._read(engine, each, **more))

    async def wait_pieces(self, count: int) -> None:
        """Return once it has emitted so many pieces."""
        async with asyncio.timeout(60):
            while self.num_pieces < count:
                await self._pieces.get()

    async def answer(self) -> Answer:
        async with asyncio.timeout(60):
            return await self.task

    async def _read(self, engine: Engine, each: Request, **more: Any) -> Answer:
        answer = Answer()
        async with aclosing(engine.generate(each, chunk=CHUNK, **more)) as outputs:
            async for output in outputs:
                answer.add(output)
                if output.text:
                    self.num_pieces += 1
                    self._pieces.put_nowait(output.text)
                    self._emit(output.text)
        return answer


def limit_memory(chain: Chain, num_rows: int, slots: int = 1) -> None:
    """Leave cache memory for so many slots with so many rows of full caches each, on every stage."""
    chain.plan = replace(
        chain.plan,
        assignments=tuple(
            replace(a, memory_bytes=a.weight_bytes + slots * chain.spec.reserved_bytes(a.start, a.end, num_rows))
            for a in chain.plan.assignments
        ),
    )


@asynccontextmanager
async def running_within(folder: Path, layers: Sequence[int], num_rows: int, slots: int = 1) -> AsyncIterator[Chain]:
    """A chain over fresh nodes with so much memory."""
    async with running(folder, layers) as chain:
        limit_memory(chain, num_rows, slots)
        yield chain


class Frames(list[Frame]):
    """What was sent so far, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._sent = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def note(self, frame: Frame) -> None:
        """Called on the MLX thread."""
        self.append(Frame.FromString(frame.SerializeToString()))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._sent.set)

    async def wait_window(self, is_it: Callable[[Window], bool], count: int = 1) -> None:
        """Return once so many windows of this kind are among them."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while sum(is_it(window) for frame in list(self) for window in frame.windows) < count:
                self._sent.clear()
                await self._sent.wait()


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    """Every frame that any chain sends."""
    sent = Frames()
    send = Chain.send

    def note(chain: Chain, frame: Frame) -> None:
        sent.note(frame)
        send(chain, frame)

    monkeypatch.setattr(Chain, "send", note)
    return sent


@pytest.fixture
def two_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes however fast the machine is: with more of them no two windows may ever meet."""
    monkeypatch.setattr(LaneChooser, "choose", lambda self, num_sessions, rows_each: 2)


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds: for a state that sends no notice, polled."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def wait_freed(chain: Chain) -> None:
    """Return once no stage holds a slot or any cache."""
    await _wait_statuses(chain, lambda status: not status.slots and not status.cache_bytes)


async def wait_slots(chain: Chain, count: int) -> None:
    """Return once every stage holds so many slots."""
    await _wait_statuses(chain, lambda status: status.slots == count)


async def _wait_statuses(chain: Chain, is_it: Callable[[StatusReply], bool]) -> None:
    """A node sends no notice when its state changes: poll it."""
    async with asyncio.timeout(60):
        while not all(map(is_it, await chain.statuses())):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
