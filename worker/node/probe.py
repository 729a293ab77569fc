"""Probe: how long a few bytes take to another node and back, and how many it takes per second."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from statistics import median

import grpc
import grpc.aio

from protos.brigade_pb2 import LinkReply, ProbePart, ProbeReply
from protos.brigade_pb2_grpc import NodeStub
from worker.errors import FrameError, StageLost
from worker.node.network import Network
from worker.node.reach import reachable
from worker.node.status import error_of

_SMALL_BYTES, _NUM_SMALL, _NUM_WARM = 64, 16, 4
_LARGE_BYTES, _NUM_LARGE = 2**20, 8
_MOST_PARTS = 64  # of one call
_WITHIN_S = 5.0


async def answer_probe(parts: AsyncIterator[ProbePart]) -> AsyncIterator[ProbeReply]:
    """A reply to each part. Raises FrameError if there is no end of them, or if one is too large."""
    num_parts = 0
    async for part in parts:
        num_parts += 1
        if num_parts > _MOST_PARTS or len(part.data) > _LARGE_BYTES:
            raise FrameError(f"expected at most {_MOST_PARTS} parts of {_LARGE_BYTES} bytes to learn how far it is")
        yield ProbeReply()


async def probe(network: Network, node: str, addresses: Sequence[str]) -> LinkReply:
    """How far the node is at the first of these addresses that answers.

    Raises:
        StageLost: it does not answer, or takes too long.
    """
    try:
        async with asyncio.timeout(_WITHIN_S):
            channel = network.channel(node, await reachable(network, node, addresses))
            try:
                return await exchange(NodeStub(channel).Probe())
            finally:
                await channel.close(grace=None)
    except TimeoutError:
        raise StageLost(f"did not take a few bytes within {_WITHIN_S:.0f} s", node=node) from None
    except grpc.RpcError as error:
        raise error_of(error, node) from error


async def exchange(call: grpc.aio.StreamStreamCall[ProbePart, ProbeReply]) -> LinkReply:
    """What a call of Probe shows. Raises RpcError, or StageLost."""
    small, large = ProbePart(data=bytes(_SMALL_BYTES)), ProbePart(data=bytes(_LARGE_BYTES))
    tries_s = [await _sent(call, [small]) for _ in range(_NUM_WARM + _NUM_SMALL)]
    rtt_s = median(tries_s[_NUM_WARM:])
    took_s = await _sent(call, [large] * _NUM_LARGE)
    await call.done_writing()
    return LinkReply(rtt_ms=1e3 * rtt_s, bytes_per_s=_NUM_LARGE * _LARGE_BYTES / max(took_s - rtt_s, 1e-6))


async def _sent(call: grpc.aio.StreamStreamCall[ProbePart, ProbeReply], parts: Sequence[ProbePart]) -> float:
    """Seconds until all of these were answered."""
    began = time.monotonic()
    with contextlib.suppress(asyncio.InvalidStateError):  # it was refused meanwhile: reading tells why
        for part in parts:
            await call.write(part)
    for _ in parts:
        if await call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
            await call.code()
            raise StageLost("ended the exchange of a few bytes")
    return time.monotonic() - began
