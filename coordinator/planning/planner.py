"""The planner: which nodes take part, in which order, and which layers each holds. Pure."""

import math
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.plan import (
    Node,
    Objective,
    Plan,
    assign,
    best_split,
    check_split,
    excess_cost,
    some_split_fits,
    split_by_bytes,
)
from coordinator.planning.speeds import NO_SPEEDS, NodeSpeed, Survey
from worker.errors import ConfigError
from worker.model.cache_spec import MOST_SNAPSHOT_BYTES
from worker.model.model_spec import ModelSpec
from worker.platform.text import format_bytes

LATENCY_SLACK = 1.02  # plans within this factor of the best latency are equally good, and other things decide
PROMPT_ROWS = 512  # rows of the prompt frame by which plans are compared
_MOST_CHUNKS = 32  # such frames of the long prompt by which the nodes that share prompts are chosen
_GRAIN = 256  # tokens by which caches grow
_MOST_IN_ANY_ORDER = 9  # nodes; more of them keep the order in which they are given
_MOST_REMEMBERED = 64  # plans: budgets may differ with every answer of a node
_CLEARLY = 1 - 1e-9  # factor by which a longer chain has to be cheaper than a shorter one, against rounding

Floats = NDArray[np.float64]
_Steps = dict[tuple[int, int], tuple[int, NDArray[np.intp], NDArray[np.intp]]]


def plan(spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective) -> Plan:
    """Return the best plan for the objective; `fits` is False if none fits. The first node always takes part.

    Given layers are assigned as they are. If the speed of every node is known, the plan is the fastest one that fits,
    and leaves out nodes that would not make it faster:

    * `latency`: among the plans whose time per token is within LATENCY_SLACK of the best, the one with the fastest
      prompts, then with the fastest steps of many requests. Both are judged by the slowest stage or link.
    * `prompt`: the first node makes answers alone, and computes prompts with the others, if it holds the model with a
      session and if that makes prompts faster; otherwise as `latency`.
    * `auto`: as `latency`; if that leaves all nodes but the first out, as `prompt`.
    * `throughput`: the plan that gives all `num_requests` their next token soonest, with memory for all of them if
      there is enough, else for `num_sessions`.

    Of equally good plans the one with the fewest nodes wins. If a speed is unknown or nothing fits, the layers are
    split by bytes over all nodes in the given order, where speeds are known over one per layer at most; if that does
    not fit, over those that are left without the smallest ones. Finally the context grows as far as memory allows.

    Raises:
        ConfigError: more nodes than layers and an unknown speed, a context below 1, or `layers` is no split of this
            model over these nodes.
    """
    assert nodes
    if objective.context < 1:
        raise ConfigError(f"context: expected at least 1 token, found {objective.context}")
    given, layers, num_sessions = nodes, objective.layers, objective.num_sessions
    if layers is None and speeds.covers(node.name for node in nodes):
        wanted = max(objective.num_requests, num_sessions) if objective.goal == "throughput" else num_sessions
        for count in dict.fromkeys((wanted, num_sessions)):
            if (found := _Search(spec, nodes, speeds, objective, count).best()).members:
                nodes, layers = [nodes[i] for i in found.members], found.layers
                break
        else:
            nodes = _largest(nodes, spec.num_layers)
    shares_prompts = objective.goal == "prompt" or (objective.goal == "auto" and len(nodes) == 1 < len(given))
    if shares_prompts and (apart := _plan_apart(spec, given, speeds, objective)):
        return apart
    check_split(spec, len(nodes), layers)
    if layers is None and not objective.needs_all:
        nodes = _without_smallest(spec, nodes, objective)

    def fits(context: int) -> bool:
        if layers is None:
            return some_split_fits(spec, nodes, context, num_sessions)
        return assign(spec, nodes, layers, context, num_sessions).fits

    context = _largest_context(objective, fits)
    return assign(spec, nodes, layers or split_by_bytes(spec, nodes, context, num_sessions), context, num_sessions)


def _largest(nodes: Sequence[Node], most: int) -> Sequence[Node]:
    """Return the first node and the largest others in their order, so many at most."""
    largest = sorted(range(1, len(nodes)), key=lambda i: -nodes[i].memory_bytes)[: most - 1]
    return [nodes[i] for i in (0, *sorted(largest))]


def _without_smallest(spec: ModelSpec, nodes: Sequence[Node], objective: Objective) -> Sequence[Node]:
    """Return the nodes without as few as possible of the smallest, so that a split fits; all of them if none does."""
    left = list(nodes)
    while not some_split_fits(spec, left, objective.context, objective.num_sessions):
        if len(left) <= (1 if objective.may_be_alone else 2):
            return nodes
        left.remove(min(left[1:], key=lambda node: node.memory_bytes))
    return left


def why_not_shared(spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective, chosen: Plan) -> str:
    """Return why a plan whose objective is prompts leaves them to the nodes that make answers; "" if it does not."""
    if chosen.prompt_end is not None:
        return ""
    if obstacle := _obstacle(spec, nodes):
        return obstacle
    first, *others = (node.name for node in nodes)
    if not assign(spec, nodes[:1], [spec.num_layers], objective.context, objective.num_sessions).fits:
        return f"{first} lacks memory for all layers"
    if not speeds.covers((first, *others)):  # then all of them share prompts if they can
        return "the other nodes lack memory for layers"
    unknown = [name for name in (first, *others) if not speeds.speeds[name].knows(PROMPT_ROWS)]
    if first in unknown or unknown == others:
        return f"how fast {' and '.join(unknown)} would compute them is not known (`tflops`)"
    return f"with other nodes they would be no faster than on {first} alone"


def _obstacle(spec: ModelSpec, nodes: Sequence[Node]) -> str:
    """Return why no nodes can compute prompts for the first one, or "" if they can."""
    if len(nodes) < 2:
        return "there is no other node"
    if spec.largest_snapshot_bytes > MOST_SNAPSHOT_BYTES:
        size = format_bytes(spec.largest_snapshot_bytes)
        return f"a layer's sliding window or state takes {size}, too much to be sent at once"
    return ""


def _plan_apart(spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective) -> Plan | None:
    """Return the plan with the fastest prompts in which the first node makes answers alone.

    None if there is an obstacle, if it does not fit, or if the first node is as fast by itself.
    """
    if _obstacle(spec, nodes):
        return None
    members, layers = list(nodes), objective.layers
    if layers is None:
        members, layers = _share(spec, nodes, speeds, objective)
    if layers is None:
        return None
    split = layers
    check_split(spec, len(members), split)

    def planned(context: int) -> Plan:
        return assign(spec, members, split, context, objective.num_sessions, answers_alone=True)

    found = planned(_largest_context(objective, lambda context: planned(context).fits))
    return found if found.fits or objective.layers is not None else None


def _share(
    spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective
) -> tuple[list[Node], list[int] | None]:
    """Return the nodes that compute prompts, in their order, and the layers of each; None if the first one does alone.

    Nodes are added greedily, each time the one with which a long prompt takes least, while it makes that faster. If a
    node's speed is missing, all share the layers evenly.
    """
    if not speeds.covers(node.name for node in nodes):
        _, layers = _split_apart(spec, nodes, objective, lambda i, start, end: end - start)
        return list(nodes), layers
    able = [i for i, node in enumerate(nodes) if speeds.speeds[node.name].knows(PROMPT_ROWS)]
    if not able or able[0] != 0:
        return [], None
    members, layers = [0], None
    least_ms = _num_chunks(spec) * _chunk_ms(spec, speeds.speeds[nodes[0].name])[-1]
    while larger := [sorted({*members, i}) for i in able if i not in members]:
        tried = [(*_fastest_apart(spec, [nodes[i] for i in each], speeds, objective), each) for each in larger]
        if min(tried)[0] * LATENCY_SLACK > least_ms:
            break
        least_ms, layers, members = min(tried)
    return [nodes[i] for i in members], layers


def _split_apart(
    spec: ModelSpec, nodes: Sequence[Node], objective: Objective, cost: Callable[[int, int, int], float]
) -> tuple[float, list[int] | None]:
    """Return the least cost of the costliest stage where the first node holds all layers, and the layers of each."""
    if len(nodes) > spec.num_layers:
        return math.inf, None
    excess, others_excess = (
        excess_cost(each, nodes, objective.context, objective.num_sessions)
        for each in (spec, spec.drafting_elsewhere())
    )

    def fitting_cost(i: int, start: int, end: int) -> float:
        lacking = others_excess(i, start, end) if i else excess(0, 0, spec.num_layers)
        return math.inf if lacking else cost(i, start, end)

    slowest, layers = best_split(len(nodes), spec.num_layers, fitting_cost)
    return slowest, None if math.isinf(slowest) else layers


def _fastest_apart(
    spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective
) -> tuple[float, list[int] | None]:
    """Return the least milliseconds of a long prompt over all these nodes, and the layers of each; None if no fit."""
    rows_ms = [_chunk_ms(spec, speeds.speeds[node.name]) for node in nodes]
    back = [speeds.link(node.name, nodes[0].name) for node in nodes]

    def cost(i: int, start: int, end: int) -> float:
        """Return for how long a chunk occupies the node, or what it made of it the link back."""
        segments = PROMPT_ROWS * spec.segment_row_bytes(start, end) if i else 0
        return max(rows_ms[i][end] - rows_ms[i][start], back[i].occupied_ms(segments) if i else 0.0)

    slowest_ms, layers = _split_apart(spec, nodes, objective, cost)
    if layers is None:
        return slowest_ms, None
    bounds = [(end - num, end) for num, end in zip(layers, accumulate(layers), strict=True)]
    way_ms = sum(ms[end] - ms[start] for ms, (start, end) in zip(rows_ms, bounds, strict=True))
    links = [speeds.link(one.name, other.name) for one, other in pairwise(nodes)]
    way_ms += sum(link.ms(PROMPT_ROWS * spec.row_bytes) for link in links)
    way_ms += back[-1].ms(PROMPT_ROWS * spec.segment_row_bytes(*bounds[-1]))
    answer_ms = speeds.speeds[nodes[0].name].ms_up_to(spec, 1)[-1]
    return (_num_chunks(spec) - 1) * slowest_ms + way_ms + answer_ms, layers


def _num_chunks(spec: ModelSpec) -> int:
    """Return the chunks of a long prompt."""
    return min(_MOST_CHUNKS, max(1, spec.context // PROMPT_ROWS))


def _chunk_ms(spec: ModelSpec, speed: NodeSpeed) -> Sequence[float]:
    """Return the mean milliseconds of a long prompt's chunks, each attending to those before it, by end of layers."""
    return speed.ms_up_to(spec, PROMPT_ROWS, num_before=(_num_chunks(spec) - 1) * PROMPT_ROWS // 2)


@dataclass(frozen=True)
class Planner:
    """Splits one model over the nodes that are there at the moment. It remembers the latest plans."""

    spec: ModelSpec
    speeds: Survey
    objective: Objective  # its layers are those that the user gave: for as many nodes, if they fit
    whole: Plan  # the plan over all configured nodes, as far as they have answered

    def best(self, nodes: Sequence[Node]) -> Plan | None:
        """Return the best plan over these nodes, without the drafter if it fits only so, or None if none fits."""
        return self._remembered(tuple(nodes))

    @cached_property
    def _remembered(self) -> Callable[[tuple[Node, ...]], Plan | None]:
        """The latest plans: a search takes a second, and decisions follow each other. Any thread may ask."""
        return lru_cache(_MOST_REMEMBERED)(self._found)

    def _found(self, nodes: tuple[Node, ...]) -> Plan | None:
        budgets = {node.name: node.memory_bytes for node in nodes}
        if budgets.keys() == set(self.whole.names) and (same := self.whole.within(budgets)).fits:
            return same
        if len(nodes) > self.spec.num_layers:
            return None
        given = self.objective.layers
        if given is not None and len(given) == len(nodes):
            found = self._fitting(nodes, self.speeds, self.objective)
            if found is not None:
                return found
        return self._fitting(nodes, self.speeds, replace(self.objective, layers=None))

    def _fitting(self, nodes: Sequence[Node], speeds: Survey, objective: Objective) -> Plan | None:
        specs = [self.spec, replace(self.spec, drafter=None)] if self.spec.drafter else [self.spec]
        return next((found for spec in specs if (found := plan(spec, nodes, speeds, objective)).fits), None)

    def without_growth(self, present: Plan, best: Plan) -> Plan | None:
        """Return a plan over the nodes of `best` in which no node of the present plan holds a layer that it lacks."""
        layers = _layers_without_growth(present, best)
        if layers is None or present.prompt_end is not None or best.prompt_end is not None:
            return None
        nodes = [Node(each.name, each.memory_bytes) for each in best.assignments]
        return self._fitting(nodes, NO_SPEEDS, Objective(present.context, layers=layers))


def _layers_without_growth(present: Plan, best: Plan) -> list[int] | None:
    """Return the layers of each node of `best` if present nodes only give layers to new neighbours; None if impossible.

    It is impossible if the present nodes change their order, if one of them leaves, or if a gap is too small.
    """
    order = best.names
    held = {each.name: each for each in present.assignments}
    stayers = [name for name in order if name in held]
    if stayers != list(held) or order[0] != stayers[0]:
        return None
    wanted = {each.name: each for each in best.assignments}
    ends: dict[str, int] = {}
    start = 0  # of the stayer, which may have given its first layers away
    for name, next_stayer in [*pairwise(stayers), (stayers[-1], None)]:
        newcomers = order[order.index(name) + 1 : order.index(next_stayer) if next_stayer else None]
        boundary = held[name].end
        if not newcomers:
            ends[name] = start = boundary
            continue
        most = held[next_stayer].end - 1 if next_stayer else boundary
        end = min(max(wanted[name].end, start + 1), boundary)
        last = min(max(wanted[newcomers[-1]].end, boundary), most) if next_stayer else most
        if last - end < len(newcomers):
            end = max(start + 1, last - len(newcomers))
        if last - end < len(newcomers):
            return None
        ends[name] = end
        for number, newcomer in enumerate(newcomers, 1):
            ends[newcomer] = end + number * (last - end) // len(newcomers)
        start = last
    return [end - begin for begin, end in pairwise([0, *(ends[name] for name in order)])]


def _largest_context(objective: Objective, fits: Callable[[int], bool]) -> int:
    """Return the largest context within the objective's bounds that fits, to a few tokens; the least if none fits."""
    least, most = objective.context, max(objective.context, objective.max_context)
    if least == most or fits(most):
        return most
    contexts = range(least, most, _GRAIN)
    num_fitting = bisect(contexts, False, key=lambda context: not fits(context))
    return contexts[max(0, num_fitting - 1)]


@dataclass(frozen=True)
class _Chain:
    """A chain: its nodes by number, and the end of each one's layers. Without members no chain is possible."""

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
    """The milliseconds that a frame takes on every possible stage and link.

    `stages` are by node, then by [start, end) of its layers, infinity where those do not fit. `hops` and `occupied` are
    by sender and receiver: the whole hop, and the part of it in which the link can send nothing else. `back` is the hop
    from each last node to the first.
    """

    stages: Sequence[Floats]
    hops: Floats
    occupied: Floats
    back: Floats

    @property
    def times(self) -> Floats:
        """All times that a stage or a link can take, ascending: the candidates for a limit."""
        return np.unique(np.concatenate([*(stage[np.isfinite(stage)] for stage in self.stages), self.occupied.ravel()]))


class _Search:
    """The search over all chains of some nodes with memory for so many sessions."""

    def __init__(
        self, spec: ModelSpec, nodes: Sequence[Node], speeds: Survey, objective: Objective, num_sessions: int
    ) -> None:
        self._spec = spec
        self._objective = objective
        self._speeds = [speeds.speeds[node.name] for node in nodes]
        self._links = [[speeds.link(a.name, b.name) for b in nodes] for a in nodes]
        self._alone_ms = 0.0 if objective.may_be_alone or len(nodes) == 1 else math.inf
        self._in_order = objective.is_order_fixed or len(nodes) > _MOST_IN_ANY_ORDER
        excess = excess_cost(spec, nodes, objective.context, num_sessions)
        self._forbidden = np.ones((len(nodes), spec.num_layers + 1, spec.num_layers + 1), bool)
        for start, end in combinations(range(spec.num_layers + 1), 2):
            self._forbidden[:, start, end] = [excess(i, start, end) > 0 for i in range(len(nodes))]

    def best(self) -> _Chain:
        """Return the best chain for the objective, or one without members if none fits."""
        if self._objective.goal != "throughput":
            return self._lowest_latency() if self._know(self._spec.step_rows) else _Chain()
        best, num_requests = _Chain(), self._objective.num_requests
        for lanes in range(1, num_requests + 1):
            steps = -(-num_requests // lanes)
            rows = steps * self._spec.step_rows
            is_new = lanes == 1 or steps < -(-num_requests // (lanes - 1))  # of equal frames the fewest are best
            if is_new and self._know(rows):
                best = self._shortest_round(rows, lanes, best)
        return best

    def _lowest_latency(self) -> _Chain:
        """Return the chain with the fastest prompts, then steps, among those whose latency is within the slack.

        Limits on stages are tightened one after the other, as long as a chain within the slack satisfies them.
        """
        rows = self._spec.step_rows
        step, prompt = self._frame(rows, rows), self._frame(PROMPT_ROWS if self._know(PROMPT_ROWS) else 1, 0)
        least = self._shortest(step.stages, step.hops, step.back)
        if not least.members:
            return least

        def within(prompt_ms: float, step_ms: float) -> _Chain:
            return self._shortest(
                [
                    np.where((fed <= prompt_ms) & (stage <= step_ms), stage, np.inf)
                    for stage, fed in zip(step.stages, prompt.stages, strict=True)
                ],
                np.where((prompt.occupied <= prompt_ms) & (step.occupied <= step_ms), step.hops, np.inf),
                step.back,
            )

        most = least.cost * LATENCY_SLACK
        prompts_ms, steps_ms = prompt.times / _CLEARLY, step.times / _CLEARLY
        prompt_ms = prompts_ms[_first(len(prompts_ms), lambda i: within(prompts_ms[i], math.inf).cost <= most)]
        step_ms = steps_ms[_first(len(steps_ms), lambda i: within(prompt_ms, steps_ms[i]).cost <= most)]
        return within(prompt_ms, step_ms)

    def _shortest_round(self, num_rows: int, lanes: int, known: _Chain) -> _Chain:
        """Return the chain that passes one frame of so many rows per lane soonest, or `known` if none is better.

        A round takes as long as one frame's way, or as the slowest part takes for all lanes. The lower the limit on
        every part, the longer the shortest way: the best chain is where the limit and the way meet. Where it is as good
        with fewer nodes, their way is longer.
        """
        frame = self._frame(num_rows, num_rows)

        def shortest(limit: float, enough: float = 0.0) -> _Chain:
            return self._shortest(
                [np.where(lanes * stage <= limit, stage, np.inf) for stage in frame.stages],
                np.where(lanes * frame.occupied <= limit, frame.hops, np.inf),
                frame.back,
                enough,
            )

        def rounded(chain: _Chain) -> _Chain:
            """Return the chain with the cost of a round in place of that of a frame."""
            computed = [frame.stages[i][part] for i, part in zip(chain.members, chain.parts, strict=True)]
            carried = [frame.occupied[pair] for pair in pairwise(chain.members)]
            return _Chain(max(chain.cost, lanes * max(computed + carried)), chain.members, chain.ends)

        if shortest(known.cost).cost < known.cost:
            limits = lanes * frame.times
            at = _first(len(limits), lambda i: shortest(limits[i]).cost <= limits[i])
            near = [shortest(limits[i]) for i in (at - 1, at) if 0 <= i < len(limits)]
            known = _least([known, *(rounded(chain) for chain in near if chain.members)])
        fewest = shortest(known.cost / _CLEARLY, known.cost)
        return _least([known, rounded(fewest)]) if fewest.members else known

    def _know(self, num_rows: int) -> bool:
        return all(speed.knows(num_rows) for speed in self._speeds)

    def _frame(self, num_rows: int, num_sampled: int) -> _Frame:
        """Return the times of a frame of so many rows, some of them sampled."""
        num_bytes = num_rows * self._spec.row_bytes
        stages = []
        for speed, forbidden in zip(self._speeds, self._forbidden, strict=True):
            up_to = np.array(speed.ms_up_to(self._spec, num_rows, num_sampled, self._objective.context))
            ms = up_to[None, :] - up_to[:, None]
            ms[forbidden] = np.inf
            stages.append(ms)
        hops = np.array([[link.ms(num_bytes) for link in row] for row in self._links])
        occupied = np.array([[link.occupied_ms(num_bytes) for link in row] for row in self._links])
        np.fill_diagonal(occupied, 0.0)
        back = np.array([row[0].ms(num_rows * self._spec.soft_row_bytes) for row in self._links])
        back[0] = self._alone_ms
        return _Frame(stages, hops, occupied, back)

    def _shortest(self, stages: Sequence[Floats], hops: Floats, back: Floats, enough: float = 0.0) -> _Chain:
        """Return the chain with the least sum, by dynamic programming over the nodes used, the last one and its end.

        If sums up to `enough` are possible, it is the shortest chain of the fewest nodes that have one.
        """
        num_nodes, num_ends = len(stages), len(stages[0])
        start = np.full((num_nodes, num_ends), np.inf)
        start[0] = stages[0][0]
        reached, steps = {1: start}, _Steps()
        for used, then_used, i in self._transitions(num_nodes):
            by_last = reached[used] + hops[:, i, None]
            sums = by_last.min(axis=0)[:, None] + stages[i]  # by start and end
            table = reached.setdefault(then_used, np.full((num_nodes, num_ends), np.inf))
            table[i] = sums.min(axis=0)
            steps[then_used, i] = used, by_last.argmin(axis=0), sums.argmin(axis=0)
        totals = {used: table[:, -1] + back for used, table in reached.items()}
        least = min(float(total.min()) for total in totals.values())
        if math.isinf(least):
            return _Chain()
        most = max(least, enough) / _CLEARLY
        good = [
            _Chain(float(total[i]), *_trace_back(steps, used, int(i), num_ends - 1))
            for used, total in totals.items()
            for i in np.flatnonzero(total <= most)
        ]
        fewest = min(len(chain.members) for chain in good)
        return _least([chain for chain in good if len(chain.members) == fewest])

    def _transitions(self, num_nodes: int) -> Iterator[tuple[int, int, int]]:
        """Yield sets of used nodes, as bits, before and after node i is added; each set is complete before its use.

        In the given order a set is only its size: any node may follow those before it.
        """
        if self._in_order:
            yield from ((count, count + 1, i) for i in range(1, num_nodes) for count in range(i, 0, -1))
            return
        for used in range(1, 1 << num_nodes, 2):
            yield from ((used, used | 1 << i, i) for i in range(1, num_nodes) if not used & 1 << i)


def _trace_back(steps: _Steps, used: int, i: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the members of a chain, and the ends of their layers."""
    members, ends = [i], [end]
    while members[0]:
        used, lasts, starts = steps[used, members[0]]
        ends.insert(0, int(starts[ends[0]]))
        members.insert(0, int(lasts[ends[0]]))
    return tuple(members), tuple(ends)


def _least(chains: Sequence[_Chain]) -> _Chain:
    """Return the cheapest chain; among those that differ only by rounding the one with the fewest, earliest nodes."""
    limit = min(chain.cost for chain in chains) / _CLEARLY
    return min((c for c in chains if c.cost <= limit), key=lambda c: (len(c.members), c.members, c.ends))


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """Return the first number below `count` that `holds`; all after it hold too."""
    return bisect_left(range(count), True, key=holds)
