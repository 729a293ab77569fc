"""A slot: the state of one session on a stage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import mlx.core as mx

from protos.brigade_pb2 import Sampling, Window
from worker.compute.batching import LaneWindow
from worker.compute.drafting import SlotDrafting
from worker.compute.grammar import Guide
from worker.compute.header import asked_rows, num_rows
from worker.compute.sampling import Draws, Sampler
from worker.errors import CacheMismatch, PrefixLost, first_line
from worker.memory.history import History
from worker.memory.slot_caches import Caches, CacheSegment
from worker.model.quantisation import MISFITS


class Slot:
    """A session's tokens, caches and, for the last stage, its sampler."""

    def __init__(self, caches: Caches, history: History, sampling: Sampling, guide: Guide | None = None) -> None:
        """`guide` restricts the sampled tokens to the session's grammar."""
        self.caches = caches
        self.history = history
        self.sampler = Sampler(sampling)
        self.guide = guide
        self._draft_guide: Guide | None = None
        self.num_unasked = 0  # rows of prompt chunks since the last sampled row
        self.is_drafted = False  # whether a drafter reads its prompt chunks
        self.returns_rows = False  # whether a drafter on another node does
        self.drafting: SlotDrafting | None = None  # the drafter's state of this slot

    def fork(
        self,
        length: int,
        sampling: Sampling,
        guide: Guide | None = None,
        *,
        snapshots: Sequence[int] = (),
        is_drafted: bool = False,
        takes_over: bool = False,
    ) -> Slot:
        """Return a slot that continues from the first `length` tokens. Raises CacheMismatch if the caches cannot.

        Where it `takes_over`, this slot is to be closed, and its caches are not copied if they can be cut.
        """
        caches = self.caches.taken_over(length, snapshots) if takes_over else self.caches.fork(length, snapshots)
        other = Slot(caches, self.history.fork(length), sampling, guide)
        if self.drafting and is_drafted:
            with suppress(CacheMismatch):
                other.drafting = self.drafting.fork(length)
        return other

    @property
    def nbytes(self) -> int:
        """The bytes of its caches, including the drafter's."""
        return self.caches.nbytes + (self.drafting.nbytes if self.drafting else 0)

    def begin(self, window: Window) -> LaneWindow:
        """Cut to the window's base, append its tokens and return the place of its rows.

        The history is cut first. If cutting the caches fails, they stay longer, and a later window that continues a
        prefix in the history cuts them again.

        Raises:
            CacheMismatch: the slot does not hold the window's prefix, or cannot take such rows.
        """
        if window.canvas and self.caches.states:
            raise CacheMismatch(f"slot {window.slot} cannot take a canvas: a recurrent layer reads rows in their order")
        base = window.base
        self._cut_history(window)
        self.caches.cut(base)
        if window.snapshots:
            self.caches.keep_snapshots(window.snapshots[:-1])
        self.history.extend(window.tokens)
        self.num_unasked = 0 if asked_rows(window) else self.num_unasked + num_rows(window)
        positions = mx.array(list(window.positions), mx.int32) if window.positions else None
        return LaneWindow(
            self.caches, base, num_rows(window), positions, has_drafts=window.wanted > 1, num_canvas=len(window.canvas)
        )

    def restore(self, window: Window, segments: Sequence[CacheSegment]) -> list[mx.array]:
        """Append rows that were computed before instead of those of the window; return arrays to be evaluated.

        Raises:
            CacheMismatch: the slot does not hold the window's prefix. PrefixLost: the segments are not of its caches.
        """
        self._cut_history(window)
        try:
            arrays = self.caches.put_stored(segments, window.base, window.base + len(window.tokens))
        except (CacheMismatch, *MISFITS) as error:
            raise PrefixLost(f"expected a piece of these caches: {first_line(error)}") from error
        self.history.extend(window.tokens)
        self.num_unasked += len(window.tokens)
        if self.drafting:  # it has not seen these rows
            self.drafting.close()
            self.drafting = None
        return arrays

    def _cut_history(self, window: Window) -> None:
        """Cut the history to the window's base. Raises CacheMismatch if that is not where it can continue."""
        base, held, grid = window.base, len(self.history), self.caches.grid
        if base % grid or len(window.tokens) % grid:
            found = f"got {len(window.tokens)} of them after {base}"
            raise CacheMismatch(f"slot {window.slot} takes tokens in whole blocks of {grid}, {found}")
        if base > held or self.history.prefix_hash(base) != window.prefix_hash:
            found = f"only {held} tokens" if base > held else "another prefix"
            raise CacheMismatch(f"slot {window.slot} was to continue at {base} tokens but holds {found}")
        self.history.cut(base)

    def next_place(self, base: int) -> LaneWindow:
        """Return the place of one more token's row, after `base` tokens."""
        self.caches.cut(base)
        return LaneWindow(self.caches, base, 1)

    def draw(self, window: Window, logits: mx.array, first: int = 0) -> Draws:
        """Draw a token for each wanted row and then each guessed row of a window from their logits [N, V].

        Args:
            first: the index of the first of these rows in a canvas; other windows are drawn at once.
        """
        num_tokens = len(window.tokens)
        rows = asked_rows(window)
        if window.canvas:
            positions = [window.base + row for row in rows[first : first + len(logits)]]
            return self.sampler.denoise(logits, positions, window.canvas_step, is_scheduled=window.temperature > 0)
        at = window.positions or range(window.base, window.base + num_rows(window))
        # a token row predicts the next position, a MASK row its own
        positions = [at[row] + (row < num_tokens) for row in rows]
        known = [window.base + min(row + 1, num_tokens) for row in rows]
        tokens = self.history.tokens
        allowed = self.guide.allowed(tokens, known, window.wanted) if self.guide else None
        # entropies are needed only if the window fills MASK rows
        return self.sampler(logits, positions, tokens, known, entropy=window.wanted == 0, allowed=allowed)

    @property
    def can_draw_ahead(self) -> bool:
        """Whether draws depend only on logits and positions."""
        return not (self.guide or self.sampler.looks_back)

    @property
    def draft_guide(self) -> Guide | None:
        """A copy of the guide for drafts, whose way the sampled tokens need not go."""
        if self._draft_guide is None and self.guide:
            self._draft_guide = self.guide.copy()
        return self._draft_guide

    def draw_ahead(self, base: int, logits: mx.array) -> Draws:
        """Draw the token after the one at `base`, which need not be known, from the logits [1, V] of its row."""
        return self.sampler(logits, [base + 1], self.history.tokens, [base + 1])
