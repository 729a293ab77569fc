"""One hop: the stream that carries this stage's frames to the next one."""

import asyncio

import grpc.aio

from protos.brigade_pb2 import Frame
from protos.brigade_pb2_grpc import NodeStub
from worker.errors import StageLost
from worker.node.status import error_of
from worker.node.wire import open_channel

CONNECT_TIMEOUT_S = 5.0


class Link:
    """A long-lived stream of frames to one node; opened once per epoch."""

    def __init__(self, node: str, address: str, epoch: int, stage: int) -> None:
        """`stage` is the sender's place in the chain."""
        self._node = node
        self._channel = open_channel(address)
        self._call = NodeStub(self._channel).Relay(metadata=(("epoch", str(epoch)), ("stage", str(stage))))

    async def wait_open(self) -> None:
        """Return once the next stage takes frames. Raises StageLost, or what the next stage refuses with."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                metadata = await self._call.initial_metadata()
        except TimeoutError:
            raise StageLost(f"did not take the hop within {CONNECT_TIMEOUT_S:.0f} s", node=self._node) from None
        if not metadata:
            await self.wait_lost()

    async def send(self, frame: Frame) -> None:
        """Write one frame; waits while the receiver is behind. Raises as `wait_lost` if the hop is broken."""
        try:
            await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            await self.wait_lost()

    async def wait_lost(self) -> None:
        """Never return; raise what broke the hop once it breaks."""
        try:
            await self._call
        except grpc.RpcError as error:
            raise error_of(error, self._node) from error
        raise StageLost("ended the hop", node=self._node)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(grace=None)
