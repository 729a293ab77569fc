"""Session: one request's tokens and how far the chain has been fed. No I/O, no MLX, no clock."""

from collections.abc import Sequence

from coordinator.decoding.decoders import Autoregressive, Decoder, Proposal
from coordinator.decoding.lengths import padded
from coordinator.sessions.answer import Known, Scored, Token
from protos.brigade_pb2 import Cache, Sample, Sampling, Score, Window
from worker.memory.history import History

_LONGEST_PERIOD = 64  # tokens that a repeat may span


class Session:
    """One sequence. Known tokens are fed in windows; the last window of what is known carries a decoder's proposal."""

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        eos: frozenset[int] = frozenset(),
        decoder: Decoder | None = None,
        repeat_guard: int = 0,
        *,
        chunk: int = 256,
        sampling: Sampling | None = None,
        cache: Cache | None = None,
        score_from: int | None = None,
    ) -> None:
        """`chunk` is the most rows of a prompt chunk; a window with a proposal is as long as its decoder makes it."""
        self.slot: int | None = None  # its number on the stages, once it is promised one
        self.fed = 0  # leading known tokens that windows have carried so far
        self.num_prompt = len(prompt)
        self.num_reused = 0  # leading tokens that another session had fed already
        self.num_steps = 0  # windows that asked for tokens
        self.num_rows = 0  # of all windows
        self.num_rows_last = 1  # of the last window that asked for tokens
        self.rows_written = 0  # rows that the caches have had room for so far
        self.chunk = chunk
        self.sampling = sampling or Sampling()
        self.cache = cache or Cache()
        self.finish_reason: str | None = None
        self.is_paused = False  # whoever reads the answer is behind
        self.history = History(prompt)
        self._max_tokens = max_tokens
        self._asked_scores = self._known_scores = score_from or self.num_prompt  # tokens before it need none (any more)
        self._new_scores: list[Scored] = []
        self._eos = eos
        self._decoder = decoder or Autoregressive()
        self._repeat_guard = repeat_guard
        self._proposal: Proposal | None = None  # sent and not answered

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
        """Whether somebody waits for the next token after another."""
        return self.num_generated > 0 and not self.is_prefilling

    @property
    def is_ready(self) -> bool:
        """Whether a window can be sent: a prompt's chunks follow each other, a proposal waits for its answer."""
        return self.finish_reason is None and self._proposal is None and not self.is_paused

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

    def resume(self, known: Known) -> None:
        """Go on from here, as if these tokens had become known and then the chain had been lost."""
        assert self.fed == 0 and self.num_generated == 0
        self.history.extend(token.token for token in known.tokens)
        self._decoder.restore([(at, token.to_sample()) for at, token in known.fills])

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

    def take_scores(self) -> list[Scored]:
        """Those that have become known since they were last taken."""
        taken, self._new_scores = self._new_scores, []
        return taken

    def commit(
        self, samples: Sequence[Sample], guesses: Sequence[Sample], scores: Sequence[Score] = ()
    ) -> list[Sample]:
        """Take the answer to the window sent last; returns what became known, up to the end of the sequence.

        Sets `finish_reason` with the last token. The answer to a prompt chunk is empty and changes nothing. One that
        comes after the end is dropped.
        """
        if self.finish_reason is not None:
            return []
        self._new_scores += map(Scored.of, scores)
        self._known_scores += len(scores)
        if not (samples or guesses):
            return []
        assert self._proposal is not None
        accepted = self._decoder.accept(self._proposal, samples, guesses)
        self._proposal = None
        self.fed += accepted.num_cached
        num_taken = 0
        for num_taken, sample in enumerate(accepted.samples, 1):  # noqa: B007 - used below
            self.history.extend([sample.token])
            if sample.token in self._eos:
                self.finish_reason = "stop"
            elif self.num_generated >= self._max_tokens:
                self.finish_reason = "length"
            elif self._repeat_guard and repeats(self.generated, self._repeat_guard):
                self.finish_reason = "stop"
            if self.finish_reason:
                break
        self.fed = min(self.fed, len(self.history))
        return accepted.samples[:num_taken]

    def stop(self) -> None:
        """End here: a stop string matched, or the client left."""
        self.finish_reason = "stop"

    def fail(self) -> None:
        """End here: a window could not be computed, and no two stages need hold the same of it."""
        self.finish_reason = "error"

    def rewind(self) -> None:
        """Begin again on another chain: whatever is known is to be fed, as if it had just come as the prompt."""
        assert self.finish_reason is None
        self.slot = None
        self.fed = self.num_reused = self.rows_written = 0
        self._proposal = None
        self._asked_scores = self._known_scores
        self._decoder.rewind()

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


def repeats(tokens: Sequence[int], times: int) -> bool:
    """Whether the tokens end in the same few of them, `times` times in a row."""
    for period in range(1, min(_LONGEST_PERIOD, len(tokens) // times) + 1):
        tail = tokens[len(tokens) - period * times :]
        if all(tail[i] == tail[i % period] for i in range(len(tail))):
            return True
    return False
