"""The memory that caches take on the stages of a plan, and which slots have to give way for more of them. Pure."""

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat

from coordinator.planning.plan import Plan
from protos.brigade_pb2 import Cache
from worker.model.model_spec import ModelSpec

Bytes = tuple[int, ...]  # one number per stage


@dataclass(frozen=True)
class CacheCosts:
    """The memory that caches of one model take on the stages of one plan, and where they can be cut."""

    budgets: Bytes
    nodes: tuple[str, ...]
    bytes_of: Callable[[Cache, int], Bytes]  # the most that a cache of this many rows takes
    rows_that_can_be_cut: Callable[[Cache], int]  # a longer cache can only be extended, or copied from a snapshot
    snapshot_bytes: Callable[[Cache], Bytes]  # the most that a snapshot takes
    context: int = 0  # the model's, tokens: caches that can be cut up to there can be cut anywhere

    def most_rows(self, cache: Cache, at_most: int, num_snapshots: int = 0) -> int:
        """Return the longest such cache, up to this many rows, that every stage has memory for beside its snapshots."""
        sizes = self.snapshot_bytes(cache) if num_snapshots else repeat(0)
        budgets = [budget - num_snapshots * size for budget, size in zip(self.budgets, sizes, strict=False)]

        def exceeds(rows: int) -> bool:
            return any(need > budget for need, budget in zip(self.bytes_of(cache, rows), budgets, strict=True))

        return bisect(range(1, at_most + 1), False, key=exceeds) if exceeds(at_most) else at_most


def cache_costs(plan: Plan, spec: ModelSpec) -> CacheCosts:
    """Return the costs of this model on this plan; a node's budget is the memory that its weights leave."""

    @lru_cache(64)
    def with_cache(kind: bytes) -> ModelSpec:
        return replace(spec, cache=Cache.FromString(kind))

    @lru_cache(4096)  # admission asks for the same sizes again and again
    def bytes_by_kind(kind: bytes, rows: int) -> Bytes:
        specs = (plan.spec_on(stage, with_cache(kind)) for stage in range(len(plan.assignments)))
        held = zip(specs, plan.assignments, strict=True)
        return tuple(own.reserved_bytes(node.start, node.end, rows) for own, node in held)

    def snapshot_bytes(cache: Cache) -> Bytes:
        model = with_cache(cache.SerializeToString(deterministic=True))
        return tuple(model.snapshot_bytes(node.start, node.end) for node in plan.assignments)

    return CacheCosts(
        budgets=tuple(node.cache_budget_bytes for node in plan.assignments),
        nodes=tuple(node.name for node in plan.assignments),
        bytes_of=lambda cache, rows: bytes_by_kind(cache.SerializeToString(deterministic=True), rows),
        rows_that_can_be_cut=lambda cache: with_cache(cache.SerializeToString(deterministic=True)).rows_that_can_be_cut,
        snapshot_bytes=snapshot_bytes,
        context=spec.context,
    )


@dataclass(frozen=True)
class Room:
    """How a session gets its memory: the slots that are evicted, and whether it takes its source over."""

    evicted: tuple[int, ...] = ()  # indices into the evictable ones
    takes_over: bool = False


def make_room(
    needed: Bytes, free: Bytes, evictable: Sequence[Bytes], source: int | None = None, *, extends: bool = False
) -> Room | None:
    """Evict as few slots as needed, in their order; None if all of them are not enough.

    Args:
        needed: bytes per stage for the session.
        free: bytes per stage that are not reserved.
        evictable: what evicting each slot frees: kept ones, the least recently used first, then those of sessions that
            give way.
        source: the kept slot whose prefix the session reuses. It goes last; then the session takes it over.
        extends: the session continues where its source ends, and takes it over in any case.
    """
    others = [place for place in range(len(evictable)) if place != source]
    own = [evictable[source]] if source is not None else []
    for num_evicted in range(len(others) + 1):
        given = [evictable[place] for place in others[:num_evicted]]
        if _is_enough(needed, free, *given, *(own if extends else [])):
            return Room(tuple(others[:num_evicted]), takes_over=extends)
    if own and _is_enough(needed, free, *given, *own):
        return Room(tuple(others), takes_over=True)
    return None


def _is_enough(needed: Bytes, *given: Bytes) -> bool:
    return all(need <= sum(parts) for need, *parts in zip(needed, *given, strict=True))
