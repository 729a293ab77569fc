"""Flipped bits on an encrypted hop: whatever bit it is, the frame is not taken, and the hop ends."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protos.brigade_pb2 import DTYPE_FLOAT32, Credit, Frame, Tensor
from protos.brigade_pb2_grpc import NodeServicer
from tests.integration.certificates import Certificates
from tests.integration.many import until
from tools.proxy import Proxy
from worker.errors import BrigadeError
from worker.node.link import Link
from worker.node.parts import Arrival, Joiner, Wire, cut, write_part
from worker.node.relay import add_node


class Flipping(Proxy):
    """Flips one bit in the next piece on its way to the target, whenever it is armed."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.is_armed = False
        self.num_flipped = 0
        self._numbers = random.Random(7)

    def passed(self, piece: bytes, *, is_back: bool) -> bytes:
        if is_back or not self.is_armed:
            return piece
        self.is_armed = False
        self.num_flipped += 1
        flipped = bytearray(piece)
        flipped[self._numbers.randrange(len(piece))] ^= 1 << self._numbers.randrange(8)
        return bytes(flipped)


class Recorder(NodeServicer):
    """Takes every frame that its hops bring."""

    def __init__(self, wire: Wire) -> None:
        self.arrived: list[Arrival] = []
        self._wire = wire

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        yield Credit(frames=8)
        joiner = Joiner(lambda frame: None, self._wire)
        async for part in parts:
            if arrival := joiner.add(part):
                self.arrived.append(arrival)
                yield Credit(frames=1)


async def test_of_hundreds_of_frames_with_a_flipped_bit_none_is_accepted(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    network = certificates.network("node-1")
    recorder, server = Recorder(network.wire), network.server()
    add_node(recorder, server)
    port = network.listen(server, "127.0.0.1:0")
    await server.start()
    sender, numbers = certificates.coordinator(), random.Random(11)
    async with Flipping(f"127.0.0.1:{port}").serving() as proxy:
        for step in range(200):
            size = numbers.choice([4, 1024, 4096, 300_000])
            link = Link(sender, "node-1", proxy.address, 1, 0)
            await link.wait_open()
            proxy.is_armed = True
            with pytest.raises(BrigadeError):  # closed as soon as the bit is noticed, while it is written or later
                await link.send(frame_of(step, numbers.randbytes(size), network.wire.part_bytes))
                async with asyncio.timeout(10):
                    await link.wait_lost()
            await link.close()
        assert (proxy.num_flipped, recorder.arrived) == (200, [])
        payload = numbers.randbytes(600_000)
        link = Link(sender, "node-1", proxy.address, 1, 0)
        await link.send(frame_of(200, payload, network.wire.part_bytes))
        await until(lambda: bool(recorder.arrived))
        await link.close()
    [arrival] = recorder.arrived
    assert b"".join(arrival.payload) == payload and len(arrival.payload) == 3
    await server.stop(None)


def frame_of(step: int, payload: bytes, part_bytes: int) -> list[bytes]:
    frame = Frame(epoch=1, step=step, hidden=Tensor(dtype=DTYPE_FLOAT32, shape=[1, len(payload) // 4, 1]))
    pieces = enumerate(cut(memoryview(payload), part_bytes))
    return [write_part(number, b"" if number else frame.SerializeToString(), data) for number, data in pieces]
