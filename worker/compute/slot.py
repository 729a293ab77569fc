"""Slot: what a stage holds of one session."""

import mlx.core as mx

from protos.brigade_pb2 import Sampling, Window
from worker.compute.grammar import Guide
from worker.compute.header import asked_rows, num_rows
from worker.compute.sampling import Draws, Sampler
from worker.errors import CacheMismatch
from worker.memory.caches import Caches
from worker.memory.history import History
from worker.memory.lane import Place


class Slot:
    """A session's row on this stage: its tokens, its caches and, on the last stage, its sampler."""

    def __init__(self, caches: Caches, history: History, sampling: Sampling, guide: Guide | None = None) -> None:
        """`guide` tells what may be sampled, where there is a grammar."""
        self.caches = caches
        self.history = history
        self.sampler = Sampler(sampling)
        self.guide = guide

    def fork(self, length: int, sampling: Sampling, guide: Guide | None = None) -> "Slot":
        """Another slot that goes on from the first `length` tokens. Raises CacheMismatch if that cannot be."""
        return Slot(self.caches.fork(length), self.history.fork(length), sampling, guide)

    def close(self) -> None:
        self.caches.close()

    def begin(self, window: Window) -> Place:
        """Cut to the window's base and take its tokens; returns where its rows go.

        Raises:
            CacheMismatch: the slot does not hold the prefix that the window continues. It can go on from one it holds:
                the history is cut first, so no cache is ever shorter, and the next window cuts them all again.
        """
        base, held = window.base, len(self.history)
        if base > held or self.history.prefix_hash(base) != window.prefix_hash:
            found = f"only {held} tokens" if base > held else "another prefix"
            raise CacheMismatch(f"slot {window.slot} was to continue at {base} tokens but holds {found}")
        self.history.cut(base)
        self.caches.cut(base)
        self.history.extend(window.tokens)
        positions = mx.array(list(window.positions), mx.int32) if window.positions else None
        return Place(self.caches, base, num_rows(window), positions)

    def next_place(self, base: int) -> Place:
        """Where the row of one more token goes, whichever it is, behind `base` of them."""
        self.caches.cut(base)
        return Place(self.caches, base, 1)

    def draw(self, window: Window, logits: mx.array) -> Draws:
        """A token for each wanted and each guessed row of a window, in that order, by their logits [N, V]."""
        num_tokens = len(window.tokens)
        rows = asked_rows(window)
        at = window.positions or range(window.base, window.base + num_rows(window))
        # a token row tells what comes next, a MASK row what stands in its own place
        positions = [at[row] + (row < num_tokens) for row in rows]
        known = [window.base + min(row + 1, num_tokens) for row in rows]
        tokens = self.history.tokens
        allowed = self.guide.allowed(tokens, known, window.wanted) if self.guide else None
        # verified guesses need no entropy: only a window that fills goes by it
        return self.sampler(logits, positions, tokens, known, entropy=window.wanted == 0, allowed=allowed)

    @property
    def can_draw_ahead(self) -> bool:
        """Whether draws depend on nothing but logits and positions."""
        return not (self.guide or self.sampler.looks_back)

    def draw_ahead(self, base: int, logits: mx.array) -> Draws:
        """The draw that follows one more token behind `base`, whichever that is, by the logits [1, V] of its row."""
        return self.sampler(logits, [base + 1], self.history.tokens, [base + 1])
