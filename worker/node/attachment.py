"""A worker's place in one chain, which lasts as long as the coordinator's Attach stream."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from enum import Enum, auto

from protos.brigade_pb2 import AttachRequest, Draining, Report
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.config import MOST_ADDRESSES
from worker.errors import FrameError
from worker.node.framing import seal
from worker.node.hop import Link
from worker.node.network import Network, dial
from worker.node.stage import Stage
from worker.platform.machine import wait_slept
from worker.platform.threads import MlxThread


class AttachmentState(Enum):
    """SERVING -> REPLACED -> CLOSING, or SERVING -> CLOSING."""

    SERVING = auto()  # or opening its hop to the next stage
    REPLACED = auto()  # its coordinator attaches the worker anew, or loads other layers
    CLOSING = auto()


class Attachment:
    """A place in a chain. The task that serves the stream creates it; `replace` cancels that task."""

    def __init__(self, request: AttachRequest, write: Callable[[Report], Awaitable[None]]) -> None:
        """`write` sends one report at a time to the coordinator; it waits while the coordinator does not read."""
        self.request = request
        self.state = AttachmentState.SERVING
        self.stage: Stage | None = None  # once it is open
        self._write = write
        self._writing = asyncio.Lock()
        self._server = asyncio.current_task()
        self._stack = AsyncExitStack()
        self._draining = asyncio.Event()

    async def open(self, shard: Shard, thread: MlxThread, network: Network, name: str) -> None:
        """Open the hop to the next stage, then start the stage; `name` is this node's.

        Raises:
            BrigadeError: the refusal of the next stage.
        """
        request = self.request
        link = None
        if request.successor:
            addresses = [request.successor, *request.successor_fallbacks]
            address = await dial(network, request.successor_name, addresses)
            link = Link(network, request.successor_name, address, request.epoch, request.stage, name)
            self._stack.push_async_callback(link.close)
            await link.wait_open()
        executor = Executor(shard, request.stage, request.loaded.dtype, name, checks_finite=request.check_finite)
        self.stage = Stage(executor, thread, request.epoch, link.send if link else None, network.wire)
        self._stack.push_async_callback(self.stage.stop)
        self.stage.start(self._report_draining(), wait_slept(), *([link.wait_lost()] if link else []))

    async def report_results(self) -> None:
        """Report results until the stage ends. Raises the reason of its end."""
        assert self.stage is not None
        while True:
            result = await self.stage.next_result()
            await self._report(Report(result=result))
            self.stage.build_ahead(result.step)

    def say_draining(self) -> None:
        """Tell the coordinator that this node is about to end."""
        self._draining.set()

    def replace(self) -> None:
        """Cancel the stream's task, unless it is ending already."""
        if self.state is AttachmentState.SERVING:
            self.state = AttachmentState.REPLACED
            assert self._server is not None
            self._server.cancel()

    async def close(self) -> None:
        """Release everything it holds."""
        self.state = AttachmentState.CLOSING
        try:
            await self._stack.aclose()
        finally:
            self.stage = None

    async def _report_draining(self) -> None:
        await self._draining.wait()
        await self._report(Report(draining=Draining()))
        await asyncio.Event().wait()  # the stage continues

    async def _report(self, report: Report) -> None:
        async with self._writing:
            await self._write(seal(report))


def check_place(request: AttachRequest) -> None:
    """Check that the request describes one place in the chain.

    Raises:
        FrameError: layers, stage and successor disagree on whether this is the last stage, the stage is not a
            worker's, or the successor has too many addresses.
    """
    loaded, stage, num_stages = request.loaded, request.stage, request.num_stages
    if not 0 < stage < num_stages:
        raise FrameError(f"expected a stage after the first of {num_stages}, got stage {stage}")
    if 1 + (num_others := len(request.successor_fallbacks)) > MOST_ADDRESSES:
        raise FrameError(f"expected at most {MOST_ADDRESSES} addresses of the next stage, got {1 + num_others}")
    for is_last, place in (
        (loaded.end == loaded.num_layers, f"layers [{loaded.start}, {loaded.end}) of {loaded.num_layers}"),
        (stage == num_stages - 1, f"stage {stage} of {num_stages}"),
    ):
        if is_last == bool(request.successor):
            expected, found = ("no next stage", request.successor) if is_last else ("a next stage", "none")
            raise FrameError(f"expected {expected} after {place}, got {found}")
