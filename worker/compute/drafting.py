"""Drafting: the last stage guesses the tokens that follow a window; the guesses return with its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from protos.brigade_pb2 import Result, Sample, Window
from worker.compute.header import num_held

if TYPE_CHECKING:
    from worker.compute.slot import Slot


class SlotDrafting(Protocol):
    """A drafter's state of one slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        ...

    def fork(self, length: int) -> SlotDrafting | None:
        """Return a copy that continues from the first `length` tokens; None if it has to begin anew."""
        ...

    def close(self) -> None:
        """Free its memory."""
        ...


@dataclass(frozen=True)
class DraftRequest:
    """A slot whose window has been answered. Its known tokens are the first `length` of its history and `last`."""

    slot: Slot
    length: int
    last: int
    count: int  # drafts that are wanted after them; 0: the drafter only reads the tokens

    @property
    def num_known(self) -> int:
        return self.length + 1

    def tokens_from(self, begin: int, count: int | None = None) -> list[int]:
        """Return the known tokens from this index on, at most `count` of them."""
        end = self.num_known if count is None else min(self.num_known, begin + count)
        found = self.slot.history.tokens[begin : min(end, self.length)]
        return [*found, self.last] if end > self.length and begin <= self.length else found


class Drafter(Protocol):
    """Guesses tokens, which the chain verifies: a guess that it cannot make well is rejected there."""

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return for each request as many tokens as it wants, which follow its known tokens."""
        ...


def add_drafts(drafter: Drafter | None, windows: Sequence[Window], slots: Mapping[int, Slot], result: Result) -> None:
    """Add drafts to the result of a step, as many as its windows ask for, and have the drafter read prompt chunks.

    Without a drafter, and after a failed window, all drafts are token 0.
    """
    samples: dict[int, list[int]] = {}
    for sample in result.samples:
        samples.setdefault(sample.slot, []).append(sample.token)
    requests = {}
    for window in windows:
        slot, drawn = slots[window.slot], samples.get(window.slot)
        if window.drafts and drawn:
            tokens = slot.history.tokens
            first = len(tokens) - (window.wanted - 1)  # of the drafts
            held = num_held(tokens[first:], drawn)
            requests[window.slot] = DraftRequest(slot, first + held, drawn[held], window.drafts)
        elif slot.is_drafted and not (window.wanted or window.masks):
            tokens = slot.history.tokens
            requests[window.slot] = DraftRequest(slot, len(tokens) - 1, tokens[-1], 0)
    drafts = drafter.draft(list(requests.values())) if drafter and requests else [[] for _ in requests]
    found = dict(zip(requests, drafts, strict=True))
    for window in windows:
        tokens = found.get(window.slot) or [0] * window.drafts
        result.guesses.extend(Sample(slot=window.slot, token=token) for token in tokens)
