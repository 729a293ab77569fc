"""Link: the stream that carries this stage's frames to the next one, as long as that one grants credit."""

import asyncio
from collections.abc import Sequence

import grpc.aio

from worker.errors import FrameError, StageLost
from worker.node.network import Network
from worker.node.relay import open_relay
from worker.node.status import error_of

CONNECT_TIMEOUT_S = 5.0
_MOST_CREDIT = 1024  # frames in one grant: any number fits into the message, and each takes a turn of a loop
_IN_ORDER_S = 2.0  # a coordinator that takes the next node off the chain takes this one off, too


class Link:
    """A long-lived stream of frames to one node; opened once per epoch."""

    def __init__(self, network: Network, node: str, address: str, epoch: int, stage: int, sender: str = "") -> None:
        """`stage` is the sender's place in the chain, `sender` its own name."""
        self.wire = network.wire
        self._node = node
        self._channel = network.channel(node, address)
        self._call = open_relay(self._channel, epoch, stage, sender)
        self._credit = asyncio.Semaphore(0)
        self._is_open = asyncio.Event()
        self._reading = asyncio.create_task(self._read_credit())  # until the hop is lost

    async def wait_open(self) -> None:
        """Return once the next stage takes frames. Raises StageLost, or what the next stage refuses with."""
        opening = asyncio.create_task(self._is_open.wait())
        try:
            done, _ = await asyncio.wait(
                (opening, self._reading), timeout=CONNECT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            opening.cancel()
        if not done:
            raise StageLost(f"did not take the hop within {CONNECT_TIMEOUT_S:.0f} s", node=self._node)
        if not self._is_open.is_set():
            await self.wait_lost()

    async def send(self, parts: Sequence[bytes]) -> None:
        """Write one frame; waits while the receiver is behind. Raises as `wait_lost` if the hop is broken."""
        await self._credit.acquire()
        try:
            for part in parts:
                await self._call.write(part)
        except (grpc.RpcError, asyncio.InvalidStateError):
            await self.wait_lost()

    async def wait_lost(self) -> None:
        """Never return; raise what broke the hop once it breaks."""
        await asyncio.shield(self._reading)

    async def close(self) -> None:
        self._call.cancel()
        self._reading.cancel()
        try:
            await asyncio.gather(self._reading, return_exceptions=True)
        finally:
            await self._channel.close(grace=None)

    async def _read_credit(self) -> None:
        try:
            async for credit in self._call:
                if credit.frames > _MOST_CREDIT:
                    raise FrameError(
                        f"expected credit for at most {_MOST_CREDIT} frames, got {credit.frames}", node=self._node
                    )
                self._is_open.set()
                for _ in range(credit.frames):
                    self._credit.release()
        except grpc.RpcError as error:
            raise error_of(error, self._node) from error
        await asyncio.sleep(_IN_ORDER_S)  # no failure, if this link is closed meanwhile
        raise StageLost("ended the hop", node=self._node)
