"""Scheduler: sessions in, frames out; results in, commits out. No sockets, no clock, no MLX.

Two kinds of frames are in flight. A lane carries one decoding step each of several sessions; there are several lanes,
so that every stage has one to work on, and each has its equal part of the sessions. A prompt frame carries a chunk of
a prompt, or several short prompts. While anyone streams there is only one of them in flight, so no stream ever waits
for more than one chunk; while nobody does there are enough of them to fill the pipe.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

from coordinator.sessions.session import Session
from coordinator.sessions.slots import CacheCosts, Slots
from protos.brigade_pb2 import Frame, Result, Sample
from worker.errors import QueueFull

Commit = tuple[Session, list[Sample]]


class Scheduler:
    """Who goes with the next frame."""

    def __init__(
        self,
        num_stages: int,
        costs: CacheCosts,
        epoch: int = 1,
        max_waiting: int = 1024,
        lanes: Callable[[int, float], int] | None = None,
        last_step: int = 0,
    ) -> None:
        """`max_waiting` sessions wait for memory at most.

        `lanes` tells how many lanes a number of sessions, with so many rows each, should make; without it they make
        one per stage. `last_step` is the last that the chain has seen.
        """
        self.slots = Slots(costs)
        self._num_stages = num_stages
        self._num_lanes = lanes or (lambda num_sessions, rows_each: num_stages)
        self._epoch = epoch
        self._max_waiting = max_waiting
        self._waiting: deque[Session] = deque()
        self._active: dict[int, Session] = {}  # by slot, in the order of arrival
        self._unopened: set[int] = set()  # slots that no stage has heard of
        self._last_step: dict[int, int] = {}  # by slot, the last that carried a window of its session
        self._lanes: dict[int, list[Session]] = {}  # in flight, by step
        self._prompts: dict[int, list[Session]] = {}  # likewise; without sessions if the frame only closes slots
        self._step = last_step
        self._turn = 0  # prompt frames so far

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not (self._lanes or self._prompts)

    @property
    def num_waiting(self) -> int:
        """Sessions that have no slot yet."""
        return len(self._waiting)

    def submit(self, session: Session) -> None:
        """Take a session in. It starts once every stage has memory for all of it, in the order of arrival.

        Raises:
            InputError: no stage could ever hold it. QueueFull: too many wait already.
        """
        self.slots.check(session)
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait already; try again later")
        self._waiting.append(session)
        self._admit()

    def close(self, session: Session, *, keep: bool = False) -> None:
        """Take the session off, ended or not; the next frame frees its slot, unless it is kept for its prefix."""
        if session.finish_reason is None:
            session.stop()
        if self._active.get(session.slot) is session:
            del self._active[session.slot]
            self._unopened.discard(session.slot)
            self.slots.close(session, keep=keep)
        elif session in self._waiting:
            self._waiting.remove(session)
        self._admit()

    def schedule(self) -> Frame | None:
        """The next frame to send, or None while nothing can be sent."""
        sessions, in_flight = self._next_lane(), self._lanes
        if not sessions:
            sessions, in_flight = self._next_prompts(), self._prompts
        if not sessions and (not self.slots.closed or [] in self._prompts.values()):
            return None  # one frame at a time that only closes slots, however many close at once
        self._step += 1
        frame = Frame(epoch=self._epoch, step=self._step)
        # all before any window: a slot is copied as the frame before this one left it
        frame.opened.extend(self.slots.open([session for session in sessions if session.slot in self._unopened]))
        self._unopened.difference_update(session.slot for session in sessions)
        for session in sessions:
            frame.windows.append(session.next_window(len(sessions)))
            self._last_step[session.slot] = self._step
        frame.closed.extend(self.slots.closed)
        self.slots.closed.clear()
        in_flight[frame.step] = sessions
        return frame

    def commit(self, result: Result) -> list[Commit]:
        """Take a result in; returns every session of its frame with the tokens that became known.

        What belongs to a session that has ended meanwhile is dropped: its slot may serve another one by now. So is the
        result of a frame that an earlier scheduler sent.
        """
        sessions = (self._lanes if result.step in self._lanes else self._prompts).pop(result.step, [])
        samples, guesses = _by_slot(result.samples), _by_slot(result.guesses)
        return [
            (session, session.commit(samples[session.slot], guesses[session.slot]))
            for session in sessions
            if session.finish_reason is None
        ]

    def _admit(self) -> None:
        while self._waiting and self.slots.take(self._waiting[0]):
            session = self._waiting.popleft()
            self._active[session.slot] = session
            self._unopened.add(session.slot)
            self._last_step[session.slot] = 0

    def _next_lane(self) -> list[Session]:
        """Its equal part of those that decode, those that have waited longest first."""
        decoding = [session for session in self._active.values() if not session.is_prefilling]
        ready = [session for session in decoding if session.is_ready]
        if not ready:
            return []
        num_lanes = self._num_lanes(len(decoding), sum(session.num_rows_last for session in decoding) / len(decoding))
        if len(self._lanes) >= num_lanes:
            return []
        ready.sort(key=lambda session: self._last_step[session.slot])
        return ready[: -(-len(decoding) // num_lanes)]

    def _next_prompts(self) -> list[Session]:
        """One prompt's next chunk, and other prompts that fit beside it whole.

        The oldest prompt and the shortest take turns: no prompt starves, and a short one never waits for a long one.
        """
        most = 1 if any(session.is_streaming for session in self._active.values()) else self._num_stages + 1
        if sum(map(bool, self._prompts.values())) >= most:
            return []
        ready = [session for session in self._active.values() if session.is_prefilling and session.is_ready]
        if not ready:
            return []
        self._turn += 1
        first = ready[0] if self._turn % 2 else min(ready, key=lambda session: session.num_unfed)
        chosen, room = [first], first.chunk - first.num_unfed
        for session in ready:
            if session is not first and session.num_unfed <= room:
                chosen.append(session)
                room -= session.num_unfed
        return chosen


def _by_slot(samples: Iterable[Sample]) -> defaultdict[int, list[Sample]]:
    found = defaultdict(list)
    for sample in samples:
        found[sample.slot].append(sample)
    return found
