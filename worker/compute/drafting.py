"""Drafting: the last stage guesses the tokens that follow a window; the guesses return with its samples.

Shapes: B slots, L window length, D hidden, V vocabulary, W numbers of a row on the last stage (see `Shard`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from protos.brigade_pb2 import Result, Sample, Window
from worker.compute.header import is_chunk, num_rows
from worker.errors import SamplingError
from worker.memory.history import common_prefix

if TYPE_CHECKING:
    from worker.compute.slot import Slot


class SlotDrafting(Protocol):
    """A drafter's state of one slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""

    def fork(self, length: int) -> SlotDrafting:
        """Return a copy that continues from the first `length` tokens. Raises CacheMismatch if it has to begin anew."""

    def close(self) -> None:
        """Free its memory."""


@dataclass(frozen=True)
class DraftRequest:
    """A slot whose window has been answered."""

    slot: Slot
    base: int  # of the window
    # known from the base on: those of the rows that hold, then the one sampled after them, if any
    tokens: Sequence[int]
    count: int  # drafts that are wanted after them; 0: the drafter may read the tokens
    is_chunk: bool  # whether the window was a prompt chunk
    rows: mx.array  # [1, sum L, W] of all windows of the step, after the last layer
    first_row: int  # of this window among them
    num_rows: int  # of this window, that hold

    @property
    def num_known(self) -> int:
        return self.base + len(self.tokens)

    @property
    def own_rows(self) -> mx.array:
        """The rows [1, `num_rows`, W] of this window that hold."""
        return self.rows[:, self.first_row : self.first_row + self.num_rows]

    def tokens_from(self, begin: int, count: int | None = None) -> list[int]:
        """Return the known tokens from this index on, at most `count` of them."""
        end = self.num_known if count is None else min(self.num_known, begin + count)
        earlier = self.slot.history.tokens[begin : min(end, self.base)]
        return [*earlier, *self.tokens[max(0, begin - self.base) : max(0, end - self.base)]]


class Drafter(Protocol):
    """Guesses tokens, which the chain verifies: a guess that it cannot make well is rejected there."""

    reads_rows: bool  # of the last layer, and not only tokens

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return for each request as many tokens as it wants, which follow its known tokens."""


def add_drafts(
    drafter: Drafter | None, windows: Sequence[Window], slots: Mapping[int, Slot], rows: mx.array, result: Result
) -> None:
    """Add drafts to the result of a step, as many as its windows ask for, and show the drafter every drafted slot.

    Without a drafter, and after a failed window, all drafts are token 0.

    Args:
        rows: [1, sum L, W] of the windows, after the last layer.
    """
    samples: dict[int, list[int]] = defaultdict(list)
    for sample in result.samples:
        samples[sample.slot].append(sample.token)
    requests, first_row = {}, 0
    for window in windows:
        slot, drawn, tokens = slots[window.slot], samples[window.slot], list(window.tokens)
        num_known = len(tokens)
        if drawn:
            first = num_known - (window.wanted - 1)  # of the drafts
            num_known = first + common_prefix(tokens[first:], drawn)
            tokens = [*tokens[:num_known], drawn[num_known - first]]
        shows = slot.is_drafted and (is_chunk(window) or (drawn and not window.masks))
        if (window.to_draft and drawn) or shows:
            requests[window.slot] = DraftRequest(
                slot,
                window.base,
                tokens,
                count=window.to_draft,
                is_chunk=is_chunk(window),
                rows=rows,
                first_row=first_row,
                num_rows=num_known,
            )
        first_row += num_rows(window)
    drafts = drafter.draft(list(requests.values())) if drafter and requests else [[] for _ in requests]
    found = dict(zip(requests, drafts, strict=True))
    for window in windows:
        drafted = found.get(window.slot) or [0] * window.to_draft
        result.guesses.extend(Sample(slot=window.slot, token=token) for token in drafted)


def draft_in_turn(
    requests: Sequence[DraftRequest],
    h: mx.array,
    logits: Callable[[mx.array], mx.array],
    feed: Callable[[int, Sequence[int], mx.array, mx.array], mx.array],
) -> list[mx.array]:
    """Draw drafts one after another, each for all slots that want one more.

    Args:
        h: [1, B, D], from which the first drafts are drawn.
        logits: returns the logits [N, V] of hidden states [1, N, D].
        feed: returns the hidden states [1, N, D] of the next drafts, given the number of drafts so far, the numbers of
            the requests that go on, these drafts' ids [1, N], and the hidden states from which they were drawn.
    Returns:
        The drafts of each request, not evaluated.
    """
    drafts: list[list[mx.array]] = [[] for _ in requests]
    active = list(range(len(requests)))
    for number in range(max(request.count for request in requests)):
        some = [requests[at] for at in active]
        drawn = draw_drafts(some, [drafts[at] for at in active], logits(h))
        mx.async_eval(drawn)
        for at, token in zip(active, drawn.split(len(active)), strict=True):
            drafts[at].append(token)
        going_on = [row for row, at in enumerate(active) if requests[at].count > number + 1]
        if not going_on:
            break
        if len(going_on) < len(active):
            drawn, h = drawn[mx.array(going_on)], h[:, mx.array(going_on)]
        active = [active[row] for row in going_on]
        h = feed(number, active, drawn.astype(mx.int32)[None], h)
    return [mx.concatenate(tokens) for tokens in drafts]


def draw_drafts(requests: Sequence[DraftRequest], drafts: Sequence[Sequence[mx.array]], logits: mx.array) -> mx.array:
    """Draw a draft [B] for each slot from logits [B, V], as the slot's own sampler will at that place.

    A token that cannot be drawn is 0.

    Args:
        drafts: those of each slot so far.
    """
    drawn: dict[int, mx.array] = {}
    alike: dict[bytes | None, list[int]] = defaultdict(list)
    for at, request in enumerate(requests):
        if request.slot.can_draw_ahead:
            alike[request.slot.sampler.draw_kind].append(at)
        else:
            drawn[at] = _draw_alone(request, drafts[at], logits[at : at + 1])
    for group in alike.values():
        samplers = [requests[at].slot.sampler for at in group]
        positions = [requests[at].num_known + len(drafts[at]) for at in group]
        rows = logits if len(group) == len(requests) else logits[mx.array(group)]
        tokens = samplers[0].draw(rows, [sampler.seed for sampler in samplers], positions).tokens
        if len(group) == len(requests):
            return tokens
        drawn |= zip(group, tokens.split(len(group)), strict=True)
    return mx.concatenate([drawn[at] for at in range(len(requests))])


def _draw_alone(request: DraftRequest, drafts: Sequence[mx.array], logits: mx.array) -> mx.array:
    """Draw the next draft [1] of a slot whose draws depend on its tokens, from logits [1, V]."""
    end, guide = request.num_known + len(drafts), request.slot.draft_guide
    begin = guide.begins if guide else request.num_known
    begin = max(0, min(begin, end - request.slot.sampler.looks_back))
    tokens: list[int] = [*request.tokens_from(begin), *(draft.item() for draft in drafts)]  # type: ignore[list-item]
    try:
        allowed = guide.allowed_next(tokens[guide.begins - begin :]) if guide else None
        return request.slot.sampler(logits, [end], tokens, [len(tokens)], allowed=allowed).tokens
    except SamplingError:
        return mx.array([0])


def last_rows(h: mx.array, lengths: Sequence[int]) -> mx.array:
    """Return the last row of each slot [1, B, D] of the rows of all [1, sum L, D]."""
    return h if h.shape[1] == len(lengths) else h[:, mx.array([end - 1 for end in accumulate(lengths)])]


def fit_vocabulary(logits: mx.array, vocab_size: int, mask_token: int | None) -> mx.array:
    """Return the logits [B, V], with minus infinity for MASK and for tokens that a smaller vocabulary lacks."""
    logits = logits[:, :vocab_size]
    if missing := vocab_size - logits.shape[1]:
        logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
    if mask_token is not None:
        logits[:, mask_token] = -mx.inf
    return logits
