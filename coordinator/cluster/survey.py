"""Surveys: nodes measure themselves and the links between them, for a plan by speed."""

from collections.abc import Coroutine, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, TypeVar

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import COORDINATOR_ID, Peer
from coordinator.cluster.progress import say
from coordinator.cluster.weights import push_weights
from coordinator.planning.speeds import NO_SPEEDS, UNMEASURED, LinkSpeed, NodeSpeed, Survey, TimesByRows
from protos.brigade_pb2 import Contents, Coordinator, LinkReply, LoadRequest, MeasureRequest, RowTimes
from protos.brigade_pb2 import Speed as SpeedReply
from worker.config import is_here
from worker.errors import BrigadeError, FrameError, ModelLacking
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.model.headers import pack_headers
from worker.node.speed_cache import kept_speed, measured_speed
from worker.platform.tasks import together
from worker.platform.threads import MlxThread, run_in_thread

T = TypeVar("T")

# Far beyond any machine: a peer may send anything, and sums of larger times would make plans of NaN.
_MOST_MS = 1e6
_LEAST_GBPS = 1e-6
_LEAST_BYTES_PER_S = 1.0


def is_worth_measuring(peers: Sequence[Peer]) -> bool:
    """Return whether the nodes are different machines: those of one are equally fast, or slow each other down."""
    return any(not is_here(peer.address) for peer in peers)


async def known_speeds(
    options: ClusterOptions,
    checkpoint: Checkpoint,
    peers: Sequence[Peer],
    known: Survey | None = None,
    *,
    anew: bool = False,
) -> Survey:
    """Have these nodes measure themselves at the same time, then the links to and between them, one after another.

    If nodes are not worth measuring, return the `known` speeds, or none. Configured workers that are missing count too:
    this node is measured now, and they are once they are there. Nodes return the speeds that they have kept, unless
    they are to measure `anew`. A node that refuses, or cannot be asked, is left out; a link that cannot be measured
    counts as the slowest one that its probe could measure. A node that lacks the model is sent its configuration if
    this node feeds: that is enough.

    Args:
        known: the survey to extend, for an open chain: this node, whose MLX thread computes, is not measured then.
    """
    cluster = options.cluster
    addresses = [address for worker in cluster.workers for address in worker.addresses]
    if not is_worth_measuring(peers) and all(map(is_here, addresses)):
        return known or NO_SPEEDS
    if anew or await kept_speed(checkpoint) is None:
        say("measuring how fast every node is at this model, once: this takes some seconds")
    speeds = await node_speeds(
        *(checkpoint, cluster.coordinator.name, peers), measures_here=known is None, anew=anew, feeds=options.feeds
    )
    known = known or NO_SPEEDS
    ports = {peer.name: await _unless_refused(peer.measure_link()) for peer in peers}
    links = {
        (sender.name, receiver.name): await _unless_refused(sender.measure_link(receiver))
        for sender, receiver in pairwise(peers)
    }
    return Survey(
        {**known.speeds, **speeds},
        {**known.ports, **{name: _link(reply) for name, reply in ports.items()}},
        {**known.links, **{names: _link(reply) for names, reply in links.items()}},
    )


async def node_speeds(
    checkpoint: Checkpoint, own_name: str, peers: Sequence[Peer], *, measures_here: bool, anew: bool, feeds: bool
) -> dict[str, NodeSpeed]:
    """Have these nodes, and this one if it `measures_here`, measure themselves; leave out those that refuse."""
    request = await run_in_thread(partial(_request, checkpoint, own_name, anew))
    asking = {peer.name: _unless_refused(_measured(peer, request, checkpoint, feeds=feeds)) for peer in peers}
    if measures_here:
        asking = {own_name: _own_speed(checkpoint, anew), **asking}
    found = dict(zip(asking, await together(*asking.values()), strict=True))
    return {name: _speed(reply) for name, reply in found.items() if reply and reply.kinds}


async def _own_speed(checkpoint: Checkpoint, anew: bool) -> SpeedReply:
    with closing(MlxThread()) as thread:
        return await measured_speed(checkpoint, thread, anew=anew)


async def _measured(peer: Peer, request: MeasureRequest, checkpoint: Checkpoint, *, feeds: bool) -> SpeedReply:
    try:
        found = await peer.measure(request)
    except ModelLacking:
        if not feeds:
            raise
        await push_weights(peer, request.model, checkpoint, lambda report: None)
        found = await peer.measure(request)
    num_kinds = len((await run_in_thread(partial(describe, checkpoint))).kinds) if found.kinds else 0
    is_known = all(map(_is_ascending, (*found.kinds, found.head))) and _LEAST_GBPS <= found.gbps < inf
    if found.kinds and not (is_known and len(found.kinds) == num_kinds):
        expected = f"expected up to {_MOST_MS:g} ms by rows, from 1 up, of {num_kinds} kinds of layers and the head"
        raise FrameError(f"{peer.name}: {expected}, got others; install the same version of Brigade")
    return found


def _is_ascending(times: RowTimes) -> bool:
    """Return whether these are times of ascending numbers of rows, the first one 1."""
    rows = list(times.rows)
    is_by_rows = rows[:1] == [1] and all(before < after for before, after in pairwise(rows))
    return is_by_rows and len(rows) == len(times.ms) and all(0 <= ms <= _MOST_MS for ms in times.ms)


async def _unless_refused(asking: Coroutine[Any, Any, T]) -> T | None:
    """Return the reply, or None with a warning if the node refused."""
    try:
        return await asking
    except BrigadeError as error:
        say(f"warning: not measured: {error}")
        return None


def _request(checkpoint: Checkpoint, own_name: str, anew: bool) -> MeasureRequest:
    """Return a request that describes the model by its headers: the values of its weights make no difference."""
    model = LoadRequest(
        model=checkpoint.name,
        fingerprint=checkpoint.fingerprint,
        contents=Contents(headers=pack_headers(checkpoint.tensors)),
        coordinator=Coordinator(id=COORDINATOR_ID, name=own_name),
    )
    return MeasureRequest(model=model, anew=anew)


def _speed(reply: SpeedReply) -> NodeSpeed:
    return NodeSpeed(tuple(map(_times, reply.kinds)), _times(reply.head), reply.gbps)


def _times(times: RowTimes) -> TimesByRows:
    return tuple(zip(times.rows, times.ms, strict=True))


def _link(reply: LinkReply | None) -> LinkSpeed:
    """Return the speed of a link, `UNMEASURED` if it makes no sense."""
    if reply is None or not (0 <= reply.rtt_ms <= _MOST_MS and _LEAST_BYTES_PER_S <= reply.bytes_per_s < inf):
        return UNMEASURED
    return LinkSpeed(reply.rtt_ms, reply.bytes_per_s)
