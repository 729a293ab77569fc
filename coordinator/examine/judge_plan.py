"""Whether the model fits on the nodes, and on Macs that keep too much memory for others: what sets them right. Pure."""

import math
from collections.abc import Iterator, Sequence

from coordinator.examine.finding import Finding, Kind, mend, ok
from coordinator.examine.known import KnownNode
from coordinator.planning.budgets import Offer, budgets
from coordinator.planning.plan import Node, Plan, plan
from protos.brigade_pb2 import Facts
from worker.errors import ConfigError
from worker.model.modelspec import ModelSpec
from worker.process.sizes import format_bytes

_MIB = 2**20
_LEFT_TO_MACOS, _LEFT_SHARE = 4 * 2**30, 8  # of the memory, at least; one part in so many


def judge_plan(
    spec: ModelSpec, nodes: Sequence[KnownNode], context: int, layers: Sequence[int] | None
) -> Iterator[Finding]:
    """Of nodes that all could be asked. Speeds are not asked for: a plan by memory fits if any does."""
    own, *theirs = map(_offer, nodes)
    offers = [Node(node.name, memory) for node, memory in zip(nodes, budgets(own, theirs), strict=True)]
    try:
        found = plan(spec, offers, context, layers)
    except ConfigError as error:
        yield mend(Kind.PLAN, "all nodes", error.message, "correct `layers:` or the number of workers in cluster.yaml")
        return
    if found.fits:
        yield ok(Kind.MEMORY, "all nodes", f"{spec.name} fits, with {context:,} tokens of context")
        return
    raised = [
        now if _is_shared(node, nodes) else Node(now.name, max(now.memory_bytes, _most(node)))
        for node, now in zip(nodes, offers, strict=True)
    ]
    wider = plan(spec, raised, context, layers)
    if wider.fits:
        yield from _limits(wider, offers, nodes)
    else:
        yield _does_not_fit(spec, found, context)


def _offer(node: KnownNode) -> Offer:
    assert node.facts is not None
    return Offer(node.facts.budget_bytes, node.configured_bytes, node.is_here)


def _is_shared(node: KnownNode, nodes: Sequence[KnownNode]) -> bool:
    """Whether others of these nodes are on its machine."""
    return node.is_here or (node is nodes[0] and any(each.is_here for each in nodes))


def _most(node: KnownNode) -> int:
    """The same if its wired limit is raised as far as is sensible, where that is up to the user; 0 elsewhere."""
    facts = node.facts
    if facts is None or node.configured_bytes or not node.is_mac or not facts.working_set_bytes:
        return 0
    sensible = facts.memory_bytes - max(_LEFT_TO_MACOS, facts.memory_bytes // _LEFT_SHARE)
    return int(sensible * _offered(facts))


def _offered(facts: Facts) -> float:
    """Which part of what Metal recommends this node offers."""
    return min(1.0, facts.budget_bytes / facts.working_set_bytes)


def _limits(wider: Plan, offers: Sequence[Node], nodes: Sequence[KnownNode]) -> Iterator[Finding]:
    """For each Mac that has to offer more: the command that lets it."""
    for assignment, now, node in zip(wider.assignments, offers, nodes, strict=True):
        if assignment.needed_bytes > now.memory_bytes and node.facts is not None:
            limit = math.ceil(assignment.needed_bytes / _offered(node.facts) / _MIB)
            text = f"has to hold {format_bytes(assignment.needed_bytes)}, offers {format_bytes(now.memory_bytes)}"
            fix = f"there: sudo sysctl iogpu.wired_limit_mb={limit} (until it restarts), and start the worker again"
            yield mend(Kind.WIRED_LIMIT, node.name, text, fix)


def _does_not_fit(spec: ModelSpec, found: Plan, context: int) -> Finding:
    lacking = ", ".join(f"{a.name} lacks {format_bytes(a.missing_bytes)}" for a in found.assignments if not a.fits)
    return mend(
        Kind.MEMORY, "all nodes", f"{spec.name} with {context:,} tokens of context does not fit: {lacking}",
        "more nodes, a model of fewer bits, or fewer tokens (`context:`)",
    )  # fmt: skip
