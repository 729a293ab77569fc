"""The record of one recovery: from the loss of a chain to the first token of the next one."""

import time
from dataclasses import dataclass

from coordinator.planning.plan import Plan
from worker.errors import BrigadeError, NodeReturned


@dataclass(frozen=True)
class Recovered:
    """A recovery that has ended."""

    cause: str  # class name of the first error
    node: str  # the worker that it was about; empty for none in particular
    story: str  # for the user
    took_s: float  # until there was a chain again
    still_s: float | None  # for how long streams stood still; None if no request was under way


@dataclass
class Recovery:
    """The time from the loss of a chain to the first token of another one, or from the start to the first chain."""

    plan: Plan  # of the lost chain, or of the first one
    error: BrigadeError | None = None  # the latest; None until something has failed
    story: str = ""  # for the user: each loss, and then how requests go on
    cause: str = ""  # class name of the first error
    culprit: str = ""  # the worker that the first error was about
    still_since: float | None = None  # seconds, monotonic; None if no request was under way
    target: Plan | None = None  # that nodes load for
    spent_s: float = 0.0  # without a chain while no node loaded
    num_asks: int = 0
    # moments, seconds, monotonic; 0 for those not reached
    lost_at: float = 0.0  # the loss was noticed
    found_at: float = 0.0  # there were enough nodes for a chain
    loaded_at: float = 0.0  # each of them had its layers
    opened_at: float = 0.0  # the chain was open

    def begin(self, error: BrigadeError, still_since: float | None) -> None:
        """Note the first error."""
        self.error, self.story, self.cause, self.culprit = error, str(error), type(error).__name__, error.node
        self.still_since, self.spent_s = still_since, 0.0
        self.lost_at, self.found_at, self.loaded_at, self.opened_at = time.monotonic(), 0.0, 0.0, 0.0

    def note(self, error: BrigadeError) -> None:
        """Note a later error, which the story tells once."""
        self.error = error
        if str(error) not in self.story:
            self.story += f"; {error}"

    @property
    def is_return(self) -> bool:
        """Whether nothing was lost: the chain was ended so that a returned node can join."""
        return self.cause == NodeReturned.__name__

    @property
    def is_brief(self) -> bool:
        """Whether health checks may ignore it: it is a planned change, or the first node holds the model."""
        return self.is_return or self.plan.prompt_end is not None

    def end(self) -> Recovered:
        """Return the report on the recovery, which is over."""
        still_s = None if self.still_since is None else time.monotonic() - self.still_since
        still = "" if still_s is None else f", the stream stood still for {still_s:.1f} s"
        took_s = self.opened_at - self.lost_at
        return Recovered(self.cause, self.culprit, self.story + still, took_s, still_s)
