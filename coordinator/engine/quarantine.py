"""Quarantine: finds requests that end chains. Pure."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MOST_LOSSES = 2  # lost chains that a request may survive without a token in between

T = TypeVar("T", bound=Hashable)


@dataclass
class _Losses:
    num_known: int  # tokens at the last loss
    count: int = 1  # since its last token


class Quarantine(Generic[T]):
    """Finds requests that end chains.

    Requests without a token between two losses run one at a time: the next loss shows which of them causes it.
    """

    def __init__(self) -> None:
        self._losses: dict[T, _Losses] = {}
        self._held: deque[T] = deque()
        self._on_trial: T | None = None

    def survives(self, request: T, num_known: int) -> bool:
        """Count a loss of the chain under a running request with this many tokens; False if it must not continue."""
        losses = self._losses.get(request)
        if losses is None or num_known > losses.num_known:
            self._losses[request] = _Losses(num_known)
            return True
        losses.count += 1
        return losses.count <= MOST_LOSSES

    def may_run(self, request: T) -> bool:
        """Return whether it may enter the next chain at once; otherwise `next_on_trial` returns it later."""
        losses = self._losses.get(request)
        if losses is None or losses.count < MOST_LOSSES or request == self._on_trial:
            return True
        if self._on_trial is None:
            self._on_trial = request
            return True
        if request not in self._held:
            self._held.append(request)
        return False

    def next_on_trial(self, request: T) -> T | None:
        """Note that a request got a token or ended; if it was on trial, return the next request, now on trial."""
        self._losses.pop(request, None)
        if request in self._held:
            self._held.remove(request)
        if request != self._on_trial:
            return None
        self._on_trial = self._held.popleft() if self._held else None
        return self._on_trial
