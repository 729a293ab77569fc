"""Which node holds which layers, and whether they fit. Pure: no MLX, no I/O."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate

from worker.errors import ConfigError
from worker.model.modelspec import ModelSpec
from worker.process.sizes import format_bytes

_Cost = Callable[[int, int, int], float]  # of node i holding layers [start, end)
_Best = tuple[float, tuple[int, ...]]  # combined cost and ends


@dataclass(frozen=True)
class Node:
    """A node that can hold layers, with the memory that it may use for weights and cache."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Assignment:
    """One node's shard, layers [start, end), what it takes, and the node's memory budget."""

    name: str
    start: int
    end: int
    weight_bytes: int
    cache_bytes: int
    memory_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    @property
    def missing_bytes(self) -> int:
        return max(0, self.needed_bytes - self.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


@dataclass(frozen=True)
class Plan:
    """One assignment per node in chain order, with what admission reserves for sessions of `context` tokens."""

    assignments: tuple[Assignment, ...]
    context: int
    num_sessions: int = 1

    @property
    def fits(self) -> bool:
        return all(assignment.fits for assignment in self.assignments)

    @property
    def layers(self) -> list[int]:
        return [assignment.end - assignment.start for assignment in self.assignments]


def plan(
    spec: ModelSpec, nodes: Sequence[Node], context: int, layers: Sequence[int] | None = None, num_sessions: int = 1
) -> Plan:
    """Give each node, in this order, a range of layers: as `layers` counts them, else the best split that fits.

    The best split has the smallest largest stage, by the weight bytes that a token reads: all but the embedding, of
    which it reads one row. The nodes' speeds are unknown here (fastest.py is for those that are known), so that stage
    bounds the throughput of a full pipe. Ties go to the smallest sum of squares, then to the fewest layers on the
    earliest nodes.
    If no split fits, the plan (with `fits` False) is the one whose worst node, then whose nodes in sum, exceed their
    budgets least, relative to the budget.

    Raises:
        ConfigError: more nodes than layers, a context below 1, or `layers` is no split of this model over these nodes.
    """
    assert nodes
    if context < 1:
        raise ConfigError(f"context: expected at least 1 token, found {context}")
    check_split(spec, len(nodes), layers)
    ends = _best_ends(spec, nodes, context, num_sessions) if layers is None else _ends(layers)
    starts = (0, *ends[:-1])
    return Plan(
        tuple(_assign(spec, *place, context, num_sessions) for place in zip(nodes, starts, ends, strict=True)),
        context,
        num_sessions,
    )


def check_split(spec: ModelSpec, num_nodes: int, layers: Sequence[int] | None) -> None:
    """Raise ConfigError unless the model can be split over so many nodes, as `layers` counts them if it is given."""
    if num_nodes > spec.num_layers:
        raise ConfigError(f"expected at most one node per layer, found {num_nodes} nodes for {spec.num_layers} layers")
    if layers is None:
        return
    found = f"found {','.join(map(str, layers)) or 'none'}"
    if len(layers) != num_nodes:
        raise ConfigError(f"layers: expected one number per node ({num_nodes}, coordinator first), {found}")
    if min(layers) < 1:
        raise ConfigError(f"layers: expected at least 1 layer on every node, {found}")
    if sum(layers) != spec.num_layers:
        raise ConfigError(f"layers: expected a sum of {spec.num_layers}, {spec.name}'s layers, {found} ({sum(layers)})")


def require_fit(plan: Plan, spec: ModelSpec) -> None:
    """Raise ConfigError with the whole plan as a table if a node's share exceeds its memory budget."""
    if plan.fits:
        return
    lacking = ", ".join(f"{a.name} lacks {format_bytes(a.missing_bytes)}" for a in plan.assignments if not a.fits)
    sessions = f"{plan.num_sessions} sessions of " if plan.num_sessions > 1 else ""
    raise ConfigError(
        f"{spec.name} with {sessions}{plan.context} tokens of context does not fit: {lacking}. "
        f"Use more nodes, fewer tokens (--context, of bench -p and -g) or a quantised model.\n{_table(plan)}"
    )


def _ends(layers: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(layers[: i + 1]) for i in range(len(layers)))


def _assign(spec: ModelSpec, node: Node, start: int, end: int, context: int, num_sessions: int) -> Assignment:
    weights, cached = spec.shard_bytes(start, end), num_sessions * spec.reserved_bytes(start, end, context)
    return Assignment(node.name, start, end, weights, cached, node.memory_bytes)


def _best_ends(spec: ModelSpec, nodes: Sequence[Node], context: int, num_sessions: int) -> tuple[int, ...]:
    """Each sweep minimises one thing among the splits that the sweep before it left."""
    shard_bytes = cache(spec.shard_bytes)
    caches = [num_sessions * spec.reserved_bytes(layer, layer + 1, context) for layer in range(spec.num_layers)]
    up_to = list(accumulate(caches, initial=0))
    sweep = partial(_sweep, len(nodes), spec.num_layers)

    def excess(i: int, start: int, end: int) -> float:
        """What is missing, as a fraction of the budget; exactly 0 if it fits."""
        needed, budget = shard_bytes(start, end) + up_to[end] - up_to[start], nodes[i].memory_bytes
        return max(0, needed - budget) / max(1, budget)

    def weight(i: int, start: int, end: int) -> float:
        read = shard_bytes(start, end) - (spec.embed_bytes if start == 0 else 0)
        return read if excess(i, start, end) == 0 else math.inf

    worst, _ = sweep(excess, max)
    if worst > 0:
        return sweep(_where(excess, excess, worst), operator.add)[1]
    largest, _ = sweep(weight, max)
    return sweep(_where(lambda *stage: weight(*stage) ** 2, weight, largest), operator.add)[1]


def _where(cost: _Cost, bounded: _Cost, limit: float) -> _Cost:
    """`cost` of the stages whose `bounded` is within the limit, infinity of the others."""
    return lambda *stage: cost(*stage) if bounded(*stage) <= limit else math.inf


def _sweep(num_nodes: int, num_layers: int, cost: _Cost, combine: Callable[[float, float], float]) -> _Best:
    """The split with the least combined cost, and of those the first in order, by dynamic programming from the end.

    `best[start]` is the cost and the ends of the best split of layers [start, num_layers) over nodes i, i+1, ...
    """
    best: dict[int, _Best] = {num_layers: (0, ())}
    for i in reversed(range(num_nodes)):
        starts = range(i, num_layers - (num_nodes - i) + 1) if i else range(1)
        best = {
            start: min(
                (combine(cost(i, start, end), value), (end, *ends))
                for end, (value, ends) in best.items()
                if end > start
            )
            for start in starts
        }
    return best[0]


def _table(plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [("node", "layers", "weights", "cache", "needed", "budget", "missing")]
    for a in plan.assignments:
        sizes = (a.weight_bytes, a.cache_bytes, a.needed_bytes, a.memory_bytes)
        missing = "-" if a.fits else format_bytes(a.missing_bytes)
        rows.append((a.name, f"[{a.start}, {a.end})", *(format_bytes(size) for size in sizes), missing))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
