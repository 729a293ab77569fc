"""The fastest plan over nodes of known speed: which of them take part, in which order, and with which layers. Pure."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.objective import USUAL_REQUESTS, Objective
from coordinator.planning.plan import Node, Plan, plan
from coordinator.planning.speeds import Survey
from worker.model.modelspec import ModelSpec

Floats = NDArray[np.float64]

_MOST_IN_ANY_ORDER = 9  # nodes: more are taken in the order in which they are given
_CLEARLY = 1 - 1e-9  # what a longer chain has to be below, lest rounding decide


@dataclass(frozen=True)
class Aim:
    """What a plan is to be good at, and what there has to be memory for.

    `latency` is one request's time per token, `throughput` that of `num_requests` together.
    """

    context: int  # tokens of each session
    num_sessions: int = 1
    objective: Objective = "latency"
    num_requests: int = USUAL_REQUESTS
    is_order_fixed: bool = False
    may_be_alone: bool = True  # whether the first node may hold everything

    @property
    def requests_at_once(self) -> int:
        """How many requests there are while it is judged."""
        return 1 if self.objective == "latency" else self.num_requests


@dataclass(frozen=True)
class _Chain:
    """Nodes by number, the first is 0, and where the layers of each end."""

    cost: float
    members: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Of each member the first layer, and the one behind its last."""
        return list(pairwise((0, *self.ends)))

    @property
    def layers(self) -> list[int]:
        return [end - start for start, end in self.parts]


def best_plan(
    spec: ModelSpec, nodes: Sequence[Node], survey: Survey, aim: Aim, layers: Sequence[int] | None = None
) -> Plan:
    """The fastest plan that fits, if the speed of all nodes is known; else the split by bytes over all of them.

    Raises:
        ConfigError: as `plan` does.
    """
    found = fastest(spec, nodes, survey, aim) if layers is None and survey.covers(node.name for node in nodes) else None
    return found or plan(spec, nodes, aim.context, layers, aim.num_sessions)


def fastest(spec: ModelSpec, nodes: Sequence[Node], survey: Survey, aim: Aim) -> Plan | None:
    """The plan that `aim` is best served by; None if none fits. The first node always takes part.

    Of plans that are equally fast it is one with the fewest nodes.
    """
    search = _Search(spec, nodes, survey, aim)
    best = _Chain(math.inf)
    num_requests = aim.requests_at_once
    for lanes in range(1, num_requests + 1):
        rows = -(-num_requests // lanes)
        is_new = lanes == 1 or rows < -(-num_requests // (lanes - 1))  # of equal frames the fewest are best
        if is_new and all(survey.speeds[node.name].knows(rows) for node in nodes):
            best = search.least_round(rows, lanes, best)
    if not best.members:
        return None
    return plan(spec, [nodes[i] for i in best.members], aim.context, best.layers, aim.num_sessions)


class _Search:
    """All chains over some nodes. Matrices are by a stage's first layer and by the layer behind its last one."""

    def __init__(self, spec: ModelSpec, nodes: Sequence[Node], survey: Survey, aim: Aim) -> None:
        self._spec = spec
        self._survey = survey
        self._context = aim.context
        self._names = [node.name for node in nodes]
        self._may_be_alone = aim.may_be_alone
        self._in_order = aim.is_order_fixed or len(nodes) > _MOST_IN_ANY_ORDER
        needed = _needed_bytes(spec, aim)
        self._forbidden = [needed > node.memory_bytes for node in nodes]

    def least_round(self, num_rows: int, lanes: int, known: _Chain) -> _Chain:
        """The chain in which frames of so many rows, one per lane, have all passed soonest; `known` if none is better.

        That takes as long as a frame's way, or as the slowest part takes for all lanes. With no part slower than a
        limit, the shortest way is the longer the lower the limit is: the best is where limit and way meet.
        """
        stages = [self._stage(i, num_rows) for i in range(len(self._names))]
        ways, occupied, back = self._hops(num_rows)

        def shortest(limit: float) -> _Chain:
            return self._shortest(
                [np.where(lanes * stage <= limit, stage, np.inf) for stage in stages],
                np.where(lanes * occupied <= limit, ways, np.inf),
                back,
            )

        def rounded(chain: _Chain) -> _Chain:
            """With what a round takes in place of what a frame takes."""
            computed = [stages[i][part] for i, part in zip(chain.members, chain.parts, strict=True)]
            carried = [occupied[pair] for pair in pairwise(chain.members)]
            return _Chain(max(chain.cost, lanes * max(computed + carried)), chain.members, chain.ends)

        if shortest(math.inf).cost >= known.cost:
            return known
        times = np.concatenate([*(stage[np.isfinite(stage)] for stage in stages), occupied.ravel()])
        limits = lanes * np.unique(times)
        at = _first(len(limits), lambda i: shortest(limits[i]).cost <= limits[i])
        near = [shortest(limits[i]) for i in (at - 1, at) if 0 <= i < len(limits)]
        return _least([known, *(rounded(chain) for chain in near if chain.members)])

    def _stage(self, i: int, num_rows: int) -> Floats:
        """Milliseconds of every stage that node i has memory for, infinity of others."""
        speed = self._survey.speeds[self._names[i]]
        layers_ms = np.array(speed.layers_ms(self._spec, num_rows))
        layers_ms += num_rows * np.array(speed.caches_ms(self._spec, self._context))
        up_to = np.concatenate([[0.0], np.cumsum(layers_ms)])
        ms = up_to[None, :] - up_to[:, None]
        ms[:, -1] += speed.head_ms(num_rows)
        ms[self._forbidden[i]] = np.inf
        return ms

    def _hops(self, num_rows: int) -> tuple[Floats, Floats, Floats]:
        """By sender and receiver: milliseconds of a hop, and of those the link's own; and of each way back."""
        num_bytes = num_rows * self._spec.row_bytes
        links = [[self._survey.link(a, b) for b in self._names] for a in self._names]
        ways = np.array([[link.ms(num_bytes) for link in row] for row in links])
        occupied = np.array([[link.occupied_ms(num_bytes) for link in row] for row in links])
        back = np.array([row[0].ms() for row in links])
        back[0] = 0.0 if self._may_be_alone else np.inf
        return ways, occupied, back

    def _shortest(self, stages: Sequence[Floats], ways: Floats, back: Floats) -> _Chain:
        """The chain with the least sum, by dynamic programming: by the nodes used, the last of them, and its end."""
        num_nodes, num_ends = len(stages), len(stages[0])
        start = np.full((num_nodes, num_ends), np.inf)
        start[0] = stages[0][0]
        reached, steps = {1: start}, _Steps()
        for used, then_used, i in self._transitions(num_nodes):
            by_last = reached[used] + ways[:, i, None]
            sums = by_last.min(axis=0)[:, None] + stages[i]  # by start and end
            table = reached.setdefault(then_used, np.full((num_nodes, num_ends), np.inf))
            table[i] = sums.min(axis=0)
            steps[then_used, i] = used, by_last.argmin(axis=0), sums.argmin(axis=0)
        totals = {used: table[:, -1] + back for used, table in reached.items()}
        least = min(float(total.min()) for total in totals.values())
        if math.isinf(least):
            return _Chain(math.inf)
        good = ((used, int(i)) for used, total in totals.items() for i in np.flatnonzero(total * _CLEARLY <= least))
        return _least([_Chain(least, *_way_back(steps, used, i, num_ends - 1)) for used, i in good])

    def _transitions(self, num_nodes: int) -> Iterator[tuple[int, int, int]]:
        """Sets of nodes used, as bits, before and after node i is added; every set is complete before it is used.

        In the given order one table is enough: which nodes were used before the last one makes no difference then.
        """
        if self._in_order:
            yield from ((1, 1, i) for i in range(1, num_nodes))
            return
        for used in range(1, 1 << num_nodes, 2):
            yield from ((used, used | 1 << i, i) for i in range(1, num_nodes) if not used & 1 << i)


_Steps = dict[tuple[int, int], tuple[int, NDArray[np.intp], NDArray[np.intp]]]


def _way_back(steps: _Steps, used: int, i: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The members of a chain, and their ends."""
    members, ends = [i], [end]
    while members[0]:
        used, lasts, starts = steps[used, members[0]]
        ends.insert(0, int(starts[ends[0]]))
        members.insert(0, int(lasts[ends[0]]))
    return tuple(members), tuple(ends)


def _least(chains: Sequence[_Chain]) -> _Chain:
    """The cheapest; of those that differ by rounding only, the one with the fewest nodes, then the earliest ones."""
    limit = min(chain.cost for chain in chains) / _CLEARLY
    return min((c for c in chains if c.cost <= limit), key=lambda c: (len(c.members), c.members, c.ends))


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """The first number below `count` for which it holds, if it holds for all after it."""
    return bisect_left(range(count), True, key=holds)


def _needed_bytes(spec: ModelSpec, aim: Aim) -> Floats:
    """Of every stage; infinity where it has no layer."""
    num_ends = spec.num_layers + 1
    caches = (spec.reserved_bytes(layer, layer + 1, aim.context) for layer in range(spec.num_layers))
    up_to = [aim.num_sessions * nbytes for nbytes in accumulate(caches, initial=0)]
    needed = np.full((num_ends, num_ends), np.inf)
    for start, end in combinations(range(num_ends), 2):
        needed[start, end] = spec.shard_bytes(start, end) + up_to[end] - up_to[start]
    return needed
