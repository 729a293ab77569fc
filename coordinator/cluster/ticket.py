"""Ticket: one request under way, and what became known of it on its way to whoever reads it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.sessions.answer import Piece, Scored, Token, Usage
from coordinator.sessions.request import Request
from coordinator.sessions.session import Session
from coordinator.sessions.text import Text
from coordinator.sessions.waterfall import Leg, Passage, Route
from protos.brigade_pb2 import Sample, Timing
from worker.errors import BrigadeError

MOST_UNREAD = 256  # steps: then the session pauses until half of them are read


@dataclass(frozen=True)
class Step:
    """What one step made known of a session, not read yet."""

    tokens: Sequence[Token]
    at: int  # nanoseconds on the coordinator's monotonic clock
    finish_reason: str | None
    num_steps: int  # of the session, up to this one
    num_rows: int
    fills: Sequence[tuple[int, Token]] = ()  # of the session, after this one
    scores: Sequence[Scored] = ()  # of the prompt


class Ticket:
    """A session, and its steps until they are read."""

    def __init__(self, session: Session, request: Request, chunk: int | None, *, traced: bool) -> None:
        """`chunk` is how many rows of a chunk were asked for, if that was said."""
        self.session = session
        self.request = request
        self.chunk = chunk
        self.deadline: asyncio.TimerHandle | None = None  # while the session waits for memory, or for its reader
        self._begun_at = 0  # nanoseconds
        self._num_recoveries = 0
        self._still_ns = 0  # how long recoveries took, as whoever reads saw it
        self._last_at = 0  # nanoseconds, monotonic, of the last step
        self._is_still = False
        self._num_said = 0  # tokens
        self._started = time.monotonic_ns()
        self._legs: list[Leg] | None = [] if traced else None
        self._steps: asyncio.Queue[Step | BaseException] = asyncio.Queue()

    @property
    def is_full(self) -> bool:
        return self._steps.qsize() >= MOST_UNREAD

    @property
    def is_read_again(self) -> bool:
        return self._steps.qsize() <= MOST_UNREAD // 2

    def begin(self, timings: Sequence[Timing]) -> None:
        """The session's first frame was sent when these begin."""
        if timings and not self._begun_at:
            self._begun_at = timings[0].received

    def end_deadline(self) -> None:
        """What was waited for has come."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def lose_chain(self) -> None:
        """The chain has gone, and with it the frames that are on their way."""
        self._num_recoveries += 1
        self._is_still = True
        self._last_at = self._last_at or time.monotonic_ns()

    def take(self, samples: Sequence[Sample], at: int) -> None:
        """Leave what a step made known of the session, at this moment, for whoever reads; if that is anything."""
        session = self.session
        scores = session.take_scores()
        if not samples and not scores and session.finish_reason is None:
            return
        if self._is_still:
            self._still_ns += at - self._last_at
        self._last_at, self._is_still = at, False
        known, counts = [*map(Token.of, samples)], (session.num_steps, session.num_rows)
        self._steps.put_nowait(Step(known, at, session.finish_reason, *counts, session.fills, scores))

    def pass_by(self, route: Route, make: Callable[[], Passage]) -> None:
        """Note a frame that carried a window of the session, if that was asked for."""
        if self._legs is None:
            return
        if not self._legs or self._legs[-1].route is not route:
            self._legs.append(Leg(route, [], is_recovered=self._num_recoveries > 0))
        self._legs[-1].passages.append(make())

    def fail(self, error: BaseException) -> None:
        """What is read next, after all that is known already."""
        self._steps.put_nowait(error.again() if isinstance(error, BrigadeError) else error)

    async def next_step(self) -> Step:
        """Raises what the request failed with."""
        step = await self._steps.get()
        if isinstance(step, BaseException):
            raise step
        return step

    def say(self, step: Step, text: Text) -> Piece:
        """The step as text, up to where a stop string ends it. Raises ModelError if a token has no text."""
        said, tokens = [], []
        for token in step.tokens:
            tokens.append(token)
            if token.token not in self.request.eos:  # the end-of-sequence token has no text
                said.append(text.push(token.token))
            if text.is_stopped:
                break  # the rest of the step lies behind the stop string
        self._num_said += len(tokens)
        if not text.is_stopped and step.finish_reason is None:
            return Piece("".join(said), tokens, step.at, fills=step.fills, scores=step.scores)
        said.append(text.finish())  # what was held back may be a stop string as well
        finish_reason = "stop" if text.is_stopped else step.finish_reason
        return Piece(
            "".join(said), tokens, step.at, finish_reason, self._usage(step), scores=step.scores, stop=text.stopped_by
        )

    def _usage(self, last: Step) -> Usage:
        legs = [replace(leg, passages=[p for p in leg.passages if p.returned <= last.at]) for leg in self._legs or ()]
        session = self.session
        return Usage(
            session.num_prompt, self._started, session.num_reused, last.num_steps, last.num_rows, legs,
            self._num_recoveries, self._still_ns / 1e9, self._num_said, self._begun_at,
        )  # fmt: skip
