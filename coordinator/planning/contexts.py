"""Contexts: how many tokens a plan keeps memory for, where that is left to it. Pure."""

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate

from coordinator.planning.plan import Node, Plan, plan
from worker.model.modelspec import ModelSpec

_GRAIN = 256  # tokens: caches grow by so many


@dataclass(frozen=True)
class Contexts:
    """As many tokens as there is memory for, but neither fewer nor more than these."""

    least: int
    most: int

    @classmethod
    def exactly(cls, context: int) -> "Contexts":
        """No other than this one."""
        return cls(context, context)


def plan_largest(
    spec: ModelSpec, nodes: Sequence[Node], contexts: Contexts, layers: Sequence[int] | None = None
) -> Plan:
    """The plan with the largest context that fits, to a few tokens; the one with the least where none does.

    Raises:
        ConfigError: as `plan` does.
    """
    of = partial(plan, spec, nodes, layers=layers)
    whole = of(contexts.most)
    if whole.fits or contexts.least >= contexts.most:
        return whole

    weights = cache(spec.shard_bytes)

    def exceeds(context: int) -> bool:
        fits = _some_split_fits(spec, nodes, context, weights) if layers is None else of(context).fits
        return not fits

    between = range(contexts.least, contexts.most, _GRAIN)
    num_fitting = bisect(between, False, key=exceeds)
    return of(between[max(0, num_fitting - 1)])


def _some_split_fits(spec: ModelSpec, nodes: Sequence[Node], context: int, weights: Callable[[int, int], int]) -> bool:
    """Whether the layers' end can be reached, node by node, with stages that fit."""
    caches = (spec.reserved_bytes(layer, layer + 1, context) for layer in range(spec.num_layers))
    up_to = list(accumulate(caches, initial=0))
    ends = {0}
    for num_after, node in zip(reversed(range(len(nodes))), nodes, strict=True):
        ends = {
            end
            for start in ends
            for end in range(start + 1, spec.num_layers - num_after + 1)
            if weights(start, end) + up_to[end] - up_to[start] <= node.memory_bytes
        }
    return spec.num_layers in ends
