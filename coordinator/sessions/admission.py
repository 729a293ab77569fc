"""Slots: the sessions' rows in the KV caches of all stages, and the memory that is reserved for them. Pure.

The memory reserved never exceeds a stage's budget. It grows with the answer, since most answers end long before their
limit. Where it ends, the newest sessions lose their slots and are replayed later, and the oldest goes on. The slot of
an ended session is kept as a prefix cache for later requests that begin alike, until a session needs its memory; the
least recently used goes first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count, repeat
from operator import add, sub

from coordinator.decoding.decode_options import LARGEST_WINDOW
from coordinator.sessions.cache_costs import Bytes, CacheCosts, make_room
from coordinator.sessions.session import Session
from coordinator.sessions.stored_prefixes import StoredPrefixes
from protos.brigade_pb2 import Opening, Piece
from worker.errors import ContextExceeded, QueueFull
from worker.memory.history import History
from worker.model.cache_spec import MOST_SNAPSHOTS
from worker.platform.text import counted, format_bytes

MOST_WAITING = 1024  # default limit of sessions that wait for memory
_MOST_KEPT = 64  # slots of ended sessions
GROWTH = 4 * LARGEST_WINDOW  # tokens of an answer for which memory is reserved at once
LOW = 2 * LARGEST_WINDOW  # tokens that are left when more is reserved: others can give way before it has to wait
_MIN_SHARED = 16  # tokens: copying fewer costs more than it saves


class SlotState(Enum):
    """How far a slot has come."""

    WAITING = "waiting"  # for memory; it has no number yet
    RESERVED = "reserved"  # it has a number and memory; no stage knows it yet
    TAKEN_OVER = "taken over"  # likewise, but the stages hold rows that were kept under its number
    OPEN = "open"  # the stages hold it
    KEPT = "kept"  # its session has ended; its rows serve as a prefix cache
    FREE = "free"  # its number may be used again


_NEXT = {
    SlotState.WAITING: (SlotState.RESERVED, SlotState.TAKEN_OVER, SlotState.FREE),
    SlotState.RESERVED: (SlotState.OPEN, SlotState.FREE),
    SlotState.TAKEN_OVER: (SlotState.OPEN, SlotState.KEPT, SlotState.FREE),
    SlotState.OPEN: (SlotState.KEPT, SlotState.FREE),
    SlotState.KEPT: (SlotState.FREE,),
    SlotState.FREE: (),
}
ACTIVE = (SlotState.RESERVED, SlotState.TAKEN_OVER, SlotState.OPEN)
ON_STAGES = (SlotState.TAKEN_OVER, SlotState.OPEN, SlotState.KEPT)


@dataclass(eq=False)
class SessionSlot:
    """One session's slot."""

    session: Session
    reserved: Bytes  # memory reserved for it now
    rows: int = 0  # of every cache, for which there is memory
    rows_before: int = 0  # that it holds until its first window, if it was taken over
    state: SlotState = SlotState.WAITING
    last_step: int = 0  # the last step that carried a window of it
    stores_no_more: bool = False  # no piece of it is to be written to disk any more
    has_result: bool = False  # all stages that make answers have taken a window of it

    @property
    def number(self) -> int:
        assert self.session.slot is not None, "a slot that waits has no number"
        return self.session.slot

    def enter(self, state: SlotState) -> None:
        """Change the state."""
        assert state in _NEXT[self.state], f"a slot that is {self.state.value} cannot become {state.value}"
        self.state = state


class Slots:
    """The slots of all sessions that the scheduler has accepted."""

    def __init__(
        self, costs: CacheCosts, max_waiting: int = MOST_WAITING, stored: StoredPrefixes | None = None
    ) -> None:
        """`stored` are the prefixes on the nodes' disks; None if none are written there."""
        self.max_waiting = max_waiting  # most sessions that wait for memory
        self.closed: list[int] = []  # slots for the stages to free with the next frame
        self._num_freed = 0  # of these, that the first node has freed
        self._closing: dict[int, list[int]] = {}  # by step: those that its frame frees, until its result has come
        self._costs = costs
        self._stored = stored
        # In the order of arrival. A kept slot moves to the end at each use, so the least recently used comes first.
        self._slots: dict[Session, SessionSlot] = {}

    def __contains__(self, session: Session) -> bool:
        return session in self._slots

    @property
    def active(self) -> list[SessionSlot]:
        """The slots of sessions that have memory and have not ended, by priority and in the order of arrival."""
        return _by_priority(slot for slot in list(self._slots.values()) if slot.state in ACTIVE)

    @property
    def num_waiting(self) -> int:
        return len(self._in(SlotState.WAITING))

    @property
    def num_kept(self) -> int:
        return len(self._in(SlotState.KEPT))

    @property
    def reserved(self) -> Bytes:
        """Reserved bytes by stage, with those of kept slots."""
        total: Bytes = (0,) * len(self._costs.budgets)
        for slot in list(self._slots.values()):
            total = tuple(map(add, total, slot.reserved))
        return total

    def most_rows(self, session: Session) -> int:
        """Return the longest caches, up to what the session may need, for which every stage has memory alone."""
        return self._costs.most_rows(session.request.cache, session.most_rows, self._num_snapshots(session))

    def add(self, session: Session, *, is_replayed: bool = False) -> None:
        """Accept a session. It waits until there is memory for it and earlier sessions have theirs.

        Args:
            is_replayed: an earlier chain had accepted it: it may wait whatever the number of others.
        Raises:
            ContextExceeded: a stage could not hold it even alone. QueueFull: too many sessions wait already.
        """
        needed = self._bytes_of(session, session.most_rows)
        for node, need, budget in zip(self._costs.nodes, needed, self._costs.budgets, strict=True):
            if need > budget:
                found = f"needs {format_bytes(need)} of cache on {node}, which has {format_bytes(budget)} for it"
                raise ContextExceeded("prompt", f"with its answer it {found}; shorten it or use an int8 cache")
        num_before = self.num_waiting
        slot = self._wait(session)
        self.admit()
        if slot.state is SlotState.WAITING and num_before >= self.max_waiting and not is_replayed:
            self._free(slot)
            found = counted(num_before, "request waits", "requests wait")
            raise QueueFull(f"there is no memory for it now, and {found} already; try again later")

    def adopt(self, before: "Slots", held: Mapping[int, History]) -> set[int]:
        """Keep the slots of another chain as prefixes, as far as its first stage holds all rows; return their numbers.

        Args:
            before: all slots of that chain; their sessions begin again, with these rows.
            held: the tokens of the slots that the first stage holds, by number.
        """
        for slot in [*before._in(SlotState.KEPT), *reversed(before.active)]:  # what gives way first comes first
            if num_held := before._num_held(slot, held):
                session = slot.session.remainder(num_held)
                reserved = self._bytes_of(slot.session, max(session.rows_written, len(held[slot.number])))
                self._slots[session] = SessionSlot(session, reserved, state=SlotState.KEPT, has_result=True)
        while min(self.unreserved) < 0:
            del self._slots[next(iter(self._slots))]
        return {slot.number for slot in self._slots.values()}

    def _num_held(self, slot: SessionSlot, held: Mapping[int, History]) -> int:
        """Return how many leading tokens of a slot's session the first stage holds, if it holds these tokens."""
        session, history = slot.session, held.get(slot.number)
        if history is None or len(history) > self._costs.rows_that_can_be_cut(session.request.cache):
            return 0
        # without a result it may hold what another chain left there
        most = session.settled if slot.has_result else min(session.settled, session.num_reused)
        shared = session.history.num_shared(history, most)
        return shared - shared % session.grid

    def with_room(self) -> list[SessionSlot]:
        """Return the active slots with memory for their next window, by priority and in the order of arrival.

        First reserve more for those that go on and have little left; a newer one never overtakes an older one.
        """
        active, waiting = self.active, _by_priority(self._in(SlotState.WAITING))
        if waiting and active and waiting[0].session.request.priority < active[-1].session.request.priority:
            self.admit()  # who gave way before may do so again by now
            active = self.active
        short = [slot for slot in active if slot.rows < slot.session.rows_for(LOW) and not slot.session.is_paused]
        if not short:
            return active
        for slot in short:
            if slot.state in ACTIVE and not self._grow(slot):
                break
        return [slot for slot in self.active if slot.rows >= slot.session.rows_for(LARGEST_WINDOW)]

    def open(self, slots: Sequence[SessionSlot]) -> list[Opening]:
        """Return the openings of the slots that no stage knows, for the frame that carries their first windows.

        Each begins as a copy of the slot, active or kept, that shares most of its prefix.
        """
        new = [slot for slot in slots if slot.state is not SlotState.OPEN]
        openings = [self._opening(slot) for slot in new]
        for slot in new:  # only now: a slot cannot be copied before the stages hold it
            slot.enter(SlotState.OPEN)
        return openings

    def num_shared(self, session: Session) -> int:
        """Return how many of the session's tokens a slot on the stages has, as it would be fed now."""
        source, shared = self._closest(session, [*self.active, *self._in(SlotState.KEPT)])
        pieces = self._stored.pieces_to_read(session, 0) if self._stored and not session.feeds_apart else []
        return max([shared if source else 0, *(piece.end for piece in pieces)])

    def next_snapshot(self, slot: SessionSlot, most_rows: int | None) -> int | None:
        """Return the length at which the slot's next prompt chunk should end for a snapshot, if there is memory for it.

        Args:
            most_rows: of the chunk; None for any number.
        """
        session, cuttable = slot.session, self._costs.rows_that_can_be_cut(slot.session.request.cache)
        # What cannot be cut reaches the node that makes the answer as a snapshot of the last chunk's end.
        last = session.end_apart if self._sends_snapshot(session) and session.end_apart > session.fed else None
        wanted = session.wanted_snapshot if session.num_prompt > cuttable else None
        length = min((each for each in (wanted, last) if each is not None), default=None)
        if length is None or (most_rows and length > session.fed + most_rows):
            return None
        if len(session.snapshots_with(length)) > self._num_snapshots(session):
            if self._num_snapshots_with_room(session):
                slot.reserved = tuple(map(add, slot.reserved, self._costs.snapshot_bytes(session.request.cache)))
            elif length == last:
                session.snapshots = ()  # there is memory for this one
            else:
                return None
        return length

    def _sends_snapshot(self, session: Session) -> bool:
        """Whether nodes send a snapshot at the end of its prompt, for which there is memory in any case."""
        cuttable = self._costs.rows_that_can_be_cut(session.request.cache)
        return session.feeds_apart and cuttable < self._costs.context

    def close(self, session: Session, *, keep: bool) -> None:
        """Free the session's slot, or keep it as a prefix cache if its rows are complete on every stage.

        A later frame finds the rows of a window in flight, except those read from disk or sent by other nodes.
        """
        slot = self._slots.get(session)
        if slot is None or (keep and slot.state is SlotState.KEPT):
            return
        keep = keep and session.held == session.fed and session.finish_reason != "error"
        if keep and slot.state is SlotState.OPEN:
            self._keep(slot)
        elif keep and slot.state is SlotState.TAKEN_OVER:
            slot.enter(SlotState.KEPT)  # with all its memory: no window has cut it yet
            self._use(slot)
        else:
            self._free(slot)
        self.admit()

    def forget_kept(self) -> None:
        """Free every kept slot."""
        for slot in self._in(SlotState.KEPT):
            self._free(slot)

    def next_store(self, *, of_running: bool = False) -> tuple[SessionSlot, Piece] | None:
        """Return a kept slot, or one `of_running` sessions, and the next piece of it that is not on the disks."""
        if self._stored is None:
            return None
        for slot in self._storable(of_running=of_running):
            if not slot.stores_no_more:
                if piece := self._stored.next_piece(slot.session):
                    return slot, piece
                slot.stores_no_more = True
        return None

    def stored_names(self, *, of_running: bool = False) -> set[bytes]:
        """Return the names of the pieces on the nodes' disks of kept slots, or of those `of_running` sessions."""
        stored, sessions = self._stored, [slot.session for slot in self._storable(of_running=of_running)]
        return {piece.name for each in sessions for piece in stored.pieces_of(each, each.fed)} if stored else set()

    def _storable(self, *, of_running: bool) -> list[SessionSlot]:
        if not of_running:
            return self._in(SlotState.KEPT)
        active = [slot for slot in self.active if slot.state is SlotState.OPEN]
        return [slot for slot in active if slot.session.request.pool_from is None]  # texts to embed are not kept either

    def note_stored(self, slot: SessionSlot, piece: Piece, *, is_written: bool) -> None:
        """Note whether all stages write a piece of this slot to their disks; if not, nothing more of it is written."""
        if self._stored and is_written:
            self._stored.add(piece)
        slot.stores_no_more |= not is_written

    def lose_stored(self, slot: SessionSlot) -> None:
        """Have a session begin again, since a stage has lost the piece that it was to read."""
        if self._stored:
            self._stored.forget(slot.session.reading)
        self._evict(slot)
        self.admit()

    def take_closed(self, step: int, *, stays: bool) -> list[int]:
        """Return the slots that the frame of this step frees. Their numbers are used again once its result has come.

        If it stays on the first node, it frees them only there, and the next one that does not names them again.
        """
        if stays:
            closed, self._num_freed = self.closed[self._num_freed :], len(self.closed)
            return closed
        closed, self.closed, self._num_freed = self.closed, [], 0
        if closed:
            self._closing[step] = closed
        return closed

    def note_passed(self, step: int) -> None:
        """Note that the frame of this step has passed all stages."""
        self._closing.pop(step, None)

    def _in(self, state: SlotState) -> list[SessionSlot]:
        return [slot for slot in list(self._slots.values()) if slot.state is state]

    def admit(self) -> None:
        """Reserve memory for waiting sessions, by priority and arrival; a large one is never overtaken."""
        for slot in _by_priority(self._in(SlotState.WAITING)):
            if not self._reserve(slot):
                return

    def _wait(self, session: Session) -> SessionSlot:
        """Have a session wait for memory, in its place in the order of arrival if it has one."""
        slot = self._slots[session] = SessionSlot(session, reserved=(0,) * len(self._costs.budgets))
        return slot

    def _bytes_of(self, session: Session, rows: int) -> Bytes:
        """Return the most that the session's caches of this many rows take, with its snapshots."""
        cache, count = session.request.cache, self._num_snapshots(session)
        snapshots = (count * size for size in self._costs.snapshot_bytes(cache)) if count else repeat(0)
        return tuple(map(add, self._costs.bytes_of(cache, rows), snapshots))

    def _num_snapshots(self, session: Session) -> int:
        """Return for how many snapshots of the session memory is reserved."""
        return max(1 if self._sends_snapshot(session) else 0, len(session.snapshots))

    def _num_snapshots_with_room(self, session: Session) -> int:
        """Return for how many more snapshots of the session there is memory, at most as many as it may have."""
        sizes = self._costs.snapshot_bytes(session.request.cache)
        # what its whole answer needs stays free
        left = map(sub, self._costs.budgets, self._bytes_of(session, session.most_rows))
        rooms = [min(at) // size for *at, size in zip(self.unreserved, left, sizes, strict=True) if size]
        return max(0, min([MOST_SNAPSHOTS, *rooms]))

    @property
    def unreserved(self) -> Bytes:
        """The memory of each stage's budget that is reserved for no session and no kept slot."""
        return tuple(map(sub, self._costs.budgets, self.reserved))

    def _grow(self, slot: SessionSlot) -> bool:
        """Reserve more memory for an active slot; return False if kept slots and newer sessions do not have as much."""
        rows = slot.session.rows_for(GROWTH)
        needed = self._bytes_of(slot.session, rows)
        newer = reversed(self.active[self.active.index(slot) + 1 :])
        evictable = [*self._in(SlotState.KEPT), *(other for other in newer if other.session.may_be_preempted)]
        more = tuple(max(0, need - had) for need, had in zip(needed, slot.reserved, strict=True))
        room = make_room(more, self.unreserved, [other.reserved for other in evictable])
        if room is None:
            return False
        slot.rows, slot.reserved = rows, tuple(map(max, needed, slot.reserved))
        if any([self._evict(evictable[place]) for place in room.evicted]):
            self.admit()  # it may have taken more memory than it needs
        return True

    def _evict(self, slot: SessionSlot) -> bool:
        """Free a slot; return whether it was active: then its session waits for another one."""
        if slot.state not in ACTIVE:
            self._free(slot)
            return False
        if slot.state in ON_STAGES:
            self.closed.append(slot.number)
        slot.enter(SlotState.FREE)
        slot.session.preempt()
        self._wait(slot.session)
        return True

    def _reserve(self, slot: SessionSlot) -> bool:
        """Give the slot a number and its memory; return False while there is not enough."""
        kept, session = self._in(SlotState.KEPT), slot.session
        source, shared = self._closest(session, kept)
        rows = session.rows_for(GROWTH)
        needed = self._bytes_of(session, rows)
        worse = (each for each in reversed(self.active) if each.session.request.priority > session.request.priority)
        evictable = [*kept, *(each for each in worse if each.session.may_be_preempted)]
        reserved = [each.reserved for each in evictable]
        own = kept.index(source) if source else None
        extends = source is not None and shared == source.session.fed
        fit = partial(make_room, needed, self.unreserved, source=own, extends=extends)
        room = fit(reserved[: len(kept)]) or fit(reserved)  # no session loses its slot while kept ones are enough
        if room is None:
            return False
        for place in room.evicted:
            self._evict(evictable[place])
        if source and room.takes_over:  # its rows beyond the shared ones stay until the first window cuts them
            del self._slots[source.session]
            source.enter(SlotState.FREE)
            session.take_slot(source.number, shared, source.session.snapshots)
            slot.reserved = tuple(map(max, needed, source.reserved))
            slot.rows_before = source.session.fed
            slot.enter(SlotState.TAKEN_OVER)
        else:
            used = {each.number for each in self._slots.values() if each.state is not SlotState.WAITING}
            used.update(self.closed, *self._closing.values())
            session.take_slot(next(number for number in count() if number not in used))
            slot.reserved = needed
            slot.enter(SlotState.RESERVED)
        slot.rows = rows
        if self._stored and not session.feeds_apart:
            session.to_read.extend(self._stored.pieces_to_read(session, session.fed))
        return True

    def _opening(self, slot: SessionSlot) -> Opening:
        session = slot.session
        request = session.request
        is_drafted = request.decode.kind == "draft"
        opening = Opening(slot=slot.number, sampling=request.sampling, cache=request.cache, drafted=is_drafted)
        if slot.state is SlotState.TAKEN_OVER:
            opening.fork_of = slot.number
        else:
            source, shared = self._closest(session, [*self.active, *self._in(SlotState.KEPT)])
            if source:
                opening.fork_of = source.number
                session.reuse(shared, source.session.snapshots)
                if source.state is SlotState.KEPT:
                    self._use(source)
        while session.to_read and session.to_read[0].end <= session.fed:
            session.to_read.popleft()
        cuttable = self._costs.rows_that_can_be_cut(request.cache)
        if session.to_read and session.to_read[0].begin < session.fed and cuttable < self._costs.context:
            session.to_read.clear()  # its piece begins where the rows in memory cannot be cut
        self._fit_snapshots(slot)
        opening.snapshots.extend(session.snapshots)
        return opening

    def _fit_snapshots(self, slot: SessionSlot) -> None:
        """Keep as many of the snapshots that a slot begins with, the latest, as there is memory for; reserve it."""
        session = slot.session
        lengths, session.snapshots = session.snapshots, ()
        slot.reserved = self._bytes_of(session, slot.rows)
        session.snapshots = lengths[max(0, len(lengths) - self._num_snapshots_with_room(session)) :]
        slot.reserved = self._bytes_of(session, slot.rows)

    def _keep(self, slot: SessionSlot) -> None:
        for kept in self._in(SlotState.KEPT):
            if self._is_covered(kept.session, slot.session):
                self._free(kept)
        slot.enter(SlotState.KEPT)
        slot.reserved = self._bytes_of(slot.session, slot.session.rows_written)
        self._use(slot)
        if self.num_kept > _MOST_KEPT:
            self._free(self._in(SlotState.KEPT)[0])

    def _use(self, slot: SessionSlot) -> None:
        """Make the slot the most recently used."""
        self._slots[slot.session] = self._slots.pop(slot.session)

    def _free(self, slot: SessionSlot) -> None:
        if slot.state in ON_STAGES:
            self.closed.append(slot.number)
        slot.enter(SlotState.FREE)
        del self._slots[slot.session]

    def _is_covered(self, kept: Session, session: Session) -> bool:
        """Return whether every request that could begin with the rows of `kept` can begin with those of `session`."""
        if not kept.may_share(session) or session.history.num_shared(kept.history, kept.fed) < kept.fed:
            return False
        if session.fed_apart < kept.fed_apart:
            return False
        cuttable = self._costs.rows_that_can_be_cut(session.request.cache)
        is_longer = kept.fed > cuttable and {kept.fed, *kept.snapshots} <= {session.fed, *session.snapshots}
        return session.fed <= cuttable or is_longer

    def _closest(self, session: Session, holders: Iterable[SessionSlot]) -> tuple[SessionSlot | None, int]:
        """Return the holder of most of the session's leading tokens, and how many of them can be reused."""
        best: SessionSlot | None = None
        most = _MIN_SHARED - 1
        for slot in holders:
            holder = slot.session
            if holder is session or not holder.may_share(session) or slot.state not in ON_STAGES:
                continue
            held = holder.fed_apart if session.feeds_apart else holder.held
            shared = session.history.num_shared(holder.history, min(held, session.most_reused))
            shared -= shared % session.grid
            rows = slot.rows_before if slot.state is SlotState.TAKEN_OVER else holder.fed
            if shared < rows > self._costs.rows_that_can_be_cut(holder.request.cache):
                session.branch = max(session.branch, shared)
                shared = max((length for length in holder.snapshots if length <= shared), default=0)
            if shared > most:
                best, most = slot, shared
        return best, most


def _by_priority(slots: Iterable[SessionSlot]) -> list[SessionSlot]:
    return sorted(slots, key=lambda slot: slot.session.request.priority)
