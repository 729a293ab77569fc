"""Suspects: requests under which chains end again and again. One of them may be what ends them. Pure.

Whoever has got no token between two losses is tried alone among its like: the next loss tells which one it was.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

MOST_LOSSES = 2  # that a request outlives without a token in between


@dataclass
class _Record:
    num_known: int  # tokens, at the last loss
    num_losses: int = 1  # since its last token


class Suspects(Generic[T]):
    """How often in a row the chain was lost under each request, and who of the suspects is tried now."""

    def __init__(self) -> None:
        self._records: dict[T, _Record] = {}
        self._held: deque[T] = deque()
        self._tried: T | None = None

    def lost_under(self, request: T, num_known: int) -> bool:
        """The chain was lost while the request ran, with so many tokens known. False if it must not go on."""
        record = self._records.get(request)
        if record is None or num_known > record.num_known:
            self._records[request] = _Record(num_known)
            return True
        record.num_losses += 1
        return record.num_losses <= MOST_LOSSES

    def may_run(self, request: T) -> bool:
        """Whether it may enter the next chain at once; otherwise it is held until its turn, see `next_tried`."""
        record = self._records.get(request)
        if record is None or record.num_losses < MOST_LOSSES or request == self._tried:
            return True
        if self._tried is None:
            self._tried = request
            return True
        if request not in self._held:
            self._held.append(request)
        return False

    def next_tried(self, request: T) -> T | None:
        """The request has got a token, or has ended: if it was the one that was tried, who is tried now."""
        self._records.pop(request, None)
        if request in self._held:
            self._held.remove(request)
        if request != self._tried:
            return None
        self._tried = self._held.popleft() if self._held else None
        return self._tried
