"""Scheduler: sessions in, frames out; results in, commits out. No sockets, no clock, no MLX."""

from collections import deque

from coordinator.session import Session
from protos.brigade_pb2 import Cache, Frame, Result, Sample, Sampling
from protos.brigade_pb2 import Session as SessionOpening


class Scheduler:
    """Keeps up to `max_in_flight` frames on the chain, a window of one session each, in turn.

    A session with a prompt longer than a chunk has several frames in flight at once, so that all stages work on it.
    """

    def __init__(self, max_in_flight: int, chunk: int, epoch: int = 1) -> None:
        """`chunk` is the most rows of a prompt chunk; a window with a proposal is as long as its decoder makes it."""
        self._max_in_flight = max_in_flight
        self._chunk = chunk
        self._epoch = epoch
        self._step = 0
        self._turns: deque[Session] = deque()
        self._in_flight: dict[int, Session | None] = {}
        self._opened: list[SessionOpening] = []
        self._closed: list[int] = []
        self._free_slots: list[int] = []
        self._num_slots = 0

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    def open(self, session: Session, sampling: Sampling, cache: Cache | None = None) -> None:
        """Give the session a slot; its first frame opens it on every stage."""
        if not self._free_slots:
            self._free_slots.append(self._num_slots)
            self._num_slots += 1
        session.slot = self._free_slots.pop()
        self._opened.append(SessionOpening(slot=session.slot, sampling=sampling, cache=cache))
        self._turns.append(session)

    def close(self, session: Session) -> None:
        """Take the session off; the next frame frees its slot on every stage."""
        self._turns.remove(session)
        unsent = next((opening for opening in self._opened if opening.slot == session.slot), None)
        if unsent is None:
            self._closed.append(session.slot)
        else:
            self._opened.remove(unsent)  # no stage has heard of it
        self._free_slots.append(session.slot)

    def schedule(self) -> Frame | None:
        """The next frame to send, or None while nothing can be sent."""
        if len(self._in_flight) >= self._max_in_flight:
            return None
        session = next((session for session in self._turns if session.is_ready), None)
        if session is None and not self._closed:
            return None
        self._step += 1
        frame = Frame(epoch=self._epoch, step=self._step, closed=self._closed, opened=self._opened)
        self._closed, self._opened = [], []
        if session is not None:
            self._turns.remove(session)
            self._turns.append(session)
            frame.windows.append(session.next_window(self._chunk))
        self._in_flight[frame.step] = session
        return frame

    def commit(self, result: Result) -> list[tuple[Session, Sample]]:
        """Take a result in; returns the tokens that became known with the sessions that they belong to.

        The result of a session that has ended meanwhile is dropped: its slot may serve another one by now.
        """
        session = self._in_flight.pop(result.step)
        if session is None or session.finish_reason is not None:
            return []
        return [(session, sample) for sample in session.commit(result.samples, result.guesses)]
