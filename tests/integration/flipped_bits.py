"""Sends frames through real hops on which a bit flips, behind the encryption, and counts how many are accepted.

Plaintext is for tests/unit/node/test_framing.py: there a bit of HTTP/2 may mean nothing, and the frame arrives whole.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

from protos.brigade_pb2 import DTYPE_FLOAT32, Credit, Frame, Tensor
from protos.brigade_pb2_grpc import HopServicer
from tools.proxy import Proxy
from tools.worker_process import address_with_hops
from worker.errors import BrigadeError, StageLost
from worker.node.framing import Arrival, FrameAssembler, Wire, checksum_seed, cut, write_part
from worker.node.hop import Link, add_hops
from worker.node.network import Network
from worker.node.rpc_errors import abort

SIZES = (4, 1024, 4096, 300_000)  # bytes of hidden states
_NOTICED_S = 10.0
_TRIES = 5


class Recorder(HopServicer):
    """Takes every frame that its hops bring, as a stage does."""

    def __init__(self, wire: Wire) -> None:
        self.arrived: list[Arrival] = []
        self._wire = wire

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        yield Credit(frames=8)
        joiner = FrameAssembler(lambda frame: None, self._wire)
        try:
            async for part in parts:
                if arrival := joiner.add(part):
                    self.arrived.append(arrival)
                    yield Credit(frames=1)
        except BrigadeError as error:
            await abort(context, error)


@contextlib.asynccontextmanager
async def recording(network: Network) -> AsyncIterator[tuple[Recorder, str]]:
    """A node that takes frames, and its address."""
    recorder, server = Recorder(network.wire), network.server()
    add_hops(recorder, server)
    port = network.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield recorder, address_with_hops(port)
    finally:
        await server.stop(None)


async def send_encrypted(sender: Network, receiver: Network, num_frames: int) -> tuple[int, int]:
    """How many bits were flipped, and how many frames were accepted all the same; a connection for each."""
    numbers = random.Random(11)
    async with recording(receiver) as (recorder, address), Proxy(address).serving() as proxy:
        for step in range(num_frames):
            link = await _opened(sender, proxy.address)
            proxy.there.flips = 1
            await _send(link, frame_of(step, numbers.randbytes(numbers.choice(SIZES)), sender.wire))
        return proxy.there.num_flipped, len(recorder.arrived)


async def _opened(network: Network, address: str) -> Link:
    """A hop to the node; a busy machine may take longer than one connection may."""
    for _ in range(_TRIES):
        link = Link(network, "node-1", address, 1, 0)
        with contextlib.suppress(BrigadeError):
            await link.wait_open()
            return link
        await link.close()
    raise StageLost(f"no hop within {_TRIES} tries", node="node-1")


async def _send(link: Link, parts: list[bytes]) -> None:
    """Send the frame; return once the hop has ended for it."""
    try:
        await link.send(parts)
        async with asyncio.timeout(_NOTICED_S):
            await link.wait_lost()
    except BrigadeError:
        return
    finally:
        await link.close()


def frame_of(step: int, payload: bytes, wire: Wire) -> list[bytes]:
    """The parts of a frame with these hidden states."""
    header = Frame(epoch=1, step=step, hidden=Tensor(dtype=DTYPE_FLOAT32, shape=[1, len(payload) // 4, 1]))
    pieces = enumerate(cut(memoryview(payload), wire.part_bytes))
    return [
        write_part(
            number,
            b"" if number else header.SerializeToString(),
            data,
            checksum_seed(number, step) if wire.has_checksums else None,
        )
        for number, data in pieces
    ]
