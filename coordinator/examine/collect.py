"""Collecting what doctor judges: all nodes are asked at the same time, then the hops are measured one after another."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from coordinator.cluster.peer import Peer, peers_of
from coordinator.cluster.together import together
from coordinator.examine.known import Known, KnownHop, KnownNode
from protos.brigade_pb2 import TRANSPORT_GRPC, TRANSPORT_TCP, TRANSPORT_TLS, Listener, Transport
from worker.config import Cluster, Worker, is_loopback, split_address
from worker.errors import BrigadeError, ConfigError, StageLost
from worker.node.configuration import configuration_of
from worker.node.examine import examine
from worker.node.identity import Role
from worker.node.network import Network
from worker.node.way import way_to

Begin = Callable[[str], None]  # takes what begins now
Transports = Sequence[Transport]

_CLOCK_TRIES = 3
_PLAIN: Transports = (TRANSPORT_TCP,)  # beside gRPC, which is not encrypted either
_ENCRYPTED: Transports = (TRANSPORT_TCP, TRANSPORT_TLS, TRANSPORT_GRPC)


async def collect(cluster: Cluster, begin: Begin = lambda step: None) -> Known:
    """Whatever can be found out of the configuration's nodes and hops: who cannot be asked is part of it."""
    own_name, own = cluster.coordinator.name, cluster.coordinator
    begin("asking every node about itself")
    network = Network.of(cluster, own_name, Role.COORDINATOR)
    async with AsyncExitStack() as stack:
        try:
            peers = await stack.enter_async_context(peers_of(cluster, network))
        except ConfigError as error:  # this node's own certificate, without which nobody can be asked
            here = KnownNode(own_name, await examine(own_name, Network()), error, configured_bytes=own.memory)
            return Known([here])
        asking = [_ask(*pair, network) for pair in zip(peers, cluster.workers, strict=True)]
        nodes = await together(_here(cluster, network), *asking)
        known = Known(nodes)
        transports = _ENCRYPTED if cluster.tls else _PLAIN
        return replace(known, hops=await _measure_hops(known, peers, begin, transports))


def num_steps(cluster: Cluster) -> int:
    """How often `begin` is called."""
    return 1 + len(cluster.workers) + (len(cluster.workers) > 1)


async def _here(cluster: Cluster, network: Network) -> KnownNode:
    own = cluster.coordinator
    facts = await examine(own.name, network)
    return KnownNode(own.name, facts, configuration=configuration_of(cluster), configured_bytes=own.memory)


async def _ask(peer: Peer, worker: Worker, network: Network) -> KnownNode:
    is_here = is_loopback(split_address(worker.addresses[0])[0])
    ways = await asyncio.gather(*map(way_to, worker.addresses))
    start = network.way_to_start(peer.name)
    found = KnownNode(peer.name, ways=ways, configured_bytes=worker.memory, is_here=is_here, start=start)
    if all(way.error for way in ways):  # gRPC would wait for somebody to come, and say less
        return replace(found, error=StageLost(f"{ways[0].address}: {ways[0].error}"))
    try:
        hello = await peer.hello()
        found = replace(found, configuration=hello.configuration if hello.HasField("configuration") else None)
        return replace(found, facts=await peer.examine(), clock_offset_s=await _clock_offset_s(peer))
    except BrigadeError as error:
        return replace(found, error=error)


async def _clock_offset_s(peer: Peer) -> float:
    """Its time of day minus ours, by the quickest of some exchanges."""
    found = []
    for _ in range(_CLOCK_TRIES):
        before, began = time.monotonic_ns(), time.time_ns()
        theirs = (await peer.examine(only_time=True)).time
        took = time.monotonic_ns() - before
        found.append((took, (theirs - began - took / 2) / 1e9))
    return min(found)[1]


async def _measure_hops(known: Known, peers: Sequence[Peer], begin: Begin, transports: Transports) -> list[KnownHop]:
    """From this node to the first worker, along the chain, and from the last one back."""
    senders: list[Peer | None] = [None, *peers]
    hops = []
    for sender, receiver in zip(senders, peers, strict=False):  # the last one sends to nobody but back
        hops.append(await _measure(known, sender, receiver, begin, transports))
    if len(peers) > 1:
        hops.append(replace(await _measure(known, None, peers[-1], begin, transports), is_back=True))
    return hops


async def _measure(known: Known, sender: Peer | None, receiver: Peer, begin: Begin, transports: Transports) -> KnownHop:
    """From the sender, or from this node."""
    source = sender.name if sender else known.nodes[0].name
    hop = KnownHop(source, receiver.name)
    begin(f"measuring {hop.about}")
    if any(known.by_name[name].facts is None for name in (source, receiver.name)):
        return hop
    async with AsyncExitStack() as stack:
        ports = [await _opened(stack, receiver, each) for each in transports]
        listeners = [port for port in ports if port is not None]
        try:
            far = None if sender is None else receiver
            reply = await (sender or receiver).measure_link(far, listeners, examined=True)
        except BrigadeError as error:
            return replace(hop, error=error)
    return replace(hop, reply=reply)


async def _opened(stack: AsyncExitStack, receiver: Peer, transport: Transport) -> Listener | None:
    """None where it opens no port: what frames take can be measured without."""
    try:
        return await stack.enter_async_context(receiver.listening(transport))
    except BrigadeError:
        return None
