"""A worker's place in one chain, which lasts as long as the coordinator's Attach stream."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from protos.brigade_pb2 import AttachRequest, Draining, Report
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.drafters.kinds import DrafterPart, prepare_drafting
from worker.errors import FrameError
from worker.node.framing import write_report
from worker.node.hop import Link
from worker.node.network import Network, dial
from worker.node.prefix_store import PrefixStore
from worker.node.stage import LeftStep, Stage
from worker.platform.machine import wait_slept
from worker.platform.tasks import background
from worker.platform.threads import MlxThread


class Attachment:
    """A place in a chain. The task that serves the stream creates it; `replace` cancels that task."""

    def __init__(self, request: AttachRequest, write: Callable[[Report], Awaitable[None]]) -> None:
        """`write` sends one report at a time to the coordinator; it waits while the coordinator does not read."""
        self.request = request
        self.is_replaced = False  # its coordinator attaches the worker anew, or loads other layers
        self.stage: Stage | None = None  # once it is open
        self.prefixes: PrefixStore | None = None  # if it keeps any on disk
        self._write = write
        self._server = asyncio.current_task()
        self._opening: Stage | None = None
        self._draining = asyncio.Event()

    async def open(
        self,
        shard: Shard,
        part: DrafterPart | None,
        thread: MlxThread,
        network: Network,
        name: str,
        drop_drafter: Callable[[], object],
    ) -> None:
        """Open the hop to the next stage, then start the stage; `name` is this node's.

        Args:
            part: what drafts here or reads layers for that.
            drop_drafter: frees `part`; the loop of this call runs it if the drafter fails.
        Raises:
            BrigadeError: the refusal of the next stage. FrameError: it has too many addresses.
        """
        request = self.request
        address = ""
        if request.successor:
            addresses = [request.successor, *request.successor_fallbacks]
            address = await dial(network, request.successor_name, addresses)
        drafter = await thread.run(partial(prepare_drafting, shard, part, request.num_features))
        if request.prefix_bytes:
            self.prefixes = PrefixStore(shard.start, shard.end, request.prefix_bytes)
        executor = Executor(
            *(shard, request.stage, request.loaded.dtype, name),
            checks_finite=request.check_finite,
            returns_segments=request.returns_segments,
            returns_rows=request.returns_rows,
            pieces=self.prefixes,
            drafter=drafter,
            drafter_bytes=part.nbytes if part else 0,
            drop_drafter=partial(asyncio.get_running_loop().call_soon_threadsafe, drop_drafter),
        )
        self._opening = Stage(executor, request.epoch, network.wire)
        link = partial(Link, network, request.successor_name, address, request.epoch, request.stage, name)
        await self._opening.start(thread, link if address else None, wait_slept)
        self.stage = self._opening

    async def serve(self) -> None:
        """Serve until the stage ends, and raise the reason; tell the coordinator once this node is about to end."""
        assert self.stage is not None
        async with background(self._report_draining()):
            await self.stage.wait_ended()

    def say_draining(self) -> None:
        """Tell the coordinator that this node is about to end."""
        self._draining.set()

    def replace(self) -> None:
        """Cancel the stream's task, once."""
        if not self.is_replaced:
            self.is_replaced = True
            assert self._server is not None
            self._server.cancel()

    def close(self) -> LeftStep | None:
        """Leave the chain: the MLX thread releases everything after the step in progress, before any later call.

        Returns that step; None if there was no stage.
        """
        stage, self.stage, self._opening = self._opening, None, None  # its error may be kept, and with it this
        return stage.stop() if stage else None

    async def _report_draining(self) -> None:
        await self._draining.wait()
        await self._write(Report.FromString(write_report(Report(draining=Draining()))))  # with its checksum


def check_place(request: AttachRequest) -> None:
    """Check that the request describes one place in the chain.

    Raises:
        FrameError: layers, stage and successor disagree on whether this is the last stage, or the stage is not a
            worker's.
    """
    loaded, stage, num_stages = request.loaded, request.stage, request.num_stages
    if not 0 < stage < num_stages:
        raise FrameError(f"expected a stage after the first of {num_stages}, got stage {stage}")
    for is_last, place in (
        (loaded.end == loaded.num_layers, f"layers [{loaded.start}, {loaded.end}) of {loaded.num_layers}"),
        (stage == num_stages - 1, f"stage {stage} of {num_stages}"),
    ):
        if is_last == bool(request.successor):
            expected, found = ("no next stage", request.successor) if is_last else ("a next stage", "none")
            raise FrameError(f"expected {expected} after {place}, got {found}")
