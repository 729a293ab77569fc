"""A test as the stage before one real worker, and hand-made frames."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.cluster.peer import COORDINATOR_ID, Peer
from protos.brigade_pb2 import DTYPE_FLOAT32, AttachRequest, Frame, Opening, Result, Tensor, Timing, Window
from tests.integration.conftest import load_request, serving
from worker.errors import BrigadeError
from worker.memory.history import History
from worker.node.framing import checksum_seed, cut, write_part
from worker.node.hop import Link

D = 64
SIZES = {DTYPE_FLOAT32: 4}  # bytes; those of all others are 2


class Upstream:
    """The test as stage 0 before one real worker, which holds the rest of the model."""

    def __init__(self, peer: Peer, link: Link) -> None:
        self._peer = peer
        self._link = link
        self._results: asyncio.Queue[Result] = asyncio.Queue()
        self._has_reported = False
        self._reporting = asyncio.create_task(
            peer.results(1, lambda report, data: self._results.put_nowait(report.result))
        )

    async def send(self, frame: Frame, num_bytes: int | None = None) -> None:
        """Send a header and zeros, as many as it announces or another number."""
        size = math.prod(frame.hidden.shape) * SIZES.get(frame.hidden.dtype, 2) if num_bytes is None else num_bytes
        await self.send_parts(parts_of(frame, bytes(size)))

    async def send_parts(self, parts: Sequence[bytes]) -> None:
        await self._link.send(parts)

    def another_link(self) -> Link:
        return self._peer.link(1, 0)

    async def next_result(self) -> Result:
        """Raises what the worker leaves the chain with. Its reports, if there were any, end with the same words."""
        async with asyncio.timeout(60):
            getting = asyncio.create_task(self._results.get())
            await asyncio.wait([getting, self._reporting], return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                self._has_reported = True
                return getting.result()
            getting.cancel()
            with pytest.raises(BrigadeError) as left:
                await self._peer.watch()
            with pytest.raises(BrigadeError) as ended:
                await self._reporting
            if self._has_reported:  # else it may have left before it was asked for reports
                assert (type(ended.value), str(ended.value)) == (type(left.value), str(left.value))
            raise left.value

    async def close(self) -> None:
        self._reporting.cancel()
        await asyncio.gather(self._reporting, return_exceptions=True)

    async def wait_refused(self) -> None:
        """Raises what the worker refuses the hop with."""
        async with asyncio.timeout(60):
            await self._link.wait_lost()


def attach_request(folder: Path) -> AttachRequest:
    """As stage 1 of epoch 1, holding layers [2, 4)."""
    return AttachRequest(epoch=1, stage=1, num_stages=2, loaded=load_request(folder, 2, 4))


@asynccontextmanager
async def feeding(folder: Path, epoch: int = 1, stage: int = 0) -> AsyncIterator[Upstream]:
    """A worker that holds layers [2, 4) as stage 1 of epoch 1, and a hop into it that claims `epoch` and `stage`."""
    request = attach_request(folder)
    request.coordinator.id = COORDINATOR_ID
    async with serving(1) as [node]:
        await node.load(load_request(folder, 2, 4))
        async with AsyncExitStack() as stack:
            peer = await stack.enter_async_context(node.reached())
            await peer.attach(request)
            link = peer.link(epoch, stage)
            stack.push_async_callback(link.close)
            await link.wait_open()
            upstream = Upstream(peer, link)
            stack.push_async_callback(upstream.close)
            yield upstream


def frame(step: int, tokens: list[int], before: tuple[int, ...] = (), **changes: Any) -> Frame:
    """A sound frame into stage 1: slot 0 goes on after the tokens `before` by `tokens`."""
    window = window_of((*before, *tokens), len(before))
    sound = Frame(
        epoch=1,
        step=step,
        opened=[] if before else [Opening(slot=0)],
        windows=[window],
        hidden=tensor([1, len(tokens), D]),
        timings=[Timing()],
    )
    sound.MergeFrom(Frame(**changes))
    return sound


def window_of(tokens: tuple[int, ...], base: int, slot: int = 0) -> Window:
    """The window that feeds `tokens[base:]` and wants the last row's token."""
    prefix_hash = History(tokens).prefix_hash(base)
    return Window(slot=slot, base=base, prefix_hash=prefix_hash, tokens=tokens[base:], wanted=1)


def tensor(shape: list[int], dtype: int = DTYPE_FLOAT32) -> Tensor:
    return Tensor(dtype=dtype, shape=shape)  # type: ignore[arg-type]


def parts_of(frame: Frame, payload: bytes) -> list[bytes]:
    """The messages that carry this header and these bytes, whether or not they suit each other."""
    header = frame.SerializeToString()
    pieces = enumerate(cut(memoryview(payload)))
    return [
        write_part(number, b"" if number else header, data, checksum_seed(number, frame.step))
        for number, data in pieces
    ]
