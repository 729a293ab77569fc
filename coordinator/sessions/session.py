"""Session: the life of one request: its tokens, how many of them the chain was fed, and its state. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice

from coordinator.decoding.decoders import Decoder, Proposal, Verified
from coordinator.decoding.window_lengths import padded
from coordinator.sessions.output import NO_TOKENS, Output, Scored, Token, Usage
from coordinator.sessions.request import Request
from coordinator.sessions.text import TextParser
from coordinator.sessions.waterfall import Leg, Passage, Route
from protos.brigade_pb2 import Piece, Pooled, Sample, Score, Soft, Window
from worker.compute.header import MOST_UPCOMING
from worker.compute.header import num_rows as count_rows
from worker.memory.history import History
from worker.model.cache_spec import MOST_SNAPSHOTS

MOST_UNREAD = 256  # outputs; a session with more pauses until half of them are read
_LONGEST_PERIOD = 64  # tokens of a repeat
SNAPSHOT_EVERY = 4096  # tokens of a prompt
LEAST_SAVED = 256  # tokens: to feed fewer again costs less than a chunk that ends there
LEAST_PROGRESS = 64  # tokens that a session generates before it is preempted again


class SessionState(Enum):
    """How far a session has come."""

    WAITING = "waiting"  # for memory; no stage knows it
    RUNNING = "running"  # it has a slot
    REPLAYING = "replaying"  # its chain or slot was lost; its tokens are fed again until the next one becomes known
    FINISHED = "finished"


_NEXT = {
    SessionState.WAITING: (SessionState.RUNNING, SessionState.FINISHED),
    SessionState.RUNNING: (SessionState.REPLAYING, SessionState.WAITING, SessionState.FINISHED),
    SessionState.REPLAYING: (SessionState.RUNNING, SessionState.FINISHED),
    SessionState.FINISHED: (),
}


@dataclass
class Group:
    """The sessions that answer one call of the engine."""

    has_begun: bool = False  # a window of one of them was sent: the others wait for memory as long as it takes


class Session:
    """One sequence. Its known tokens are fed in windows; the last of these windows carries a decoder's proposal.

    Times are nanoseconds on the coordinator's monotonic clock.
    """

    def __init__(
        self,
        request: Request,
        decoder: Decoder | None = None,
        *,
        chunk: int | None = None,
        put: "Callable[[Session, Output | BaseException], object]" = lambda session, item: None,
        started: int = 0,
        is_traced: bool = False,
        owner: str = "",
        group: Group | None = None,
    ) -> None:
        """
        Args:
            decoder: proposes what a step computes beyond the known tokens; None: one token per step.
            chunk: rows of a prompt chunk that the caller asked for; the decoder decides the length of a window with a
                proposal.
            put: takes the outputs for the reader; an exception is the last of them.
            is_traced: keep the timing records of every frame.
            owner: a digest of its API key: no session of another one begins with its rows.
            group: the one that it belongs to; None: it is alone.
        """
        self.request = request
        self.owner = owner
        self.group = group or Group()
        self.max_tokens = max(1, request.max_tokens)
        self.chunk = chunk
        self._guard = RepeatGuard(len(request.prompt), request.repeat_guard) if request.repeat_guard else None
        # how far it has come
        self.state = SessionState.WAITING
        self.finish_reason: str | None = None  # once it is finished
        self.is_paused = False  # the reader is far behind
        self._preempted_at: int | None = None  # tokens that it had generated when it was preempted last
        # its tokens, and what the stages have of them
        self.history = History(request.prompt)
        self.slot: int | None = None  # its number on the stages, once it has one
        self.fed = 0  # leading known tokens that windows have carried so far
        self.rows_written = 0  # most rows that the caches have held so far
        self.num_reused = 0  # leading tokens that its slot held already
        self.num_reused_at_first = 0  # likewise when it began first: later they may be its own
        self.branch = 0  # the most tokens that it was found to share with another session
        # Lengths at which another slot can begin with its rows, beside the present one.
        self.snapshots: tuple[int, ...] = ()
        self.to_read: deque[Piece] = deque()  # pieces of its prefix on the nodes' disks, before other windows
        self.reading = b""  # the name of the piece whose window is in flight
        # Whether prompt chunks pass all nodes, and the last token goes with a proposal to the one that makes answers,
        # once that has the segments of all chunks.
        self.feeds_apart = False
        self._num_computed = 0  # leading tokens of chunks whose results have come
        self._computing: deque[int] = deque()  # ends of those whose results have not
        # its proposals
        self._decoder = decoder or Verified()
        self._proposal: Proposal | None = None  # sent and not answered
        self._proposed_at = 0  # tokens before its window
        self._soft: Soft | None = None  # what the last step made of the canvas that the next one continues
        # Indices of the first token without a requested score, and without a known one.
        self._asked_scores = self._known_scores = request.score_from or len(request.prompt)
        # Indices of the first row that is to be pooled and was not sent, and whose sum is not known.
        self._asked_rows = self._known_rows = len(request.prompt) if request.pool_from is None else request.pool_from
        # what its reader gets and has taken
        self._put = put
        self._new_scores: list[Scored] = []
        self._new_pooled: list[bytes] = []
        self._num_put = self.num_taken = 0  # outputs for the reader, each counted by one thread
        self._num_read = 0  # tokens that the reader has taken
        # what it took
        self._started = started
        self.begun = 0  # when its first frame was sent
        self.num_steps = 0  # windows that asked for tokens
        self.num_rows = 0  # of all windows
        self.num_rows_last = 1  # of the last window that asked for tokens
        self._num_tried: list[int] = []  # by place, the steps with a draft there
        self._num_held: list[int] = []  # and those in which it held
        self._last_at = 0  # when the last output was put
        self._still_since = 0  # while its chain is lost: when the reader got the last output
        self._still_ns = 0  # how long recoveries took, as the reader saw it
        self._num_recoveries = 0
        self._legs: list[Leg] | None = [] if is_traced else None  # its frames by chain

        self.history.extend(token.token for token in request.known.tokens)  # resume as after a lost chain
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
        """How many known tokens no window has carried yet."""
        return len(self.history) - self.fed

    @property
    def grid(self) -> int:
        """Tokens are fed in whole blocks of so many."""
        return self._decoder.grid

    @property
    def held(self) -> int:
        """Leading tokens whose rows the first node has, if it makes answers alone; else those that were fed."""
        if self.reading:
            return 0  # a stage may turn out to lack them
        return self.fed_apart if self._awaits_segments else self.fed

    @property
    def fed_apart(self) -> int:
        """Leading tokens of chunks that have passed all nodes, and whose segments the first node has."""
        return self._num_computed if self.feeds_apart else 0

    @property
    def _awaits_segments(self) -> bool:
        """Whether nodes still compute chunks whose segments the first node lacks."""
        return self.feeds_apart and bool(self._computing)

    @property
    def settled(self) -> int:
        """Leading tokens whose rows the first node has, even if it has not begun the proposal in flight."""
        return self._proposed_at if self._proposal else self.held

    @property
    def num_prompt_computed(self) -> int:
        """Leading tokens of the prompt that the nodes have computed, or had."""
        if self.num_generated:
            return self.num_prompt
        return max(self._num_computed, self.num_reused)

    @property
    def is_prefilling(self) -> bool:
        """Whether there are more tokens to feed than one decoding step takes."""
        return bool(self.to_read) or (self.num_unfed > 1 and self.num_unfed > self._tail)

    @property
    def _tail(self) -> int:
        """The most unfed tokens that go with a proposal; 0 if any number may."""
        return max(self.feeds_apart, self._decoder.tail)

    @property
    def is_streaming(self) -> bool:
        """Whether its reader has got a token and waits for the next one."""
        return self.num_generated > 0 and not self.is_prefilling

    @property
    def is_ready(self) -> bool:
        """Whether its next window can be sent. Prompt chunks need not wait for each other's result; a proposal does."""
        if self.reading:
            return False
        is_free = self._proposal is None and not self.is_paused and self.state is not SessionState.FINISHED
        return is_free and (self.is_prefilling or not self._awaits_segments)

    @property
    def num_unread(self) -> int:
        """Outputs that the reader has not taken yet."""
        return self._num_put - self.num_taken

    @property
    def most_rows(self) -> int:
        """Rows that every cache needs by the end of the session."""
        return self.num_prompt + self.max_tokens + self._decoder.num_ahead

    def rows_for(self, num_tokens: int) -> int:
        """Return the rows that every cache needs for so many further tokens."""
        return min(self.most_rows, len(self.history) + num_tokens + self._decoder.num_ahead)

    @property
    def may_be_preempted(self) -> bool:
        """Whether it may lose its slot now: a session that never progressed in between would never end.

        One that is paused makes no progress, and others would wait for its reader. One that is finished is about to
        give its slot up.
        """
        if self.state is SessionState.FINISHED:
            return False
        if self._preempted_at is None or self.is_paused:
            return True
        return self.num_generated - self._preempted_at >= LEAST_PROGRESS

    @property
    def longest_window(self) -> int:
        """About the most rows of a window with a proposal: a canvas, or MASK rows, and as many known tokens."""
        return max(1, 2 * self._decoder.num_ahead)

    @property
    def most_reused(self) -> int:
        """Most leading tokens to reuse from another session: the next window needs a row to sample, score or pool.

        If it `feeds_apart`, a chunk comes first, so that all nodes open its slot.
        """
        chunk = self._tail if self.feeds_apart else 0
        unknown = [self._known_scores] * (self._known_scores < self.num_prompt)
        unknown += [self._known_rows + 1] * (self._known_rows < self.num_prompt)
        return max(0, min([len(self.history), *unknown]) - 1 - chunk)

    @property
    def fills(self) -> list[tuple[int, Token]]:
        """The (position, token) pairs that are decided ahead of the known tokens."""
        return [(at, Token.of(sample)) for at, sample in self._decoder.fills]

    def enter(self, state: SessionState) -> None:
        """Change the state."""
        assert state in _NEXT[self.state], f"a session that is {self.state.value} cannot become {state.value}"
        self.state = state

    def may_share(self, other: "Session") -> bool:
        """Whether either may begin with rows of the other: even the time that this saves would tell who said what."""
        return self.request.cache == other.request.cache and self.owner == other.owner

    def take_slot(self, number: int, num_reused: int = 0, snapshots: Iterable[int] = ()) -> None:
        """Take a slot with memory on every stage that already holds `num_reused` leading tokens, and snapshots."""
        self.slot = number
        if self.state is SessionState.WAITING:
            self.enter(SessionState.RUNNING)
        self.reuse(num_reused, snapshots)

    def reuse(self, num_tokens: int, snapshots: Iterable[int] = ()) -> None:
        """Begin after this many tokens, at most `most_reused`: the slot holds them already, and snapshots."""
        assert self.fed == 0 and num_tokens <= self.most_reused
        self.fed = self.num_reused = num_tokens
        self._note_reused()
        self.snapshots = tuple(length for length in snapshots if length <= num_tokens)

    def _note_reused(self) -> None:
        """Note what it began with, unless it begins again."""
        if self.state is not SessionState.REPLAYING:
            self.num_reused_at_first = self.num_reused

    @property
    def end_apart(self) -> int:
        """The end of the last prompt chunk that passes all nodes; 0 if the session does not feed apart."""
        return len(self.history) - self._tail if self.feeds_apart else 0

    @property
    def wanted_snapshot(self) -> int | None:
        """The next length of the prompt of which a snapshot may spare later requests much; None if there is none."""
        least = max(self.fed + 1, LEAST_SAVED, *(length + LEAST_SAVED for length in self.snapshots[-1:]))
        every = range(SNAPSHOT_EVERY, self.num_prompt, SNAPSHOT_EVERY)
        lengths = (*self.request.turn_ends, self.branch, *every)
        return min((length for length in lengths if least <= length < self.num_prompt), default=None)

    def snapshots_with(self, length: int) -> tuple[int, ...]:
        """Return the snapshots to keep beside that of `length`, and this one: as many as a slot may have.

        Where these are too many, the one goes whose loss costs later requests least, and ends of turns last.
        """
        kept = [*self.snapshots, length]
        if len(kept) > MOST_SNAPSHOTS:
            others = [n for n, each in enumerate(kept[:-1]) if each not in self.request.turn_ends]
            costs = {n: kept[n] - (kept[n - 1] if n else 0) for n in others or range(len(kept) - 1)}
            del kept[min(costs, key=lambda n: costs[n])]
        return tuple(kept)

    def next_window(self, num_together: int = 1, most_rows: int | None = None, snapshot: int | None = None) -> Window:
        """Return the next chunk of known tokens, or the last of them with the decoder's proposal.

        Args:
            num_together: how many sessions have a window in the same frame.
            most_rows: of a prompt chunk; None: what the caller asked for, or all.
            snapshot: the length at which the chunk is to end and the stages make one, at most `most_rows` away.
        """
        if self.to_read:
            return self._piece_window(self.to_read.popleft())
        base = self.fed
        chunk = self._num_chunk(snapshot - base if snapshot else most_rows or self.chunk or self.num_unfed)
        window = self._chunk_window(chunk, snapshot) if chunk else self._proposal_window(num_together)
        window.pooled = self._num_pooled(base + len(window.tokens))
        num_rows = count_rows(window)
        self.num_rows += num_rows
        self.group.has_begun = True
        self.rows_written = max(self.rows_written, base + num_rows)
        return window

    def _piece_window(self, piece: Piece) -> Window:
        """Return the window whose rows every stage reads from its disk; no other one follows before its result."""
        window = self._window(piece.begin, self.history.tokens[piece.begin : piece.end])
        window.stored = self.reading = piece.name
        window.upcoming.extend(each.name for each in islice(self.to_read, MOST_UPCOMING))
        self.fed, self.rows_written = piece.end, max(self.rows_written, piece.end)
        return window

    def _chunk_window(self, num_tokens: int, snapshot: int | None) -> Window:
        """Return the window of a prompt chunk, for which nothing is sampled."""
        window = self._window(self.fed, self.history.tokens[self.fed : self.fed + num_tokens])
        self.fed += num_tokens
        self._computing.append(self.fed)
        window.targets.extend(self._targets(self.fed + 1))
        if snapshot:
            self.snapshots = self.snapshots_with(snapshot)
            window.snapshots.extend(self.snapshots)
        return window

    def _proposal_window(self, num_together: int) -> Window:
        """Return the window of all unfed tokens and what the decoder proposes after them."""
        tokens, base = self.history.tokens, self.fed
        room = self.max_tokens - self.num_generated
        proposal = self._decoder.propose(tokens, len(tokens) - base, room, num_together)
        window = self._with_proposal(base, tokens[base:], proposal)
        window.targets.extend(self._targets(len(tokens)))
        self._proposal, self._proposed_at = proposal, base
        self.fed = len(tokens) - proposal.num_fixed
        self.num_steps += 1
        num_known = 1 if proposal.verifies else len(window.tokens)  # any more are the end of a prompt
        self.num_rows_last = num_known + len(proposal.drafts) + window.masks + len(window.canvas)
        return window

    def _num_chunk(self, most_rows: int) -> int:
        """Return the rows of the next chunk; 0 if all unfed tokens fit in a window with a proposal."""
        unfed = self.num_unfed
        if unfed <= 1:
            return 0  # the decoder need not be asked
        tail = self._tail
        chunk = min(unfed - (tail > 0), most_rows)  # the last token goes with the proposal
        chunk = max(self.grid, chunk - chunk % self.grid)
        return chunk if unfed > (tail or chunk) else 0

    def _targets(self, end: int) -> list[int]:
        """Return the tokens before index `end` that are to be scored and have not been sent as targets yet."""
        begin, self._asked_scores = self._asked_scores, max(self._asked_scores, min(end, self.num_prompt))
        return self.history.tokens[begin : self._asked_scores]

    def _num_pooled(self, end: int) -> int:
        """Return how many of the rows before index `end` are to be pooled and have not been asked for yet."""
        begin, self._asked_rows = self._asked_rows, max(self._asked_rows, min(end, self.num_prompt))
        return self._asked_rows - begin

    def _window(self, base: int, tokens: Sequence[int]) -> Window:
        assert self.slot is not None
        return Window(slot=self.slot, base=base, prefix_hash=self.history.prefix_hash(base), tokens=tokens)

    def _with_proposal(self, base: int, unfed: Sequence[int], proposal: Proposal) -> Window:
        known = unfed[: len(unfed) - proposal.num_fixed]
        window = self._window(base, [*known, *proposal.drafts, *(token for _, token in proposal.fills)])
        if proposal.canvas:
            window.canvas.extend(proposal.canvas)
            window.canvas_first, window.guessed = proposal.guessed.start, len(proposal.guessed)
            window.canvas_step = proposal.step
            window.temperature, window.conditioning = proposal.temperature, proposal.conditioning
            if self._soft:
                window.soft.CopyFrom(self._soft)
            return window
        window.wanted = 1 + len(proposal.drafts) if proposal.verifies else 0
        window.guessed = len(proposal.masks)
        window.to_draft = proposal.to_draft
        num_rows = len(window.tokens) + len(proposal.masks)
        num_padding = padded(num_rows) - num_rows if proposal.masks else 0
        window.masks = window.guessed + num_padding
        if proposal.fills:
            fills, end = [at for at, _ in proposal.fills], proposal.masks[-1] + 1
            padding = range(end, end + num_padding)
            window.positions.extend([*range(base, base + len(unfed)), *fills, *proposal.masks, *padding])
        return window

    def commit(
        self,
        samples: Sequence[Sample],
        guesses: Sequence[Sample],
        scores: Sequence[Score] = (),
        soft: Sequence[Soft] = (),
        pooled: Sequence[Pooled] = (),
    ) -> list[Sample]:
        """Apply the result of the last window; return the samples that became known, up to the end of the sequence.

        The last token finishes the session. The result of a prompt chunk is empty and changes nothing. A result after
        the end is dropped.
        """
        if self.state is SessionState.FINISHED:
            return []
        self._new_scores += [Scored(Token.of(score), score.is_greedy) for score in scores]
        self._known_scores += len(scores)
        self._new_pooled += [each.sum for each in pooled]
        self._known_rows += sum(each.rows for each in pooled)
        if self.reading:
            self.reading, self.num_reused = b"", self.fed
            self._note_reused()
            return []
        if not (samples or guesses):
            if self._computing:
                self._num_computed = self._computing.popleft()
            return []
        assert self._proposal is not None
        accepted = self._decoder.accept(self._proposal, samples, guesses)
        self._soft = None if accepted.samples else next(iter(soft), None)
        self._count_drafts(len(self._proposal.drafts), accepted.num_cached)
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

    def _count_drafts(self, num_drafts: int, num_held: int) -> None:
        """Count a step's drafts by place, and those that held, which are the first ones."""
        missing = [0] * (num_drafts - len(self._num_tried))
        self._num_tried += missing
        self._num_held += missing
        for place in range(num_drafts):
            self._num_tried[place] += 1
            self._num_held[place] += place < num_held

    def _end_reason(self, token: int) -> str:
        """Return why this token is the last one; empty if it is not."""
        if token in self.request.eos and self.request.max_tokens:
            return "stop"
        if self.num_generated >= self.max_tokens:
            return "length"
        return "stop" if self._guard and self._guard.note(self.history.tokens) else ""

    def finish(self, reason: str = "stop") -> None:
        """End the session. After "error" the stages may hold different rows, so its slot cannot be reused."""
        self.enter(SessionState.FINISHED)
        self.finish_reason = reason
        self._soft = None  # a kept slot never uses it

    def remainder(self, num_tokens: int) -> "Session":
        """Return an ended session that holds this one's slot with its first tokens, for others to begin with."""
        other = Session(replace(self.request, known=NO_TOKENS), owner=self.owner)
        other.history, other.slot = self.history.fork(num_tokens), self.slot
        other.fed, other.rows_written = num_tokens, self.rows_written
        other.state = SessionState.FINISHED
        return other

    def rewind(self, decoder: Decoder | None = None) -> None:
        """Begin again in another slot or chain: all known tokens are fed again, as if they were the prompt.

        Args:
            decoder: takes over from the present one, which chooses by the costs of the last chain; None keeps that.
        """
        if self.state is SessionState.RUNNING:
            self.enter(SessionState.REPLAYING if self.num_rows else SessionState.WAITING)
        assert self.state is not SessionState.FINISHED
        self.slot = None
        self.fed = self.num_reused = self.rows_written = self._num_computed = 0
        self._computing.clear()
        self.to_read.clear()
        self.reading = b""
        self.snapshots = ()
        self._soft = None
        self._proposal = None
        self._asked_scores = self._known_scores
        self._asked_rows = self._known_rows
        self._decoder.rewind()
        if decoder:
            decoder.restore(self._decoder.fills)
            self._decoder = decoder

    def preempt(self) -> None:
        """Give up the slot; once there is memory again, all known tokens are fed again."""
        self.rewind()
        self._preempted_at = self.num_generated

    @property
    def is_traced(self) -> bool:
        """Whether the timing records of its frames are kept."""
        return self._legs is not None

    def lose_chain(self, at: int, *, is_return: bool = False) -> None:
        """Note that the chain and the frames in flight were lost at this time, or were given up for a returned node."""
        self._num_recoveries += not is_return
        self._still_since = self._still_since or self._last_at or at

    def put_output(self, samples: Sequence[Sample], at: int) -> None:
        """Give the reader the output of a step, unless the step yielded nothing."""
        scores, self._new_scores = self._new_scores, []
        pooled, self._new_pooled = self._new_pooled, []
        if not (samples or scores or pooled) and self.finish_reason is None:
            return
        if self._still_since:
            self._still_ns += at - self._still_since
        self._last_at, self._still_since = at, 0
        tokens = [*map(Token.of, samples)] if self.request.max_tokens else []  # 0: drop the sampled one
        counts = (self.num_steps, self.num_rows)
        self.put(Output("", tokens, at, self.finish_reason, None, self.fills, scores, *counts, pooled=pooled))

    def put(self, item: Output | BaseException) -> None:
        """Give the reader an output, or the error that ends this session."""
        self._num_put += 1
        self._put(self, item)

    def add_passage(self, route: Route, passage: Passage) -> None:
        """Record a frame that carried a window of the session, if the session is traced."""
        if self._legs is None:
            return
        if not self._legs or self._legs[-1].route is not route:
            self._legs.append(Leg(route, [], is_recovered=self._num_recoveries > 0))
        self._legs[-1].passages.append(passage)

    def read(self, output: Output, parser: TextParser) -> None:
        """Add the text of an output, and the usage to the last one. Runs in the reader's own task.

        Raises:
            ModelError: a token has no text.
        """
        self.num_taken += 1
        parser.read(output, self.request.eos)
        self._num_read += len(output.tokens)
        if output.finish_reason is None:
            return
        legs = [replace(leg, passages=[p for p in leg.passages if p.returned <= output.at]) for leg in self._legs or ()]
        output.usage = replace(self.usage(), num_steps=output.num_steps, num_rows=output.num_rows, legs=legs)

    def usage(self) -> Usage:
        """Return the cost so far, without the legs."""
        num_reused = min(self.num_reused_at_first, self.num_prompt)  # those of a journal may be among them
        num_held = tuple(self._num_held)  # copied first, since another thread lengthens these lists
        return Usage(
            self.num_prompt, self._started, num_reused, self.num_steps, self.num_rows, (),
            self._num_recoveries, self._still_ns / 1e9, self._num_read, self.begun,
            tuple(self._num_tried[: len(num_held)]), num_held,
        )  # fmt: skip


class RepeatGuard:
    """Finds that a text ends with a sequence of at most 64 tokens repeated `times` times. Takes 64 steps per token."""

    def __init__(self, begin: int, times: int) -> None:
        """`begin` is the index at which the text begins."""
        self._end, self._begin, self._times = begin, begin, times
        self._runs = [0] * _LONGEST_PERIOD  # by period - 1: the last tokens that equal those of a period before

    def note(self, tokens: Sequence[int]) -> bool:
        """Read the tokens that were added since the last call; return whether the last of them ends such a repeat."""
        found = False
        for end in range(max(self._end, len(tokens) - _LONGEST_PERIOD * self._times), len(tokens)):  # no more matter
            found = False
            for period in range(1, min(_LONGEST_PERIOD, end - self._begin) + 1):
                run = self._runs[period - 1] + 1 if tokens[end] == tokens[end - period] else 0
                self._runs[period - 1] = run
                found = found or run >= period * (self._times - 1)
        self._end = len(tokens)
        return found
