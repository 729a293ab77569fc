"""Slots: which sessions hold cache on the stages, and which ended ones keep theirs for whoever begins alike. Pure.

The one authority over cache memory: what is promised never exceeds a stage's budget. A kept slot gives way to a
session that needs its memory; the least recently used goes first.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import le

from coordinator.planning.plan import Plan, format_bytes
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Cache
from protos.brigade_pb2 import Session as Opening
from worker.errors import InputError
from worker.model.modelspec import ModelSpec

_MOST_KEPT = 64  # slots of ended sessions
_LEAST_SHARED = 16  # tokens: for fewer a copy is not worth its while

Bytes = tuple[int, ...]  # a number per stage


@dataclass(frozen=True)
class CacheCosts:
    """What the caches of one model take on the stages of one plan, and what they can do."""

    budgets: Bytes
    nodes: tuple[str, ...]
    bytes_of: Callable[[Cache, int], Bytes]  # the most that a cache of so many rows takes
    rows_that_can_be_cut: Callable[[Cache], int]  # a longer cache can only go on where it ends


def cache_costs(plan: Plan, spec: ModelSpec) -> CacheCosts:
    """Of this model on this plan: a node's budget is what its weights leave."""

    def bytes_of(cache: Cache, rows: int) -> Bytes:
        suited = replace(spec, cache=cache)
        return tuple(suited.reserved_bytes(node.start, node.end, rows) for node in plan.assignments)

    return CacheCosts(
        budgets=tuple(max(0, node.memory_bytes - node.weight_bytes) for node in plan.assignments),
        nodes=tuple(node.name for node in plan.assignments),
        bytes_of=bytes_of,
        rows_that_can_be_cut=lambda cache: replace(spec, cache=cache).rows_that_can_be_cut,
    )


class Slots:
    """Slot numbers, the memory promised to them, and the prefixes that they keep."""

    def __init__(self, costs: CacheCosts) -> None:
        self.closed: list[int] = []  # slots that the stages have and are to free with the next frame
        self.num_hits = 0  # sessions that began with what another had fed
        self._costs = costs
        self._live: dict[int, Session] = {}
        self._kept: dict[int, Session] = {}  # least recently used first
        self._promised: dict[int, Bytes] = {}
        self._on_stages: set[int] = set()
        self._free: list[int] = []

    @property
    def promised(self) -> Bytes:
        """Bytes by stage, kept slots included."""
        return self._total(())

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def check(self, session: Session) -> None:
        """Raise InputError if the session could not even run alone."""
        needed = self._costs.bytes_of(session.cache, session.most_rows)
        for node, need, budget in zip(self._costs.nodes, needed, self._costs.budgets, strict=True):
            if need > budget:
                raise InputError(
                    "max_tokens",
                    f"with the prompt they need {format_bytes(need)} of cache on {node}, which has "
                    f"{format_bytes(budget)} for it; ask for fewer tokens or use an int8 cache",
                )

    def take(self, session: Session) -> bool:
        """Promise a slot to the session; False while there is no room.

        A kept slot that the session continues where it ends, or that would have to give way to it, becomes its own.
        """
        needed = self._costs.bytes_of(session.cache, session.most_rows)
        if not self._has_room(needed, without=self._kept):
            return False
        source, shared = self._closest(session, self._kept.values())
        givers = [slot for slot, kept in self._kept.items() if kept is not source]
        takes_over = source is not None and shared == source.fed
        while not self._has_room(needed, without=[source.slot] if source and takes_over else []):
            if givers:
                self._forget(givers.pop(0))
            else:
                takes_over = True
        if source and takes_over:
            del self._kept[source.slot]
            # its rows beyond what is shared are there until the session's first window cuts them
            needed = tuple(map(max, needed, self._promised[source.slot]))
            session.slot = source.slot
            session.reuse(shared)
        else:
            session.slot = self._free.pop() if self._free else len(self._promised)
        self._live[session.slot] = session
        self._promised[session.slot] = needed
        return True

    def open(self, sessions: Sequence[Session]) -> list[Opening]:
        """What opens the sessions' slots on the stages, with the frame that carries their first windows.

        Each begins as a copy of the slot that has most of its prefix by now, live or kept.
        """
        openings = [self._open(session) for session in sessions]
        self._on_stages.update(session.slot for session in sessions)  # none is copied before it is there
        return openings

    def _open(self, session: Session) -> Opening:
        opening = Opening(slot=session.slot, sampling=session.sampling, cache=session.cache)
        if session.num_reused:
            opening.fork_of = session.slot
        else:
            source, shared = self._closest(session, [*self._live.values(), *self._kept.values()])
            if source:
                opening.fork_of = source.slot
                session.reuse(shared)
                if source.slot in self._kept:
                    self._kept[source.slot] = self._kept.pop(source.slot)  # now the most recently used
        self.num_hits += opening.HasField("fork_of")
        self._promised[session.slot] = self._costs.bytes_of(session.cache, session.most_rows)
        return opening

    def close(self, session: Session, *, keep: bool) -> None:
        """Take the slot from an ended session, or keep it for its prefix."""
        del self._live[session.slot]
        if not keep:
            return self._forget(session.slot)
        for slot, kept in list(self._kept.items()):
            if self._is_covered(kept, session):
                self._forget(slot)
        self._kept[session.slot] = session
        self._promised[session.slot] = self._costs.bytes_of(session.cache, session.rows_kept)
        if len(self._kept) > _MOST_KEPT:
            self._forget(next(iter(self._kept)))

    def forget_kept(self) -> None:
        """Free every kept slot."""
        for slot in list(self._kept):
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        self._kept.pop(slot, None)
        del self._promised[slot]
        self._free.append(slot)
        if slot in self._on_stages:
            self._on_stages.remove(slot)
            self.closed.append(slot)

    def _is_covered(self, kept: Session, session: Session) -> bool:
        """Whether whoever could go on from `kept` can go on from `session` just as well."""
        if kept.cache != session.cache or session.history.num_shared(kept.history, kept.fed) < kept.fed:
            return False
        return session.fed <= self._costs.rows_that_can_be_cut(session.cache) or kept.fed == session.fed

    def _closest(self, session: Session, holders: Iterable[Session]) -> tuple[Session | None, int]:
        """The holder of most of the session's leading tokens, and how many of them can be reused."""
        best: Session | None = None
        most = _LEAST_SHARED - 1
        for holder in holders:
            if holder is session or holder.cache != session.cache or holder.slot not in self._on_stages:
                continue
            shared = session.history.num_shared(holder.history, min(holder.fed, len(session.history) - 1))
            can_be_cut = holder.fed <= self._costs.rows_that_can_be_cut(holder.cache)
            if shared > most and (can_be_cut or shared == holder.fed):
                best, most = holder, shared
        return best, most

    def _has_room(self, needed: Bytes, without: Collection[int]) -> bool:
        after = map(sum, zip(self._total(without), needed, strict=True))
        return all(map(le, after, self._costs.budgets))

    def _total(self, without: Collection[int]) -> Bytes:
        promises = [promise for slot, promise in self._promised.items() if slot not in without]
        return tuple(map(sum, zip(*promises, strict=True))) if promises else (0,) * len(self._costs.budgets)
