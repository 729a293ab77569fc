"""The planner: which nodes take part, in which order, and with which layers. Pure."""

import math
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.plan import (
    Node,
    Objective,
    Plan,
    assign,
    check_split,
    some_split_fits,
    split_by_bytes,
)
from coordinator.planning.speeds import Survey
from worker.errors import ConfigError
from worker.model.modelspec import ModelSpec

LATENCY_SLACK = 1.02  # times the best latency: plans within it are as good, and other things decide between them
PROMPT_ROWS = 512  # of a frame of a prompt, by which plans are compared
_GRAIN = 256  # tokens: caches grow by so many
_MOST_IN_ANY_ORDER = 9  # nodes: more are taken in the order in which they are given
_CLEARLY = 1 - 1e-9  # times the cost of a shorter chain: a longer one has to be below it, lest rounding decide

Floats = NDArray[np.float64]
_Ways = dict[tuple[int, int], tuple[int, NDArray[np.intp], NDArray[np.intp]]]


def plan(spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective) -> Plan:
    """Return the best plan for the objective; `fits` is False if none fits. The first node always takes part.

    Given layers are assigned as they are. If the speed of every node is known, the plan is the fastest that fits, over
    those nodes that make it faster:

    * `latency`: of all plans whose time per token is within LATENCY_SLACK of the best, the one with the fastest
      prompts, then with the fastest steps of many requests. Both are judged by the slowest stage or link.
    * `throughput`: the one that brings all `num_requests` their next token soonest; with memory for all of them if
      there is so much, else for `num_sessions`.

    Plans that are equally good differ by their number of nodes: the fewest win. If a speed is unknown or nothing fits,
    the layers are split by bytes over all nodes in the given order. Last, the context grows to what has room.

    Raises:
        ConfigError: more nodes than layers, a context below 1, or `layers` is no split of this model over these nodes.
    """
    assert nodes
    if objective.context < 1:
        raise ConfigError(f"context: expected at least 1 token, found {objective.context}")
    layers, num_sessions = objective.layers, objective.num_sessions
    if layers is None and speeds.covers(node.name for node in nodes):
        wanted = max(objective.num_requests, num_sessions) if objective.goal == "throughput" else num_sessions
        for count in dict.fromkeys((wanted, num_sessions)):
            if (found := _Search(spec, nodes, speeds, objective, count).best()).members:
                nodes, layers = [nodes[i] for i in found.members], found.layers
                break
    check_split(spec, len(nodes), layers)

    shard_bytes = cache(spec.shard_bytes)

    def fits(context: int) -> bool:
        if layers is None:
            return some_split_fits(spec, nodes, context, num_sessions, shard_bytes)
        return assign(spec, nodes, layers, context, num_sessions).fits

    context = _largest_context(objective, fits)
    return assign(spec, nodes, layers or split_by_bytes(spec, nodes, context, num_sessions), context, num_sessions)


def _largest_context(objective: Objective, fits: Callable[[int], bool]) -> int:
    """Return the largest context within the objective's that fits, to a few tokens; the least if none does."""
    least, most = objective.context, max(objective.context, objective.max_context)
    if least == most or fits(most):
        return most
    contexts = range(least, most, _GRAIN)
    num_fitting = bisect(contexts, False, key=lambda context: not fits(context))
    return contexts[max(0, num_fitting - 1)]


@dataclass(frozen=True)
class _Chain:
    """Nodes by number, the first is 0, and the end of each one's layers; no members: none is possible."""

    cost: float = math.inf
    members: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The layers [start, end) of each member."""
        return list(pairwise((0, *self.ends)))

    @property
    def layers(self) -> list[int]:
        return [end - start for start, end in self.parts]


@dataclass(frozen=True)
class _Frame:
    """Milliseconds of a frame: by node [start, end) of its stage, infinity where that does not fit; and of links.

    `ways` and `occupied` are by sender and receiver: the whole hop, and the time in which nothing else can be sent.
    """

    stages: Sequence[Floats]
    ways: Floats
    occupied: Floats

    @property
    def times(self) -> Floats:
        """All times that a stage or a link can take, ascending: what a limit may be."""
        return np.unique(np.concatenate([*(stage[np.isfinite(stage)] for stage in self.stages), self.occupied.ravel()]))


class _Search:
    """All chains over some nodes, with memory for so many sessions."""

    def __init__(
        self, spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective, num_sessions: int
    ) -> None:
        self._spec = spec
        self._objective = objective
        self._speeds = [speeds.speeds[node.name] for node in nodes]
        self._links = [[speeds.link(a.name, b.name) for b in nodes] for a in nodes]
        self._back = np.array([row[0].ms() for row in self._links])  # of each last node to the first
        self._back[0] = 0.0 if objective.may_be_alone or len(nodes) == 1 else np.inf
        self._in_order = objective.is_order_fixed or len(nodes) > _MOST_IN_ANY_ORDER
        needed = _needed_bytes(spec, objective.context, num_sessions)
        self._forbidden = [needed > node.memory_bytes for node in nodes]

    def best(self) -> _Chain:
        """Return the best chain for the objective, one without members if none fits."""
        if self._objective.goal == "latency":
            return self._lowest_latency() if self._know(1) else _Chain()
        best, num_requests = _Chain(), self._objective.num_requests
        for lanes in range(1, num_requests + 1):
            rows = -(-num_requests // lanes)
            is_new = lanes == 1 or rows < -(-num_requests // (lanes - 1))  # of equal frames the fewest are best
            if is_new and self._know(rows):
                best = self._shortest_round(rows, lanes, best)
        return best

    def _lowest_latency(self) -> _Chain:
        """Return the chain with the fastest prompts, then steps, of those whose latency is within the slack.

        Limits are tightened one after the other, as long as a chain within the slack is left below them.
        """
        step, prompt = self._frame(1, 1), self._frame(PROMPT_ROWS if self._know(PROMPT_ROWS) else 1, 0)
        least = self._shortest(step.stages, step.ways)
        if not least.members:
            return least

        def within(prompt_ms: float, step_ms: float) -> _Chain:
            return self._shortest(
                [
                    np.where((fed <= prompt_ms) & (stage <= step_ms), stage, np.inf)
                    for stage, fed in zip(step.stages, prompt.stages, strict=True)
                ],
                np.where((prompt.occupied <= prompt_ms) & (step.occupied <= step_ms), step.ways, np.inf),
            )

        most = least.cost * LATENCY_SLACK
        prompts_ms, steps_ms = prompt.times, step.times
        prompt_ms = prompts_ms[_first(len(prompts_ms), lambda i: within(prompts_ms[i], math.inf).cost <= most)]
        step_ms = steps_ms[_first(len(steps_ms), lambda i: within(prompt_ms, steps_ms[i]).cost <= most)]
        return within(prompt_ms, step_ms)

    def _shortest_round(self, num_rows: int, lanes: int, known: _Chain) -> _Chain:
        """Return the chain in which frames of so many rows, one per lane, have all passed soonest, or `known` if none
        is better.

        That takes as long as a frame's way, or as the slowest part takes for all lanes. With no part slower than a
        limit, the shortest way is the longer the lower the limit is: the best is where limit and way meet.
        """
        frame = self._frame(num_rows, num_rows)

        def shortest(limit: float) -> _Chain:
            return self._shortest(
                [np.where(lanes * stage <= limit, stage, np.inf) for stage in frame.stages],
                np.where(lanes * frame.occupied <= limit, frame.ways, np.inf),
            )

        def rounded(chain: _Chain) -> _Chain:
            """The chain with what a round costs in place of what a frame costs."""
            computed = [frame.stages[i][part] for i, part in zip(chain.members, chain.parts, strict=True)]
            carried = [frame.occupied[pair] for pair in pairwise(chain.members)]
            return _Chain(max(chain.cost, lanes * max(computed + carried)), chain.members, chain.ends)

        if shortest(math.inf).cost >= known.cost:
            return known
        limits = lanes * frame.times
        at = _first(len(limits), lambda i: shortest(limits[i]).cost <= limits[i])
        near = [shortest(limits[i]) for i in (at - 1, at) if 0 <= i < len(limits)]
        return _least([known, *(rounded(chain) for chain in near if chain.members)])

    def _know(self, num_rows: int) -> bool:
        return all(speed.knows(num_rows) for speed in self._speeds)

    def _frame(self, num_rows: int, num_sampled: int) -> _Frame:
        """Of so many rows, of which so many bring a token: they read their session's caches and pass the head."""
        num_bytes = num_rows * self._spec.row_bytes
        stages = []
        for speed, forbidden in zip(self._speeds, self._forbidden, strict=True):
            layers_ms = np.array(speed.layers_ms(self._spec, num_rows))
            layers_ms += num_sampled * np.array(speed.caches_ms(self._spec, self._objective.context))
            up_to = np.concatenate([[0.0], np.cumsum(layers_ms)])
            ms = up_to[None, :] - up_to[:, None]
            if num_sampled:
                ms[:, -1] += speed.head_ms(num_sampled)
            ms[forbidden] = np.inf
            stages.append(ms)
        ways = np.array([[link.ms(num_bytes) for link in row] for row in self._links])
        occupied = np.array([[link.occupied_ms(num_bytes) for link in row] for row in self._links])
        np.fill_diagonal(occupied, 0.0)
        return _Frame(stages, ways, occupied)

    def _shortest(self, stages: Sequence[Floats], ways: Floats) -> _Chain:
        """The chain with the least sum, by dynamic programming: by the nodes used, the last of them, and its end."""
        num_nodes, num_ends = len(stages), len(stages[0])
        start = np.full((num_nodes, num_ends), np.inf)
        start[0] = stages[0][0]
        reached, steps = {1: start}, _Ways()
        for used, then_used, i in self._transitions(num_nodes):
            by_last = reached[used] + ways[:, i, None]
            sums = by_last.min(axis=0)[:, None] + stages[i]  # by start and end
            table = reached.setdefault(then_used, np.full((num_nodes, num_ends), np.inf))
            table[i] = sums.min(axis=0)
            steps[then_used, i] = used, by_last.argmin(axis=0), sums.argmin(axis=0)
        totals = {used: table[:, -1] + self._back for used, table in reached.items()}
        least = min(float(total.min()) for total in totals.values())
        if math.isinf(least):
            return _Chain()
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


def _way_back(steps: _Ways, used: int, i: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
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


def _needed_bytes(spec: ModelSpec, context: int, num_sessions: int) -> Floats:
    """Bytes of every stage [start, end); infinity where it has no layer."""
    num_ends = spec.num_layers + 1
    caches = [num_sessions * spec.reserved_bytes(layer, layer + 1, context) for layer in range(spec.num_layers)]
    up_to = np.concatenate([[0], np.cumsum(caches)])
    needed = np.full((num_ends, num_ends), np.inf)
    for start, end in combinations(range(num_ends), 2):
        needed[start, end] = spec.shard_bytes(start, end) + up_to[end] - up_to[start]
    return needed
