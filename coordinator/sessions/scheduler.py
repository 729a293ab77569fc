"""Scheduler: sessions in, frames out; results in, commits out. No sockets, no clock, no MLX.

Two kinds of frames carry windows. A lane carries one decoding step for each of several sessions; several lanes with
equal shares of the sessions keep every stage busy. A prompt frame carries a chunk of a prompt, or several short
prompts. While a session is streaming, there is at most one prompt frame per stage in flight, so that a stream waits for
one chunk on each stage, or for two on the first: their number grows by one a round, or all of them would enter at
once. Otherwise there are enough of them to fill the pipe.

Background are the sessions with a worse priority than the best of those that run. They share one frame in so many, so
that few of the others' steps wait for them, and none more than once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

from coordinator.sessions.admission import MOST_WAITING, SessionSlot, Slots, SlotState
from coordinator.sessions.cache_costs import CacheCosts
from coordinator.sessions.session import Session, SessionState
from coordinator.sessions.stored_prefixes import StoredPrefixes
from protos.brigade_pb2 import Frame, Piece, Result, Sample, Store
from worker.compute.header import MOST_GRAMMAR
from worker.errors import FrameError, PrefixLost

Commit = tuple[Session, list[Sample]]
_BACKGROUND_EVERY = 32  # frames, for each stage: less than 5 % of the steps of a lane wait for one of the background


class _Kind(Enum):
    """What a frame carries."""

    LANE = "lane"
    PROMPT = "prompt"
    BACKGROUND = "background"  # a lane or a prompt of the background; one at most is in flight
    STORE = "store"  # a piece of a prefix for the stages' disks; likewise
    CLOSING = "closing"  # nothing but slots to free; likewise


@dataclass(frozen=True)
class _Sent:
    """A frame in flight."""

    kind: _Kind
    slots: Sequence[SessionSlot]
    piece: Piece | None = None  # that is stored


class Scheduler:
    """Chooses the sessions of the next frame."""

    def __init__(
        self,
        num_stages: int,
        costs: CacheCosts,
        epoch: int = 1,
        max_waiting: int = MOST_WAITING,
        lanes: Callable[[int, float], int] | None = None,
        chunk_rows: Callable[[Session, int, bool], int] | None = None,
        last_step: int = 0,
        most_lane_rows: int | None = None,
        answers_alone: bool = False,
        stored: StoredPrefixes | None = None,
    ) -> None:
        """
        Args:
            max_waiting: most sessions that wait for memory.
            lanes: (number of sessions, rows of each) -> number of lanes; None: one lane per stage.
            chunk_rows: (session, rows of all prompts to feed, whether others stream) -> most rows of the next prompt
                frame; None: the session's own.
            last_step: the last step that the chain has seen.
            answers_alone: only prompt frames pass all stages; the first one holds all layers.
            stored: the prefixes on the nodes' disks; None if none are written there.
            most_lane_rows: what the windows of a lane may have together; None: any number.
        """
        self.slots = Slots(costs, max_waiting, stored)
        self._num_stages = num_stages
        self._num_lanes = lanes or (lambda num_sessions, rows_each: num_stages)
        self._chunk_rows = chunk_rows or (lambda session, num_unfed, beside_streams: session.chunk or session.num_unfed)
        self._epoch = epoch
        self._most_lane_rows = most_lane_rows
        self._answers_alone = answers_alone
        self._in_flight: dict[int, _Sent] = {}  # by step
        self._background_at = last_step  # the last step of the background
        self._stored_at = last_step  # the last one that stored a piece
        self._retires = False
        self._step = last_step
        self._turn = 0  # prompt frames so far
        self._most_prompts = 1  # prompt frames in flight beside streams
        self._grew_at = last_step  # the last step sent before that number grew

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._in_flight

    def close(self, session: Session, *, keep: bool = False) -> None:
        """Remove a session in any state. The next frame frees its slot, unless it is kept as a prefix cache."""
        if session.state is not SessionState.FINISHED:
            session.finish()
        self.slots.close(session, keep=keep)

    def retire(self) -> None:
        """From now on only have stages write to disk what sessions need to go on elsewhere."""
        self._retires = True

    def schedule(self) -> Frame | None:
        """Return the next frame to send, or None while nothing can be sent."""
        return (None if self._retires else self._next_frame()) or self._next_store()

    def _next_frame(self) -> Frame | None:
        # Paused sessions count neither for lanes nor as streams.
        active = [slot for slot in self.slots.with_room() if not slot.session.is_paused]
        if not self.slots.closed and not any(slot.session.is_ready for slot in active):
            return None
        kind, chosen, chunk = self._choose(active)
        if kind is _Kind.CLOSING and (not self.slots.closed or self._num_in_flight(kind)):
            return None
        self._step += 1
        feeds_apart = all(slot.session.feeds_apart and slot.session.is_prefilling for slot in chosen)
        stays = self._answers_alone and not feeds_apart  # else the frame passes all nodes
        frame = Frame(epoch=self._epoch, step=self._step, stays=stays)
        # Open all slots before any window is made: a slot is copied in its state before this frame.
        frame.opened.extend(self.slots.open(chosen))
        for slot in chosen:
            is_chunk = slot.session.is_prefilling and not slot.session.to_read
            snapshot = self.slots.next_snapshot(slot, chunk) if is_chunk else None
            frame.windows.append(slot.session.next_window(len(chosen), chunk, snapshot))
            slot.last_step = self._step
        frame.closed.extend(self.slots.take_closed(frame.step, stays=stays))
        self._in_flight[frame.step] = _Sent(kind, chosen)
        if frame.opened:  # a slot that was taken over may have held more
            self.slots.admit()  # only now: a waiting session could take the slot of a session of this frame
        return frame

    def _choose(self, active: Sequence[SessionSlot]) -> tuple[_Kind, list[SessionSlot], int | None]:
        """Return the kind of the next frame, its sessions, and the most rows of its prompt chunks."""
        best = min((slot.session.request.priority for slot in active), default=0)
        others = [slot for slot in active if slot.session.request.priority > best]
        chosen, chunk = self._next_background(others)
        if chosen:
            return _Kind.BACKGROUND, chosen, chunk
        first = [slot for slot in active if slot.session.request.priority <= best] if others else active
        if lane := self._next_lane(first):
            return _Kind.LANE, lane, None
        chosen, chunk = self._next_prompts(first)
        return _Kind.PROMPT if chosen else _Kind.CLOSING, chosen, chunk

    def _next_store(self) -> Frame | None:
        """Return a frame that has all stages write a piece of a prefix to their disks, if one is due.

        It is due while nothing else is in flight, and beside other frames as rarely as the background.
        """
        is_due = self.is_idle or self._step - self._stored_at >= _BACKGROUND_EVERY * self._num_stages
        if not is_due or self._num_in_flight(_Kind.STORE):
            return None
        if (found := self.slots.next_store(of_running=self._retires)) is None:
            return None
        slot, piece = found
        self._step += 1
        self._stored_at = self._step
        self._in_flight[self._step] = _Sent(_Kind.STORE, [slot], piece)
        prefix_hash = slot.session.history.prefix_hash(piece.end)
        stores = [Store(slot=slot.number, piece=piece, prefix_hash=prefix_hash)]
        return Frame(epoch=self._epoch, step=self._step, stores=stores, stays=self._answers_alone)

    def commit(self, result: Result) -> list[Commit]:
        """Apply a result; return every session of its frame with the samples that became known.

        A session whose window failed on a stage ends here, with the reason "error". Results for sessions that have
        ended or lost their slots are dropped, since another session may use these by now; so is the result of a frame
        that an earlier scheduler of this epoch sent.

        Raises:
            FrameError: the result belongs to another epoch.
        """
        if result.epoch != self._epoch:
            raise FrameError(f"expected a result of epoch {self._epoch}, got epoch {result.epoch} (step {result.step})")
        sent = self._in_flight.get(result.step)
        if sent and sent.kind is _Kind.PROMPT and result.step > self._grew_at:
            self._most_prompts, self._grew_at = min(self._most_prompts + 1, self._num_stages), self._step
        elif not self._num_in_flight(_Kind.PROMPT):
            self._most_prompts = 1
        self.slots.note_passed(result.step)
        if sent is None:
            return []
        del self._in_flight[result.step]
        if sent.piece is not None:
            self.slots.note_stored(sent.slots[0], sent.piece, is_written=not result.failures)
            return []
        samples, guesses, scores = _by_slot(result.samples), _by_slot(result.guesses), _by_slot(result.scores)
        soft, pooled = _by_slot(result.soft), _by_slot(result.pooled)
        failed = {failure.slot: failure.kind for failure in result.failures}
        commits = []
        for slot in sent.slots:
            session = slot.session
            if slot.state is SlotState.KEPT and slot.number in failed:
                self.slots.close(session, keep=False)  # stages hold different rows
            if session.state is SessionState.FINISHED or slot.state is SlotState.FREE:
                continue
            number, slot.has_result = slot.number, True
            if session.reading and failed.get(number) == PrefixLost.__name__:
                self.slots.lose_stored(slot)
                continue
            if number in failed:
                session.finish("error")
            found = session.commit(samples[number], guesses[number], scores[number], soft[number], pooled[number])
            commits.append((session, found))
        return commits

    def _num_in_flight(self, kind: _Kind) -> int:
        return [sent.kind for sent in self._in_flight.values()].count(kind)

    def _next_background(self, others: Sequence[SessionSlot]) -> tuple[list[SessionSlot], int | None]:
        """Return a lane of the background or, in turns with it, a prompt and the rows of its chunk, if they are due."""
        is_due = self._step - self._background_at >= _BACKGROUND_EVERY * self._num_stages
        if not is_due or self._num_in_flight(_Kind.BACKGROUND):
            return [], None
        ready = sorted((slot for slot in others if slot.session.is_ready), key=lambda slot: slot.last_step)
        if not ready:
            return [], None
        self._background_at = self._step + 1
        first = ready[0]
        if first.session.is_prefilling:
            return [first], self._chunk_rows(first.session, first.session.num_unfed, True)
        return self._lane_of([slot for slot in ready if not slot.session.is_prefilling]), None

    def _next_lane(self, active: Sequence[SessionSlot]) -> list[SessionSlot]:
        """Return one lane's equal share of the decoding sessions: those that have waited longest, by their slots.

        A lane whose slots keep their order is the cheapest: stages hold the caches of slots side by side.
        """
        decoding = [slot for slot in active if not slot.session.is_prefilling]
        ready = [slot for slot in decoding if slot.session.is_ready]
        if not ready:
            return []
        rows_each = sum(slot.session.num_rows_last for slot in decoding) / len(decoding)
        num_lanes = self._num_lanes(len(decoding), rows_each)
        if self._num_in_flight(_Kind.LANE) >= num_lanes:
            return []
        ready.sort(key=lambda slot: slot.last_step)
        lane = ready[: -(-len(decoding) // num_lanes)]
        return self._lane_of(lane)

    def _lane_of(self, lane: list[SessionSlot]) -> list[SessionSlot]:
        """Return the first of these whose windows and grammars fit into a frame, by their slots."""
        sizes = accumulate(map(_grammar_size, lane))
        lane = lane[: max(1, sum(size <= MOST_GRAMMAR for size in sizes))]
        if self._most_lane_rows is not None:
            rows = accumulate(slot.session.longest_window for slot in lane)
            lane = lane[: max(1, sum(count <= self._most_lane_rows for count in rows))]
        return sorted(lane, key=lambda slot: slot.number)

    def _next_prompts(self, active: Sequence[SessionSlot]) -> tuple[list[SessionSlot], int]:
        """Return a prompt for its next chunk, other prompts that fit whole into the same frame, and the chunk's rows.

        The oldest prompt and the shortest take turns: no prompt starves, and a short one never waits for a long one.
        """
        beside_streams = any(slot.session.is_streaming for slot in active)
        # one on each stage, one that waits, and one whose caches are on their way back
        most = self._most_prompts if beside_streams else self._num_stages + 1 + self._answers_alone
        if self._num_in_flight(_Kind.PROMPT) >= most:
            return [], 0
        ready = [slot for slot in active if slot.session.is_prefilling and slot.session.is_ready]
        if not ready:
            return [], 0
        self._turn += 1
        first = ready[0] if self._turn % 2 else min(ready, key=lambda slot: slot.session.num_unfed)
        is_apart = first.session.feeds_apart
        ready = [slot for slot in ready if slot.session.feeds_apart == is_apart and not slot.session.to_read]
        num_unfed = sum(slot.session.num_unfed for slot in ready)
        chunk = self._chunk_rows(first.session, num_unfed, beside_streams)
        chosen, room = [first], 0 if first.session.to_read else chunk - first.session.num_unfed
        grammars = MOST_GRAMMAR - _grammar_size(first)  # they travel in the frame's first message
        for slot in ready:
            rows, size = slot.session.num_unfed, _grammar_size(slot)
            if slot is first or rows > room or size > grammars:
                continue
            if rows <= self._chunk_rows(slot.session, num_unfed, beside_streams):
                chosen.append(slot)
                room -= rows
                grammars -= size
        return chosen, chunk


def _grammar_size(slot: SessionSlot) -> int:
    """Return the characters of the grammar with which the slot is to be opened."""
    return 0 if slot.state is SlotState.OPEN else len(slot.session.request.sampling.grammar.text)


def _by_slot(samples: Iterable[Any]) -> defaultdict[int, list[Any]]:
    """Group what a result holds by slot."""
    found = defaultdict(list)
    for sample in samples:
        found[sample.slot].append(sample)
    return found
