"""A small model of the same tokenizer as a drafter: a whole shard of its own, a step per draft.

Its cache follows the rule of the caches: it is cut to what it shares with the known tokens, and reads the rest. So
rejected drafts, pauses and replays need nothing of their own.
Shapes: B slots, L window length, D hidden, V vocabulary of the model that it drafts for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from protos.brigade_pb2 import Cache
from worker.compute.batching import LaneWindow
from worker.compute.drafting import DraftRequest, draft_in_turn, fit_vocabulary, last_rows
from worker.compute.shard import Shard
from worker.errors import CacheMismatch
from worker.memory.history import History
from worker.memory.slot_caches import Caches, close_all

CHUNK = 512  # rows of one slot that are read at once
MOST_READ = 2048  # rows of one slot in one step: a long text is read over several, without drafts


@dataclass
class ReadText:
    """The tokens of one slot that the small model has read, with its caches."""

    caches: Caches
    history: History = field(default_factory=History)
    before: tuple[int, list[Any]] | None = None  # of recurrent layers: length and states before the last drafts

    @property
    def nbytes(self) -> int:
        saved = sum(state.nbytes for state in self.caches.states) if self.before else 0
        return self.caches.nbytes + saved

    def cut_to(self, known: History, length: int) -> None:
        """Keep the tokens shared with the first `length` known ones. Raises CacheMismatch if that is not possible."""
        shared = self.history.num_alike(known, length)  # a collision of hashes makes bad drafts, no wrong token
        if self.before and shared < len(self.history):
            shared = min(shared, self.before[0])
            if shared == self.before[0]:
                for state, saved in zip(self.caches.states, self.before[1], strict=True):
                    state.restore(saved)
                self.caches.begin()
        self.caches.cut(shared)
        self.history.cut(shared)
        self.before = None

    def begin_drafts(self, count: int) -> None:
        """Make room for so many drafts, and note the states, to return to: those cannot be cut.

        A sliding cache makes room by dropping rows that the token after the rejected drafts still sees, so it has to
        make room for all of them at once.
        """
        self.caches.reserve(count, None)
        if self.caches.states:
            self.before = len(self.history), [state.saved() for state in self.caches.states]

    def fork(self, length: int) -> ReadText:
        end = min(length, len(self.history))
        return ReadText(self.caches.fork(end), self.history.fork(end))

    def close(self) -> None:
        close_all([self.caches])


class SmallModel:
    """Drafts by a small model; the slots of a step go through it together."""

    reads_rows = False

    def __init__(self, shard: Shard, vocab_size: int, mask_token: int | None) -> None:
        """
        Args:
            shard: all layers of the small model.
            vocab_size, mask_token: of the model that it drafts for.
        """
        self._shard = shard
        self._vocab_size, self._mask_token = vocab_size, mask_token

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return drafts; read prompt chunks, and nothing else that asks for none: it is read before the next drafts."""
        able = [
            request
            for request in requests
            if (request.count or request.is_chunk) and request.num_known + request.count < self._shard.context
        ]
        texts = {id(request): self._text_of(request) for request in able}
        able = [request for request in able if self._catch_up(texts[id(request)], request)]
        if not able:
            return [[0] * request.count for request in requests]
        h = self._read_rest([texts[id(request)] for request in able], able)
        drafting = [at for at, request in enumerate(able) if request.count]
        found: dict[int, list[int]] = {}
        if drafting:
            h = h if len(drafting) == len(able) else h[:, mx.array(drafting)]
            asking = [able[at] for at in drafting]
            drafts = self._draft_together(asking, [texts[id(request)] for request in asking], h)
            found = {id(request): tokens for request, tokens in zip(asking, drafts, strict=True)}
        else:
            mx.eval([h, *(array for text in texts.values() for array in text.caches.state_arrays())])
        return [found.get(id(request), [0] * request.count) for request in requests]

    def _text_of(self, request: DraftRequest) -> ReadText:
        """Return the slot's text, cut to the known tokens; a new one if it cannot be cut, or did not exist."""
        slot, text = request.slot, request.slot.drafting
        if isinstance(text, ReadText):
            try:
                text.cut_to(slot.history, request.num_known - 1)
            except CacheMismatch:
                text.close()
                text = None
        if text is None:
            text = slot.drafting = ReadText(self._shard.make_caches(Cache()))
        assert isinstance(text, ReadText)
        return text

    def _catch_up(self, text: ReadText, request: DraftRequest) -> bool:
        """Read all but the last chunk of what the text lacks; return whether that was all within this step."""
        limit = len(text.history) + MOST_READ
        while (missing := request.num_known - len(text.history)) > CHUNK and len(text.history) < limit:
            self._read([text], [request.tokens_from(len(text.history), CHUNK)])
            mx.eval(text.caches.arrays(), text.caches.state_arrays())
            missing -= CHUNK
        return missing <= CHUNK

    def _read_rest(self, texts: Sequence[ReadText], requests: Sequence[DraftRequest]) -> mx.array:
        """Read what the texts lack; return the hidden states [1, B, D] of the last known tokens."""
        parts = [request.tokens_from(len(text.history)) for request, text in zip(requests, texts, strict=True)]
        return last_rows(self._read(texts, parts), [len(part) for part in parts])

    def _draft_together(
        self, requests: Sequence[DraftRequest], texts: Sequence[ReadText], h: mx.array
    ) -> list[list[int]]:
        """Draft from h [1, B, D], that of each slot's last known token."""
        for request, text in zip(requests, texts, strict=True):
            text.begin_drafts(request.count)

        def logits(h: mx.array) -> mx.array:
            return fit_vocabulary(self._shard.logits(h), self._vocab_size, self._mask_token)

        def feed(number: int, active: Sequence[int], ids: mx.array, h: mx.array) -> mx.array:
            some = [texts[at] for at in active]
            return self._run(some, [len(text.history) + number for text in some], [1] * len(some), ids)

        drafts = draft_in_turn(requests, h, logits, feed)
        mx.eval(drafts, [array for text in texts for array in text.caches.state_arrays()])
        found: list[list[int]] = [tokens.tolist() for tokens in drafts]  # type: ignore[misc]
        for text, tokens in zip(texts, found, strict=True):
            text.history.extend(tokens[:-1])
        return found

    def _read(self, texts: Sequence[ReadText], parts: Sequence[Sequence[int]]) -> mx.array:
        """Append these tokens to the texts and return their hidden states [1, sum L, D]."""
        bases = [len(text.history) for text in texts]
        for text, part in zip(texts, parts, strict=True):
            text.history.extend(part)
        ids = mx.array([[token for part in parts for token in part]], mx.int32)
        return self._run(texts, bases, [len(part) for part in parts], ids)

    def _run(self, texts: Sequence[ReadText], bases: Sequence[int], lengths: Sequence[int], ids: mx.array) -> mx.array:
        """Run the model over ids [1, sum L], so many after each base, and return hidden states [1, sum L, D]."""
        if (own_size := self._shard.info.vocab_size) < self._vocab_size:  # its embedding has no row for the ids beyond
            ids = mx.where(ids < own_size, ids, 0)
        for text, base in zip(texts, bases, strict=True):
            text.caches.cut(base)
        places = [LaneWindow(text.caches, base, L) for text, base, L in zip(texts, bases, lengths, strict=True)]
        return self._shard(ids, places, ids)
