"""Slots: which sessions hold cache on the stages, and which ended ones keep theirs for requests that begin alike. Pure.

The one authority over cache memory: what is promised never exceeds a stage's budget. A kept slot gives way to a
session that needs its memory; the least recently used goes first.
"""

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from operator import add, sub

from coordinator.planning.plan import Plan
from coordinator.sessions.session import Session
from coordinator.sessions.slot import ACTIVE, ON_STAGES, Bytes, SessionSlot, SlotState
from protos.brigade_pb2 import Cache
from protos.brigade_pb2 import Session as Opening
from worker.errors import ContextExceeded, QueueFull
from worker.model.modelspec import ModelSpec
from worker.platform.text import format_bytes

MOST_WAITING = 1024  # sessions that wait for memory, if nobody says otherwise
_MOST_KEPT = 64  # slots of ended sessions
_LEAST_SHARED = 16  # tokens: for fewer a copy is not worth its while


@dataclass(frozen=True)
class CacheCosts:
    """What the caches of one model take on the stages of one plan, and what they can do."""

    budgets: Bytes
    nodes: tuple[str, ...]
    bytes_of: Callable[[Cache, int], Bytes]  # the most that a cache of so many rows takes
    rows_that_can_be_cut: Callable[[Cache], int]  # a longer cache can only go on where it ends

    def most_rows(self, cache: Cache, at_most: int) -> int:
        """The longest such cache, up to this many rows, that every stage has memory for."""

        def exceeds(rows: int) -> bool:
            return any(need > budget for need, budget in zip(self.bytes_of(cache, rows), self.budgets, strict=True))

        return bisect(range(1, at_most + 1), False, key=exceeds) if exceeds(at_most) else at_most


def cache_costs(plan: Plan, spec: ModelSpec) -> CacheCosts:
    """Of this model on this plan: a node's budget is what its weights leave."""

    @lru_cache(4096)  # admission asks again and again for the same
    def bytes_by_kind(kind: bytes, rows: int) -> Bytes:
        suited = replace(spec, cache=Cache.FromString(kind))
        return tuple(suited.reserved_bytes(node.start, node.end, rows) for node in plan.assignments)

    def bytes_of(cache: Cache, rows: int) -> Bytes:
        return bytes_by_kind(cache.SerializeToString(deterministic=True), rows)

    return CacheCosts(
        budgets=tuple(max(0, node.memory_bytes - node.weight_bytes) for node in plan.assignments),
        nodes=tuple(node.name for node in plan.assignments),
        bytes_of=bytes_of,
        rows_that_can_be_cut=lambda cache: replace(spec, cache=cache).rows_that_can_be_cut,
    )


class Slots:
    """Every session that is taken in has a slot here: the record of its state and of the memory promised to it."""

    def __init__(self, costs: CacheCosts, max_waiting: int = MOST_WAITING) -> None:
        self.max_waiting = max_waiting  # sessions that wait for memory at most
        self.closed: list[int] = []  # slots that the stages have and are to free with the next frame
        self.num_hits = 0  # sessions that began with what another had fed
        self._costs = costs
        # In the order of arrival; a kept one moves to the end whenever it is used: the least recently used comes first.
        self._slots: dict[Session, SessionSlot] = {}

    def __contains__(self, session: Session) -> bool:
        return session in self._slots

    @property
    def active(self) -> list[SessionSlot]:
        """Of sessions that run or are about to, in the order of arrival."""
        return [slot for slot in self._slots.values() if slot.state in ACTIVE]

    @property
    def num_waiting(self) -> int:
        return len(self._in(SlotState.WAITING))

    @property
    def num_kept(self) -> int:
        return len(self._in(SlotState.KEPT))

    @property
    def promised(self) -> Bytes:
        """Bytes by stage, kept slots included."""
        total: Bytes = (0,) * len(self._costs.budgets)
        for slot in self._slots.values():
            total = tuple(map(add, total, slot.promised))
        return total

    def add(self, session: Session) -> None:
        """Take a session in. It waits until there is memory for all of it, and those before it have theirs.

        Raises:
            InputError: no stage could ever hold it. QueueFull: too many wait already.
        """
        needed = self._costs.bytes_of(session.request.cache, session.most_rows)
        self._check(needed)
        num_before = self.num_waiting
        slot = self._slots[session] = SessionSlot(session, needed, promised=(0,) * len(needed))
        self._admit()
        if slot.state is SlotState.WAITING and num_before >= self.max_waiting:
            self._free(slot)
            raise QueueFull(f"there is no memory for it now, and {num_before} requests wait already; try again later")

    def open(self, slots: Sequence[SessionSlot]) -> list[Opening]:
        """What opens those that no stage has heard of, with the frame that carries their first windows.

        Each begins as a copy of the slot that has most of its prefix by now, active or kept.
        """
        new = [slot for slot in slots if slot.state is not SlotState.OPEN]
        openings = [self._opening(slot) for slot in new]
        for slot in new:  # none is copied before it is there
            slot.enter(SlotState.OPEN)
            slot.promised = slot.needed
        if openings:
            self._admit()  # a slot that was taken over may have held more than its session needs
        return openings

    def close(self, session: Session, *, keep: bool) -> None:
        """Take the slot from a session that waits, runs or has ended, or keep it for its prefix.

        What no stage has computed, or not all of them, is not kept.
        """
        slot = self._slots.get(session)
        if slot is None or slot.state is SlotState.KEPT:
            return
        if keep and slot.state is SlotState.OPEN and session.finish_reason != "error":
            self._keep(slot)
        else:
            self._free(slot)
        self._admit()

    def forget_kept(self) -> None:
        """Free every kept slot."""
        for slot in self._in(SlotState.KEPT):
            self._free(slot)

    def _in(self, state: SlotState) -> list[SessionSlot]:
        return [slot for slot in self._slots.values() if slot.state is state]

    def _check(self, needed: Bytes) -> None:
        """Raise InputError for a session that could not even run alone."""
        for node, need, budget in zip(self._costs.nodes, needed, self._costs.budgets, strict=True):
            if need > budget:
                raise ContextExceeded(
                    "prompt",
                    f"with its answer it needs {format_bytes(need)} of cache on {node}, which has "
                    f"{format_bytes(budget)} for it; shorten it or use an int8 cache",
                )

    def _admit(self) -> None:
        """Promise memory to those who wait, in the order of arrival: nobody overtakes a large one."""
        for slot in self._in(SlotState.WAITING):
            if not self._promise(slot):
                return

    def _promise(self, slot: SessionSlot) -> bool:
        """Give the slot a number and its memory; False while there is no room."""
        kept, session = self._in(SlotState.KEPT), slot.session
        source, shared = self._closest(session, kept)
        free = tuple(map(sub, self._costs.budgets, self.promised))
        room = make_room(
            slot.needed,
            free,
            [each.promised for each in kept],
            kept.index(source) if source else None,
            goes_on=source is not None and shared == source.session.fed,
        )
        if room is None:
            return False
        for place in room.leaving:
            self._free(kept[place])
        if source and room.takes_over:
            self._take_over(slot, source, shared)
        else:
            session.take_slot(self._unused_number())
            slot.promised = slot.needed
            slot.enter(SlotState.PROMISED)
        return True

    def _take_over(self, slot: SessionSlot, source: SessionSlot, shared: int) -> None:
        """Its rows beyond what is shared are there until the session's first window cuts them."""
        del self._slots[source.session]
        slot.session.take_slot(source.number, shared)
        slot.promised = tuple(map(max, slot.needed, source.promised))
        slot.enter(SlotState.TAKEN_OVER)

    def _opening(self, slot: SessionSlot) -> Opening:
        session = slot.session
        opening = Opening(slot=slot.number, sampling=session.request.sampling, cache=session.request.cache)
        if slot.state is SlotState.TAKEN_OVER:
            opening.fork_of = slot.number
        else:
            source, shared = self._closest(session, [*self.active, *self._in(SlotState.KEPT)])
            if source:
                opening.fork_of = source.number
                session.reuse(shared)
                if source.state is SlotState.KEPT:
                    self._use(source)
        self.num_hits += opening.HasField("fork_of")
        return opening

    def _keep(self, slot: SessionSlot) -> None:
        for kept in self._in(SlotState.KEPT):
            if self._is_covered(kept.session, slot.session):
                self._free(kept)
        slot.enter(SlotState.KEPT)
        slot.promised = self._costs.bytes_of(slot.session.request.cache, slot.session.rows_written)
        self._use(slot)
        if self.num_kept > _MOST_KEPT:
            self._free(self._in(SlotState.KEPT)[0])

    def _use(self, slot: SessionSlot) -> None:
        self._slots[slot.session] = self._slots.pop(slot.session)

    def _free(self, slot: SessionSlot) -> None:
        if slot.state in ON_STAGES:
            self.closed.append(slot.number)
        slot.enter(SlotState.FREE)
        del self._slots[slot.session]

    def _unused_number(self) -> int:
        used = {slot.number for slot in self._slots.values() if slot.state is not SlotState.WAITING}
        return next(number for number in count() if number not in used)

    def _is_covered(self, kept: Session, session: Session) -> bool:
        """Whether whoever could go on from `kept` can go on from `session` just as well."""
        if kept.request.cache != session.request.cache or session.history.num_shared(kept.history, kept.fed) < kept.fed:
            return False
        return session.fed <= self._costs.rows_that_can_be_cut(session.request.cache) or kept.fed == session.fed

    def _closest(self, session: Session, holders: Iterable[SessionSlot]) -> tuple[SessionSlot | None, int]:
        """The holder of most of the session's leading tokens, and how many of them can be reused."""
        best: SessionSlot | None = None
        most = _LEAST_SHARED - 1
        for slot in holders:
            holder = slot.session
            if holder is session or holder.request.cache != session.request.cache or slot.state not in ON_STAGES:
                continue
            shared = session.history.num_shared(holder.history, min(holder.fed, session.most_reused))
            can_be_cut = holder.fed <= self._costs.rows_that_can_be_cut(holder.request.cache)
            if shared > most and (can_be_cut or shared == holder.fed):
                best, most = slot, shared
        return best, most


@dataclass(frozen=True)
class Room:
    """How a session gets its memory: kept slots that are freed for it, and whether it takes its source over."""

    leaving: tuple[int, ...] = ()  # by their place among the kept ones
    takes_over: bool = False


def make_room(
    needed: Bytes, free: Bytes, kept: Sequence[Bytes], source: int | None = None, *, goes_on: bool = False
) -> Room | None:
    """Free as few kept slots as needed, the least recently used first; None if even all of them are too few.

    Args:
        needed: bytes per stage for the session.
        free: bytes per stage that are not promised.
        kept: what each kept slot would give, the least recently used first.
        source: the one among them that the session begins as a copy of. It goes last, and then the session takes it
            over, rows and all.
        goes_on: the session continues it where it ends, and takes it over in any case.
    """
    others = [place for place in range(len(kept)) if place != source]
    choices = [Room(tuple(others[:count]), goes_on) for count in range(len(others) + 1)]
    if source is not None:
        choices.append(Room(tuple(others), takes_over=True))
    for room in choices:
        given = room.leaving if source is None or not room.takes_over else (*room.leaving, source)
        if _is_enough(needed, free, kept, given):
            return room
    return None


def _is_enough(needed: Bytes, free: Bytes, kept: Sequence[Bytes], given: Collection[int]) -> bool:
    return all(need <= free[stage] + sum(kept[place][stage] for place in given) for stage, need in enumerate(needed))
