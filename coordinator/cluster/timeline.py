"""Timeline: when a recovery got how far, for whoever measures it; and what is told of it once it is over."""

import time
from dataclasses import dataclass


@dataclass
class Timeline:
    """The latest recovery's. Seconds, monotonic; 0 for what has not happened."""

    lost_at: float = 0.0  # the loss was noticed
    found_at: float = 0.0  # there were enough nodes for a chain
    loaded_at: float = 0.0  # each of them had its layers
    opened_at: float = 0.0  # they were joined

    def mark_found(self) -> None:
        self.found_at = time.monotonic()

    def mark_loaded(self) -> None:
        self.loaded_at = time.monotonic()

    def mark_opened(self) -> None:
        self.opened_at = time.monotonic()


@dataclass(frozen=True)
class Recovered:
    """A recovery that is over."""

    cause: str  # class name of the error that began it
    node: str  # the worker that it was of; empty for none in particular
    story: str  # for the user
    took_s: float  # until there was a chain again
    still_s: float | None  # how long streams stood still; None if no request was under way
