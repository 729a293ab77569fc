"""Dialling a node with several addresses: all are tried at once; an earlier one wins if it is not much slower."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import grpc
import grpc.aio

from worker.errors import StageLost
from worker.node.network import Network

HEAD_START_S = 0.25  # by which a later address has to be faster than an earlier one
_REACH_S = 3.0

Attempt = asyncio.Task[Any]


async def dial(network: Network, node: str, addresses: Sequence[str]) -> str:
    """Return the best address at which the node can be reached now; the first one if there is none or no other."""
    if len(addresses) == 1:
        return addresses[0]
    channels = [network.channel(node, address) for address in addresses]
    attempts = [asyncio.create_task(_connect(channel, node)) for channel in channels]
    try:
        await wait_head_start(attempts, _REACH_S, lambda: _is_settled(attempts))
        found = (address for address, attempt in zip(addresses, attempts, strict=True) if has_succeeded(attempt))
        return next(found, addresses[0])
    finally:
        await give_up(attempts)
        await asyncio.gather(*(channel.close(grace=None) for channel in channels))


async def wait_head_start(
    attempts: Collection[Attempt], within_s: float, is_settled: Callable[[], bool] = lambda: False
) -> None:
    """Return once all have ended, HEAD_START_S after a success, or once it is settled.

    They end by themselves `within_s`; a success shortly before waits for half of what is left.
    """
    loop, pending = asyncio.get_running_loop(), set(attempts)
    end, until = loop.time() + within_s, None
    while pending and not is_settled():
        left_s = None if until is None else max(0.0, until - loop.time())
        done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return
        if until is None and any(map(has_succeeded, done)):
            until = loop.time() + min(HEAD_START_S, (end - loop.time()) / 2)


async def give_up(attempts: Collection[Attempt]) -> None:
    """Cancel those that have not ended."""
    for attempt in attempts:
        attempt.cancel()
    await asyncio.gather(*attempts, return_exceptions=True)


def has_succeeded(attempt: Attempt) -> bool:
    return attempt.done() and not attempt.cancelled() and attempt.exception() is None


def _is_settled(attempts: Sequence[Attempt]) -> bool:
    """Whether the first that has not failed has succeeded: none of the others can be better."""
    best = next((attempt for attempt in attempts if not attempt.done() or has_succeeded(attempt)), None)
    return best is not None and best.done()


async def _connect(channel: grpc.aio.Channel, node: str) -> None:
    """Return once the node has answered the handshake. Raises StageLost at the first failure, TimeoutError without."""
    async with asyncio.timeout(_REACH_S):
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise StageLost("cannot be reached", node=node)
            await channel.wait_for_state_change(state)
