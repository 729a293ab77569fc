"""Session: one request's life: its tokens, how far the chain has been fed, and its one state. No I/O, no clock."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

from coordinator.decoding.decoders import Autoregressive, Decoder, Proposal
from coordinator.decoding.window import padded
from coordinator.sessions.output import Output, Scored, Token, Usage
from coordinator.sessions.request import Request
from coordinator.sessions.text import TextParser
from coordinator.sessions.waterfall import Leg, Passage, Route
from protos.brigade_pb2 import Sample, Score, Window
from worker.memory.history import History

MOST_UNREAD = 256  # outputs: then a session pauses until half of them are read
_LONGEST_PERIOD = 64  # tokens that a repeat may span


class SessionState(Enum):
    """How far a session has come."""

    WAITING = "waiting"  # for memory; no stage has heard of it
    RUNNING = "running"  # it has a slot
    REPLAYING = "replaying"  # its chain was lost; its tokens are fed anew until another one becomes known
    FINISHED = "finished"


_NEXT = {
    SessionState.WAITING: (SessionState.RUNNING, SessionState.FINISHED),
    SessionState.RUNNING: (SessionState.REPLAYING, SessionState.WAITING, SessionState.FINISHED),
    SessionState.REPLAYING: (SessionState.RUNNING, SessionState.FINISHED),
    SessionState.FINISHED: (),
}


class OutputQueue(Protocol):
    """What a reader takes outputs from, of one session or of several; an exception is the last thing of a session."""

    def put_nowait(self, item: "tuple[Session, Output | BaseException]") -> None: ...


class Session:
    """One sequence. Known tokens are fed in windows; the last window of what is known carries a decoder's proposal.

    Moments are nanoseconds on the coordinator's monotonic clock.
    """

    def __init__(
        self,
        request: Request,
        decoder: Decoder | None = None,
        *,
        max_tokens: int | None = None,
        chunk: int = 256,
        asked_chunk: int | None = None,
        outputs: OutputQueue | None = None,
        started: int = 0,
        is_traced: bool = False,
    ) -> None:
        """
        Args:
            decoder: what proposes more than one token per step; one token per step without it.
            max_tokens: as many as there is room for, at most the request's.
            chunk: the most rows of a prompt chunk; a window with a proposal is as long as its decoder makes it.
            asked_chunk: the rows of a prompt chunk that were asked for, if that was said.
            outputs: takes what becomes known.
            is_traced: keep the timing records of every frame.
        """
        self.request = request
        self.state = SessionState.WAITING
        self.finish_reason: str | None = None  # once it is finished
        self.slot: int | None = None  # its number on the stages, once it is promised one
        self.fed = 0  # leading known tokens that windows have carried so far
        self.num_reused = 0  # leading tokens that another session had fed already
        self.num_steps = 0  # windows that asked for tokens
        self.num_rows = 0  # of all windows
        self.num_rows_last = 1  # of the last window that asked for tokens
        self.rows_written = 0  # rows that the caches have had room for so far
        self.chunk = chunk
        self.asked_chunk = asked_chunk
        self.num_unread = 0  # outputs that the reader has not taken
        self.is_paused = False  # the reader is far behind
        self.begun = 0  # when its first frame was sent
        self.history = History(request.prompt)
        self._max_tokens = max(1, request.max_tokens if max_tokens is None else max_tokens)
        self._decoder = decoder or Autoregressive()
        self._proposal: Proposal | None = None  # sent and not answered
        # tokens before it need no score (any more)
        self._asked_scores = self._known_scores = request.score_from or len(request.prompt)
        self._new_scores: list[Scored] = []
        self._outputs = outputs
        self._started = started
        self._last_at = 0  # when the last output was put
        self._still_since = 0  # when its reader last saw it move, while its chain is lost
        self._still_ns = 0  # how long recoveries took, as its reader saw it
        self._num_recoveries = 0
        self._num_said = 0  # tokens that the reader has got
        self._legs: list[Leg] | None = [] if is_traced else None  # of each chain its frames
        if request.known.tokens or request.known.fills:  # as if they had become known, and then the chain was lost
            self.history.extend(token.token for token in request.known.tokens)
            self._decoder.restore([(at, token.to_sample()) for at, token in request.known.fills])

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        return self.history.tokens[self.num_prompt :]

    @property
    def num_generated(self) -> int:
        return len(self.history) - self.num_prompt

    @property
    def num_unfed(self) -> int:
        """Known tokens that no window has carried yet."""
        return len(self.history) - self.fed

    @property
    def is_prefilling(self) -> bool:
        """Whether there is more to feed than the window of one decoding step takes."""
        return self.num_unfed > 1 and self.num_unfed > self._decoder.tail

    @property
    def is_streaming(self) -> bool:
        """Whether a reader waits for the next token after another."""
        return self.num_generated > 0 and not self.is_prefilling

    @property
    def is_ready(self) -> bool:
        """Whether a window can be sent: a prompt's chunks follow each other, a proposal waits for its answer."""
        return self._proposal is None and not self.is_paused and self.state is not SessionState.FINISHED

    @property
    def most_rows(self) -> int:
        """Rows that every cache must have room for until the end."""
        return self.num_prompt + self._max_tokens + self._decoder.num_ahead

    @property
    def most_reused(self) -> int:
        """Leading tokens that need not be fed if another session has fed them: at least one row asks for something."""
        return min(len(self.history), self._known_scores) - 1

    @property
    def fills(self) -> list[tuple[int, Token]]:
        """Positions and tokens that are decided ahead of the known ones."""
        return [(at, Token.of(sample)) for at, sample in self._decoder.fills]

    def enter(self, state: SessionState) -> None:
        """The one way into another state."""
        assert state in _NEXT[self.state], f"a session that is {self.state.value} cannot become {state.value}"
        self.state = state

    def take_slot(self, number: int, num_reused: int = 0) -> None:
        """The session has memory on every stage, and the slot holds so many of its leading tokens already."""
        self.slot = number
        if self.state is SessionState.WAITING:
            self.enter(SessionState.RUNNING)
        self.reuse(num_reused)

    def reuse(self, num_tokens: int) -> None:
        """Begin after this many tokens: the slot holds them already. Leaves what `most_reused` says."""
        assert self.fed == 0 and num_tokens <= self.most_reused
        self.fed = self.num_reused = num_tokens

    def next_window(self, num_together: int = 1) -> Window:
        """The next known tokens, a chunk of them, or the last ones with the decoder's proposal.

        `num_together` sessions have a window in the same frame.
        """
        tokens, base = self.history.tokens, self.fed
        if chunk := self._num_chunk():
            self.fed += chunk
            window = self._window(base, tokens[base : self.fed])
            window.targets.extend(self._targets(self.fed + 1))
        else:
            self.fed = len(tokens)
            room = self._max_tokens - self.num_generated
            self._proposal = self._decoder.propose(tokens, len(tokens) - base, room, num_together)
            window = self._with_proposal(base, tokens[base:], self._proposal)
            window.targets.extend(self._targets(self.fed))
            self.num_steps += 1
            num_known = 1 if self._proposal.verifies else len(tokens) - base  # any more are the end of a prompt
            self.num_rows_last = num_known + len(self._proposal.drafts) + len(self._proposal.fills) + window.masks
        num_rows = len(window.tokens) + window.masks
        self.num_rows += num_rows
        self.rows_written = max(self.rows_written, base + num_rows)
        return window

    def _num_chunk(self) -> int:
        """Rows of the chunk that is next; 0 if all that is unfed goes with a proposal."""
        unfed = self.num_unfed
        if unfed <= 1:
            return 0  # the decoder need not be asked
        tail = self._decoder.tail
        chunk = min(unfed - (tail > 0), self.chunk)  # the last token goes with the proposal
        return chunk if unfed > (tail or chunk) else 0

    def _targets(self, end: int) -> list[int]:
        """The tokens before index `end` whose likelihood is asked for, and no window has asked yet."""
        begin, self._asked_scores = self._asked_scores, max(self._asked_scores, min(end, self.num_prompt))
        return self.history.tokens[begin : self._asked_scores]

    def _window(self, base: int, tokens: Sequence[int]) -> Window:
        assert self.slot is not None
        return Window(slot=self.slot, base=base, prefix_hash=self.history.prefix_hash(base), tokens=tokens)

    def _with_proposal(self, base: int, unfed: Sequence[int], proposal: Proposal) -> Window:
        window = self._window(base, [*unfed, *proposal.drafts, *(token for _, token in proposal.fills)])
        num_rows = len(window.tokens) + len(proposal.masks)
        window.wanted = 1 + len(proposal.drafts) if proposal.verifies else 0
        window.guessed = len(proposal.masks)
        window.masks = window.guessed + padded(num_rows) - num_rows if proposal.masks else 0
        if proposal.fills:
            fills = [at for at, _ in proposal.fills]
            padding = range(proposal.masks[-1] + 1, proposal.masks[-1] + 1 + window.masks - window.guessed)
            window.positions.extend([*range(base, base + len(unfed)), *fills, *proposal.masks, *padding])
        return window

    def commit(
        self, samples: Sequence[Sample], guesses: Sequence[Sample], scores: Sequence[Score] = ()
    ) -> list[Sample]:
        """Take the answer to the window sent last; returns what became known, up to the end of the sequence.

        The last token finishes the session. The answer to a prompt chunk is empty and changes nothing. One that comes
        after the end is dropped.
        """
        if self.state is SessionState.FINISHED:
            return []
        self._new_scores += map(Scored.of, scores)
        self._known_scores += len(scores)
        if not (samples or guesses):
            return []
        assert self._proposal is not None
        accepted = self._decoder.accept(self._proposal, samples, guesses)
        self._proposal = None
        self.fed += accepted.num_cached
        num_taken, reason = 0, ""
        for num_taken, sample in enumerate(accepted.samples, 1):  # noqa: B007 - used below
            self.history.extend([sample.token])
            if reason := self._end_reason(sample.token):
                break
        self.fed = min(self.fed, len(self.history))
        if reason:
            self.finish(reason)
        elif num_taken and self.state is SessionState.REPLAYING:
            self.enter(SessionState.RUNNING)
        return accepted.samples[:num_taken]

    def _end_reason(self, token: int) -> str:
        """Why this token is the last one; empty if it is not."""
        if token in self.request.eos and self.request.max_tokens:
            return "stop"
        if self.num_generated >= self._max_tokens:
            return "length"
        guard = self.request.repeat_guard
        return "stop" if guard and repeats(self.generated, guard) else ""

    def finish(self, reason: str = "stop") -> None:
        """End here. "error": a window could not be computed, and no two stages need hold the same of it."""
        self.enter(SessionState.FINISHED)
        self.finish_reason = reason

    def rewind(self) -> None:
        """Begin again on another chain: whatever is known is to be fed, as if it had just come as the prompt."""
        if self.state is SessionState.RUNNING:
            self.enter(SessionState.REPLAYING if self.num_rows else SessionState.WAITING)
        assert self.state is not SessionState.FINISHED
        self.slot = None
        self.fed = self.num_reused = self.rows_written = 0
        self._proposal = None
        self._asked_scores = self._known_scores
        self._decoder.rewind()

    @property
    def is_traced(self) -> bool:
        """Whether the timing records of its frames are kept."""
        return self._legs is not None

    def lose_chain(self, at: int) -> None:
        """The chain was lost at this moment, and with it the frames that are on their way."""
        self._num_recoveries += 1
        self._still_since = self._still_since or self._last_at or at

    def put_output(self, samples: Sequence[Sample], at: int) -> None:
        """Give the reader what a step made known, if that is anything."""
        scores, self._new_scores = self._new_scores, []
        if not samples and not scores and self.finish_reason is None:
            return
        if self._still_since:
            self._still_ns += at - self._still_since
        self._last_at, self._still_since = at, 0
        tokens = [*map(Token.of, samples)] if self.request.max_tokens else []  # 0: the one that is drawn is dropped
        counts = (self.num_steps, self.num_rows)
        self.put(Output("", tokens, at, self.finish_reason, None, self.fills, scores, *counts))

    def put(self, item: Output | BaseException) -> None:
        """Give the reader an output, or the error that is the last thing of this session."""
        if self._outputs is not None:
            self.num_unread += 1
            self._outputs.put_nowait((self, item))

    def pass_by(self, route: Route, passage: Passage) -> None:
        """Note a frame that carried a window of the session, if its frames are to be kept."""
        if self._legs is None:
            return
        if not self._legs or self._legs[-1].route is not route:
            self._legs.append(Leg(route, [], is_recovered=self._num_recoveries > 0))
        self._legs[-1].passages.append(passage)

    def read(self, output: Output, parser: TextParser) -> None:
        """Make the output of the text that it brings, in the reader's own task; the last one tells the usage.

        Raises ModelError if a token has no text.
        """
        self.num_unread -= 1
        parser.read(output, self.request.eos)
        self._num_said += len(output.tokens)
        if output.finish_reason is None:
            return
        legs = [replace(leg, passages=[p for p in leg.passages if p.returned <= output.at]) for leg in self._legs or ()]
        output.usage = Usage(
            self.num_prompt, self._started, self.num_reused, output.num_steps, output.num_rows, legs,
            self._num_recoveries, self._still_ns / 1e9, self._num_said, self.begun,
        )  # fmt: skip


def repeats(tokens: Sequence[int], times: int) -> bool:
    """Whether the tokens end in the same few of them, `times` times in a row."""
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) // times) + 1):
        tail = tokens[len(tokens) - period * times :]
        if all(tail[i] == tail[i % period] for i in range(len(tail))):
            return True
    return False
