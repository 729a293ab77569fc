"""The state of a server at this moment, from its statistics, its chain and its nodes; and the lines of its log."""

import asyncio
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.cluster.cluster import Cluster
from coordinator.cluster.log import log
from coordinator.engine.engine import Engine
from coordinator.engine.stats import FinishedRequest, Stats
from coordinator.planning.plan import Assignment
from protos.brigade_pb2 import StatusReply
from worker.platform.text import counted

_ASK_S = 1.0
_FRESH_S = 0.5  # readers share an answer for so long: their number does not change how often nodes are asked
_LOG_EVERY_S = 5.0
# values of a node by the names that they have in its answer
_AS_ANSWERED = ("peak_memory_bytes", "active_memory_bytes", "cached_memory_bytes", "sent_bytes", "slots")


@dataclass(frozen=True)
class NodeStatus:
    """One node. A value that it does not answer is None."""

    name: str
    state: str  # "active" in the chain, "idle" beside it, "lost"
    address: str  # empty for the coordinator itself, and for a node that runs nowhere now
    stage: int | None  # its place in the chain
    start: int  # layers [start, end), of the present chain or else of the whole plan
    end: int
    memory_bytes: int  # that it may use
    weight_bytes: int
    cache_promised_bytes: int
    cache_budget_bytes: int
    cache_held_bytes: int | None
    peak_memory_bytes: int | None  # since the latest request began
    active_memory_bytes: int | None  # held by MLX
    cached_memory_bytes: int | None  # beside them, freed and kept by MLX
    utilisation: float  # of the last ten seconds, 0 to 1
    sent_bytes: int | None  # since it joined the chain
    slots: int | None


@dataclass(frozen=True)
class HopStatus:
    """The hop from one node to the next; the last one returns tokens to the coordinator."""

    source: str
    target: str
    latency_ms: float | None  # a frame's mean, of those that found the target idle
    sent_bytes: int | None


@dataclass(frozen=True)
class RequestStatus:
    """A request under way."""

    id: str
    prompt_tokens: int
    prompt_computed: int  # of these
    generated: int
    decoder: str
    state: str  # "running", or "waiting" for memory
    age_s: float


@dataclass(frozen=True)
class StatusSnapshot:
    """The server's state at one moment; nodes and hops are empty while no model is loaded."""

    epoch: int = 0
    nodes: Sequence[NodeStatus] = ()
    hops: Sequence[HopStatus] = ()
    requests: Sequence[RequestStatus] = ()

    @property
    def cache_usage(self) -> float:
        """The reserved share of the cache's memory on the fullest node, 0 to 1."""
        return max((node.cache_promised_bytes / max(1, node.cache_budget_bytes) for node in self.nodes), default=0.0)


class ClusterStatus:
    """Asks the nodes for their status, at most once in half a second."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._lock = asyncio.Lock()
        # A weak reference: a failed engine would stay in memory while the next one loads.
        self._asked: tuple[float, weakref.ref[Engine], dict[str, StatusReply | None]] | None = None

    async def look(self, model: Engine | None) -> StatusSnapshot:
        if model is None:
            return StatusSnapshot()
        nodes = _nodes(model, await self._replies(model), self._stats.stages.utilisation(time.monotonic_ns()))
        return StatusSnapshot(
            model.cluster.chain.epoch, nodes, _hops(nodes, self._stats), _requests(model, self._stats)
        )

    async def _replies(self, model: Engine) -> dict[str, StatusReply | None]:
        """Return the status of every node; None for one that does not answer."""
        async with self._lock:
            if self._asked and self._asked[1]() is model and time.monotonic() - self._asked[0] < _FRESH_S:
                return self._asked[2]
            cluster = model.cluster
            names = list(cluster.nodes.workers)
            replies = await asyncio.gather(*(_ask(cluster, name) for name in names))
            own = {cluster.chain.plan.assignments[0].name: cluster.chain.own_status}
            self._asked = time.monotonic(), weakref.ref(model), own | dict(zip(names, replies, strict=True))
            return self._asked[2]


async def _ask(cluster: Cluster, name: str) -> StatusReply | None:
    peer = cluster.nodes.workers[name].peer
    if peer is None:
        return None
    [reply] = await asyncio.gather(peer.status(_ASK_S), return_exceptions=True)
    return reply if isinstance(reply, StatusReply) else None


def _nodes(model: Engine, replies: dict[str, StatusReply | None], utilisation: dict[str, float]) -> list[NodeStatus]:
    # until the engine goes on with this chain, of the last one
    reserved = itertools.chain(model.scheduler.slots.reserved, itertools.repeat(0))
    found = []
    for stage, (place, num_bytes) in enumerate(zip(model.cluster.chain.plan.assignments, reserved, strict=False)):
        found.append(_node(model, place, replies.get(place.name), stage, num_bytes, utilisation))
    others = model.cluster.outside
    return found + [_node(model, place, replies.get(place.name), None, 0, {}) for place in others]


def _node(
    model: Engine,
    place: Assignment,
    reply: StatusReply | None,
    stage: int | None,
    reserved: int,
    utilisation: dict[str, float],
) -> NodeStatus:
    worker = model.cluster.nodes.workers.get(place.name)
    is_joined = stage is not None and not model.cluster.trouble
    state = "active" if is_joined or stage == 0 else "lost" if reply is None else "idle"
    return NodeStatus(
        name=place.name,
        state=state,
        address=worker.address if worker else "",
        stage=stage,
        start=place.start,
        end=place.end,
        memory_bytes=place.memory_bytes,
        weight_bytes=place.weight_bytes,
        cache_promised_bytes=reserved if is_joined else 0,
        cache_budget_bytes=place.cache_budget_bytes,
        cache_held_bytes=reply.cache_bytes if reply else None,
        utilisation=utilisation.get(place.name, 0.0) if is_joined else 0.0,
        **{name: getattr(reply, name) if reply else None for name in _AS_ANSWERED},
    )


def _hops(nodes: Sequence[NodeStatus], stats: Stats) -> list[HopStatus]:
    chain = [node for node in nodes if node.stage is not None]
    totals = {(each.stage, each.worker): each for each in stats.stages.totals}
    hops = []
    for node, target in zip(chain, [*chain[1:], chain[0]], strict=True):
        into = totals.get((target.stage or 0, target.name))
        latency_ms = into.hops / into.num_hops / 1e6 if into and into.num_hops else None
        if len(chain) > 1:
            hops.append(HopStatus(node.name, target.name, latency_ms, node.sent_bytes))
    return hops


def _requests(model: Engine, stats: Stats) -> list[RequestStatus]:
    sessions = {id(session.request): session for session in model.sessions}
    now = time.monotonic_ns()
    found = []
    for each in stats.under_way:
        session = sessions.get(id(each.request))  # none of one that waits for others with its prompt
        computed = session.num_prompt_computed if session else 0
        state = "running" if session and session.slot is not None else "waiting"
        age_s = (now - each.started) / 1e9
        found.append(RequestStatus(each.id, each.num_prompt, computed, each.num_generated, each.decoder, state, age_s))
    return found


def log_request(finished: FinishedRequest) -> None:
    """Log one line, without any text of the prompt or the answer."""
    first = "" if finished.first_token_s is None else f", the first after {finished.first_token_s:.2f} s"
    why = f": {finished.why}" if finished.why else ""
    log(
        "request",
        f"{finished.id or 'request'}: {finished.finish_reason}{why}; {counted(finished.num_prompt, 'prompt token')}, "
        f"{counted(finished.num_generated, 'token')} in {finished.total_s:.2f} s{first}",
        level="warning" if finished.finish_reason in ("error", "refused") else "info",
        request_id=finished.id or None,
        key=finished.key or None,
        finish_reason=finished.finish_reason,
        prompt_tokens=finished.num_prompt,
        completion_tokens=finished.num_generated,
        steps=finished.num_steps,
        decoder=finished.decoder,
        total_s=round(finished.total_s, 4),
        ttft_s=None if finished.first_token_s is None else round(finished.first_token_s, 4),
        queue_s=None if finished.queue_s is None else round(finished.queue_s, 4),
        cached_tokens=finished.num_reused,
        recoveries=finished.num_recoveries,
    )


class StatusLog:
    """Logs a line every few seconds while the server is busy."""

    def __init__(self, stats: Stats, status: ClusterStatus, model: Callable[[], Engine | None]) -> None:
        self._stats = stats
        self._status = status
        self._model = model
        self._before = self._totals()

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(_LOG_EVERY_S)
            await self.log(_LOG_EVERY_S)

    async def log(self, passed_s: float) -> None:
        """Log one line about the last `passed_s` seconds, or none if the server was idle."""
        before, self._before = self._before, self._totals()
        if not self._stats.under_way and self._before == before:
            return
        now = await self._status.look(self._model())
        prompt, answers = ((num - earlier) / passed_s for num, earlier in zip(self._before, before, strict=True))
        states = [each.state for each in now.requests]
        running, waiting = states.count("running"), states.count("waiting")
        busiest = max(now.nodes, key=lambda node: node.utilisation, default=None)
        queries = self._stats.total("prefix_cache_queries")
        reused = self._stats.total("prefix_cache_hits") / queries if queries else 0.0
        log(
            "status",
            f"prompt {prompt:.0f} tok/s, answers {answers:.1f} tok/s, running {running}, waiting {waiting}, "
            f"cache {now.cache_usage:.0%}, prefixes {reused:.0%}"
            + (f", busiest {busiest.name} ({busiest.utilisation:.0%})" if busiest else ""),
            prompt_tokens_per_s=round(prompt, 1),
            tokens_per_s=round(answers, 1),
            running=running,
            waiting=waiting,
            cache_usage=round(now.cache_usage, 4),
            prefix_hit_rate=round(reused, 4),
            busiest=busiest.name if busiest else None,
        )

    def _totals(self) -> tuple[int, int]:
        return self._stats.total("prompt_tokens"), self._stats.total("generation_tokens")
