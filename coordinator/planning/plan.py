"""Nodes, plans and objectives, and whether a split fits into memory. Pure: no MLX, no I/O."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

from worker.errors import ConfigError
from worker.model.model_spec import ModelSpec
from worker.platform.text import counted, format_bytes

# One request's tokens, many requests' tokens, their prompts, or latency first and then prompts.
Goal = Literal["latency", "throughput", "prompt", "auto"]
USUAL_REQUESTS = 8  # at once, for throughput, by default
PROMPTS = (2000, 16_000, 64_000)  # tokens of the prompts for which times are predicted


@dataclass(frozen=True)
class Objective:
    """The goal of a plan, the memory that it has to keep, and the choices that are fixed."""

    context: int  # tokens of each session that the plan keeps memory for at least
    max_context: int = 0  # tokens up to which that grows if memory is left
    num_sessions: int = 1
    goal: Goal = "latency"
    num_requests: int = USUAL_REQUESTS  # at once; for latency they only decide between equally good plans
    layers: Sequence[int] | None = None  # of each node, in the given order; None: planned
    is_order_fixed: bool = False
    may_be_alone: bool = True  # whether the first node may hold everything though there are others
    needs_all: bool = False  # whether every node is to hold layers, even if the smallest have no memory for any

    @property
    def requests_at_once(self) -> int:
        """The number of requests for which the goal is judged."""
        return self.num_requests if self.goal == "throughput" else 1


@dataclass(frozen=True)
class Node:
    """A node that can hold layers, with its memory budget for weights and caches."""

    name: str
    memory_bytes: int


class MemoryOffer(NamedTuple):
    """The memory of a node in bytes, as offered and as configured."""

    offered: int  # by the node itself
    configured: int | None  # by the configuration, where it takes precedence
    is_here: bool = False  # on the coordinator's machine


def budgets(coordinator: MemoryOffer, workers: Iterable[MemoryOffer]) -> Iterator[int]:
    """Yield each node's memory budget, the coordinator's first.

    Nodes of its machine share its offer equally, except for what some of them are configured to take.
    """
    nodes = [coordinator._replace(is_here=True), *workers]
    here = [node.configured for node in nodes if node.is_here]
    share = max(0, coordinator.offered - sum(filter(None, here))) // max(1, here.count(None))
    for node in nodes:
        yield node.configured or (share if node.is_here else node.offered)


@dataclass(frozen=True)
class Assignment:
    """One node's shard, layers [start, end), the memory that it takes, and the node's memory budget."""

    name: str
    start: int = 0
    end: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    memory_bytes: int = 0
    scratch_bytes: int = 0  # that a step takes beside them

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.scratch_bytes + self.cache_bytes

    @property
    def cache_budget_bytes(self) -> int:
        """The bytes that are left for caches."""
        return max(0, self.memory_bytes - self.weight_bytes - self.scratch_bytes)

    @property
    def missing_bytes(self) -> int:
        return max(0, self.needed_bytes - self.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


@dataclass(frozen=True)
class Plan:
    """Ranges of layers assigned to nodes, in chain order, with memory for sessions of `context` tokens."""

    assignments: tuple[Assignment, ...]
    context: int
    num_sessions: int = 1
    has_drafter: bool = False  # the node that samples holds one beside its layers
    # The first node holds all layers and makes answers alone: of prompts it computes the layers up to this one. Others
    # hold copies of layers and send it what these remember. None: every frame passes all nodes.
    prompt_end: int | None = None

    @property
    def prompt_parts(self) -> list[tuple[int, int]]:
        """The layers [start, end) that each node computes of a prompt."""
        ends = [assignment.end for assignment in self.assignments]
        ends[0] = self.prompt_end or ends[0]
        return list(zip([assignment.start for assignment in self.assignments], ends, strict=True))

    def within(self, budgets: Mapping[str, int]) -> "Plan":
        """Return the same split with these budgets, by node; other nodes keep theirs."""
        within = (replace(each, memory_bytes=budgets.get(each.name, each.memory_bytes)) for each in self.assignments)
        return replace(self, assignments=tuple(within))

    def spec_on(self, stage: int, spec: ModelSpec) -> ModelSpec:
        """Return the model for this stage: those that compute prompts only do not draft."""
        return spec if stage == 0 or self.prompt_end is None else spec.drafting_elsewhere()

    @property
    def fits(self) -> bool:
        return all(assignment.fits for assignment in self.assignments)

    @property
    def lacking(self) -> str:
        """Which nodes lack how much memory, for users; empty if it fits."""
        return ", ".join(f"{a.name} lacks {format_bytes(a.missing_bytes)}" for a in self.assignments if not a.fits)

    @property
    def layers(self) -> list[int]:
        return [end - start for start, end in self.prompt_parts]

    @property
    def names(self) -> list[str]:
        return [assignment.name for assignment in self.assignments]

    @property
    def answer_parts(self) -> list[tuple[int, int]]:
        """The layers [start, end) that each node computes of a frame that makes answers."""
        parts = [(assignment.start, assignment.end) for assignment in self.assignments]
        return parts if self.prompt_end is None else [parts[0], *((end, end) for _, end in parts[1:])]

    def __str__(self) -> str:
        return ", ".join(f"{each.name} [{each.start}, {each.end})" for each in self.assignments)


def assign(
    spec: ModelSpec,
    nodes: Sequence[Node],
    layers: Sequence[int],
    context: int,
    num_sessions: int,
    *,
    answers_alone: bool = False,
) -> Plan:
    """Return the plan that gives each node, in this order, so many layers, whether or not it fits.

    Args:
        answers_alone: the first one holds all layers and makes answers, and `layers` are those that compute prompts.
    """
    ends = list(accumulate(layers))
    held = [spec.num_layers, *ends[1:]] if answers_alone else ends
    others = spec.drafting_elsewhere() if answers_alone else spec
    assignments = (
        Assignment(
            node.name,
            start,
            end,
            own.shard_bytes(start, end),
            num_sessions * own.reserved_bytes(start, end, context),
            node.memory_bytes,
            own.scratch_bytes(end),
        )
        for node, start, end, own in zip(nodes, [0, *ends], held, [spec, *[others] * len(ends)], strict=False)
    )
    prompt_end = layers[0] if answers_alone else None
    return Plan(tuple(assignments), context, num_sessions, spec.drafter is not None, prompt_end)


def check_split(spec: ModelSpec, num_nodes: int, layers: Sequence[int] | None) -> None:
    """Raise ConfigError unless the model can be split over so many nodes, and as `layers` says if given."""
    if num_nodes > spec.num_layers:
        most = f"with the coordinator, {counted(spec.num_layers - 1, 'worker')} at most"
        found = f"found {num_nodes} nodes for {counted(spec.num_layers, 'layer')}"
        raise ConfigError(f"expected at most one node per layer, {found}: {most}")
    if layers is None:
        return
    found = f"found {','.join(map(str, layers)) or 'none'}"
    if len(layers) != num_nodes:
        raise ConfigError(f"layers: expected one number per node ({num_nodes}, coordinator first), {found}")
    if min(layers) < 1:
        raise ConfigError(f"layers: expected at least 1 layer on every node, {found}")
    if sum(layers) != spec.num_layers:
        raise ConfigError(f"layers: expected a sum of {spec.num_layers}, {spec.name}'s layers, {found} ({sum(layers)})")


def misfit(plan: Plan, spec: ModelSpec) -> str:
    """Say what nodes lack for a plan that does not fit, and what to do."""
    sessions = f"{plan.num_sessions} sessions of " if plan.num_sessions > 1 else ""
    others = ", or leave out --draft-model" if spec.drafter else ""
    return (
        f"{spec.name} with {sessions}{plan.context} tokens of context does not fit: {plan.lacking}. "
        f"Use more nodes, a quantised model, or a lower --context (of `brigade bench`: -p and -g){others}."
    )


def require_fit(plan: Plan, spec: ModelSpec) -> None:
    """Raise ConfigError with the whole plan as a table if a node's share exceeds its memory budget."""
    if plan.fits:
        return
    rows: list[tuple[str, ...]] = [("node", "layers", "weights", "cache", "scratch", "needed", "budget", "missing")]
    for a in plan.assignments:
        sizes = (a.weight_bytes, a.cache_bytes, a.scratch_bytes, a.needed_bytes, a.memory_bytes)
        missing = "-" if a.fits else format_bytes(a.missing_bytes)
        rows.append((a.name, f"[{a.start}, {a.end})", *map(format_bytes, sizes), missing))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
    raise ConfigError("\n".join([misfit(plan, spec), *table]))


def some_split_fits(spec: ModelSpec, nodes: Sequence[Node], context: int, num_sessions: int) -> bool:
    """Return whether any split over all these nodes, in this order, fits."""
    return best_split(len(nodes), spec.num_layers, excess_cost(spec, nodes, context, num_sessions))[0] == 0


def without_room(spec: ModelSpec, nodes: Sequence[Node], objective: Objective) -> list[str]:
    """Return the names of the nodes that have no memory for any layer."""
    excess = excess_cost(spec, nodes, objective.context, objective.num_sessions)
    layers = range(spec.num_layers)
    return [node.name for i, node in enumerate(nodes) if all(excess(i, layer, layer + 1) for layer in layers)]


def split_by_bytes(spec: ModelSpec, nodes: Sequence[Node], context: int, num_sessions: int) -> list[int]:
    """Return the layers of each node, in this order, of the best split that fits, as if nodes were equally fast.

    The best split minimises the largest stage, by the weight bytes that a token reads: all except the embedding, of
    which it reads one row. Ties go to the smallest sum of squares, then to the fewest layers on the earliest nodes.
    If no split fits, the best one minimises the excess over the budget, relative to it, of the worst node, then of
    all nodes together.
    """
    best, excess = partial(best_split, len(nodes), spec.num_layers), excess_cost(spec, nodes, context, num_sessions)

    def weight(i: int, start: int, end: int) -> float:
        return spec.token_bytes(start, end) if excess(i, start, end) == 0 else math.inf

    worst, _ = best(excess)
    if worst > 0:
        _, layers = best(_where(excess, excess, worst), operator.add)
    else:
        largest, _ = best(weight)
        _, layers = best(_where(lambda *stage: weight(*stage) ** 2, weight, largest), operator.add)
    return layers


_Cost = Callable[[int, int, int], float]  # of node i holding layers [start, end)


def excess_cost(spec: ModelSpec, nodes: Sequence[Node], context: int, num_sessions: int) -> _Cost:
    """Return the cost of the missing bytes as a fraction of the budget; exactly 0 if the stage fits."""
    caches = (num_sessions * spec.reserved_bytes(layer, layer + 1, context) for layer in range(spec.num_layers))
    up_to = list(accumulate(caches, initial=0))

    def excess(i: int, start: int, end: int) -> float:
        needed = spec.shard_bytes(start, end) + spec.scratch_bytes(end) + up_to[end] - up_to[start]
        budget = nodes[i].memory_bytes
        return max(0, needed - budget) / max(1, budget)

    return excess


def _where(cost: _Cost, bounded: _Cost, limit: float) -> _Cost:
    """Return `cost` restricted to stages whose `bounded` is within the limit; infinity for others."""
    return lambda *stage: cost(*stage) if bounded(*stage) <= limit else math.inf


def best_split(
    num_nodes: int, num_layers: int, cost: _Cost, combine: Callable[[float, float], float] = max
) -> tuple[float, list[int]]:
    """Return the least combined cost, by default that of the costliest stage, and the layers of each node.

    Of equally good splits the one with the fewest layers on the earliest nodes is taken. Dynamic programming from the
    end: `best[start]` is the best split of layers [start, num_layers) over nodes i, i+1...
    """
    best: dict[int, tuple[float, list[int]]] = {num_layers: (0, [])}
    for i in reversed(range(num_nodes)):
        starts = range(i, num_layers - (num_nodes - i) + 1) if i else range(1)
        best = {
            start: min(
                (combine(cost(i, start, end), value), [end - start, *layers])
                for end, (value, layers) in best.items()
                if end > start
            )
            for start in starts
        }
    return best[0]
