"""Watch: a server's state at this moment: what the tally has, what the chain says, and what every node answers now."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.cluster.supervisor import Supervisor
from coordinator.planning.plan import Assignment
from coordinator.resident.model import ResidentModel
from coordinator.resident.tally import Tally
from protos.brigade_pb2 import StatusReply

_ASK_S = 1.0
_FRESH_S = 0.5  # whoever asks again within it is told the same: no number of readers troubles the nodes more

HELD, APART, LOST = "active", "idle", "lost"


@dataclass(frozen=True)
class NodeNow:
    """One node. What it does not answer is None."""

    name: str
    state: str  # "active" in the chain, "idle" beside it, "lost"
    address: str  # empty for the coordinator itself, and for what runs nowhere now
    stage: int | None  # its place in the chain
    start: int  # layers [start, end), of the present chain or else of the whole plan
    end: int
    memory_bytes: int  # what it may use
    weight_bytes: int
    cache_promised_bytes: int
    cache_budget_bytes: int
    cache_held_bytes: int | None
    peak_memory_bytes: int | None  # since the latest request began
    active_memory_bytes: int | None  # that MLX holds, and
    cached_memory_bytes: int | None  # those beside them that it has freed and keeps for what comes
    utilisation: float  # of the last ten seconds
    sent_bytes: int | None  # since it joined the chain
    slots: int | None


@dataclass(frozen=True)
class Hop:
    """From one node to the next; the last one leads back to the coordinator, with tokens."""

    source: str
    target: str
    latency_ms: float | None  # a frame's mean
    sent_bytes: int | None


@dataclass(frozen=True)
class Running:
    """A request under way."""

    id: str
    prompt_tokens: int
    generated: int
    decoder: str
    state: str  # "running", or "waiting" for memory
    age_s: float


@dataclass(frozen=True)
class Now:
    """All of it; nodes and hops are empty while no model is loaded."""

    epoch: int = 0
    nodes: Sequence[NodeNow] = ()
    hops: Sequence[Hop] = ()
    requests: Sequence[Running] = ()


Statuses = dict[str, StatusReply | None]  # by node; None for one that does not answer


class Watch:
    """Asks the nodes no more often than it must."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._lock = asyncio.Lock()
        self._asked: tuple[float, ResidentModel, Statuses] | None = None

    async def look(self, model: ResidentModel | None) -> Now:
        if model is None:
            return Now()
        nodes = _nodes(model, await self._statuses(model), self._tally.flow.utilisation(time.monotonic_ns()))
        return Now(model.cluster.chain.epoch, nodes, _hops(nodes, self._tally), _requests(model, self._tally))

    def forget(self) -> None:
        """Hold on to no model that was let go."""
        self._asked = None

    async def _statuses(self, model: ResidentModel) -> Statuses:
        async with self._lock:
            if self._asked and self._asked[1] is model and time.monotonic() - self._asked[0] < _FRESH_S:
                return self._asked[2]
            cluster = model.cluster
            names = list(cluster.roster.members)
            theirs = await asyncio.gather(*(_ask(cluster, name) for name in names))
            own = {cluster.chain.plan.assignments[0].name: cluster.chain.own_status}
            self._asked = time.monotonic(), model, own | dict(zip(names, theirs, strict=True))
            return self._asked[2]


async def _ask(cluster: Supervisor, name: str) -> StatusReply | None:
    """What the worker says, if it does."""
    peer = cluster.roster.members[name].peer
    if peer is None:
        return None
    [reply] = await asyncio.gather(peer.status(_ASK_S), return_exceptions=True)
    return reply if isinstance(reply, StatusReply) else None


def _nodes(model: ResidentModel, statuses: Statuses, utilisation: dict[str, float]) -> list[NodeNow]:
    chain, whole = model.cluster.chain, model.cluster.whole
    promised = model.runner.scheduler.slots.promised
    found = []
    for stage, place in enumerate(chain.plan.assignments):
        found.append(_node(model, place, statuses.get(place.name), stage, promised[stage], utilisation))
    in_chain = {place.name for place in chain.plan.assignments}
    others = [place for place in whole.assignments if place.name not in in_chain]
    return found + [_node(model, place, statuses.get(place.name), None, 0, {}) for place in others]


def _node(
    model: ResidentModel,
    place: Assignment,
    said: StatusReply | None,
    stage: int | None,
    promised: int,
    utilisation: dict[str, float],
) -> NodeNow:
    member = model.cluster.roster.members.get(place.name)
    is_joined = stage is not None and not model.cluster.trouble
    state = HELD if is_joined or (stage == 0) else (LOST if said is None else APART)
    return NodeNow(
        name=place.name,
        state=state,
        address=member.peer.address if member and member.peer else "",
        stage=stage,
        start=place.start,
        end=place.end,
        memory_bytes=place.memory_bytes,
        weight_bytes=place.weight_bytes,
        cache_promised_bytes=promised if is_joined else 0,
        cache_budget_bytes=max(0, place.memory_bytes - place.weight_bytes),
        cache_held_bytes=said.cache_bytes if said else None,
        peak_memory_bytes=said.peak_memory_bytes if said else None,
        active_memory_bytes=said.active_memory_bytes if said else None,
        cached_memory_bytes=said.cached_memory_bytes if said else None,
        utilisation=utilisation.get(place.name, 0.0) if is_joined else 0.0,
        sent_bytes=said.sent_bytes if said else None,
        slots=said.slots if said else None,
    )


def _hops(nodes: Sequence[NodeNow], tally: Tally) -> list[Hop]:
    chain = [node for node in nodes if node.stage is not None]
    sums = {(each.stage, each.worker): each for each in tally.flow.stages}
    hops = []
    for node, target in zip(chain, [*chain[1:], chain[0]], strict=True):
        into = sums.get((target.stage or 0, target.name))
        latency_ms = into.wire / into.num_frames / 1e6 if into and into.num_frames else None
        if len(chain) > 1:
            hops.append(Hop(node.name, target.name, latency_ms, node.sent_bytes))
    return hops


def _requests(model: ResidentModel, tally: Tally) -> list[Running]:
    has_slot = {id(ticket.request): ticket.session.slot is not None for ticket in model.runner.tickets}
    now = time.monotonic_ns()
    return [
        Running(
            each.id,
            each.num_prompt,
            each.num_generated,
            each.decoder,
            "running" if has_slot.get(id(each.request)) else "waiting",
            (now - each.started) / 1e9,
        )
        for each in tally.under_way
    ]
