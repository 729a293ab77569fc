"""Outage: one loss of a chain, until another one has made a token known; and the states that a chain goes through."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Self

from coordinator.cluster.deployment import Deployment
from coordinator.cluster.timeline import Recovered, Timeline
from coordinator.planning.recovery import Limits, Recovery
from worker.errors import BrigadeError, NodeReturned


class ChainState(Enum):
    """How the one chain of a supervisor stands."""

    STARTING = auto()  # there has been none
    RESTARTING = auto()  # there has been none, and the first try failed
    SOUND = auto()  # it is open
    LOST = auto()  # it is closed, and the next one is not open
    PROVING = auto()  # it is open after a loss, and has made no token known

    @property
    def is_open(self) -> bool:
        return self in (ChainState.SOUND, ChainState.PROVING)

    @property
    def is_first(self) -> bool:
        """Whether no chain has been open."""
        return self in (ChainState.STARTING, ChainState.RESTARTING)


class Event(Enum):
    """What takes a chain from one state to another."""

    LOSS = auto()
    OPENED = auto()
    PROVEN = auto()  # by a token, or because nobody waits for one


_NEXT = {
    (ChainState.STARTING, Event.OPENED): ChainState.SOUND,
    (ChainState.STARTING, Event.LOSS): ChainState.RESTARTING,
    (ChainState.RESTARTING, Event.OPENED): ChainState.PROVING,
    (ChainState.SOUND, Event.PROVEN): ChainState.SOUND,
    (ChainState.SOUND, Event.LOSS): ChainState.LOST,
    (ChainState.LOST, Event.OPENED): ChainState.PROVING,
    (ChainState.PROVING, Event.PROVEN): ChainState.SOUND,
    (ChainState.PROVING, Event.LOSS): ChainState.LOST,
}


def following(state: ChainState, event: Event) -> ChainState:
    """The state after this event. Nothing else can happen in it."""
    return _NEXT[state, event]


@dataclass
class Outage:
    """What was lost, and how far its recovery has come."""

    lost: Deployment  # that of the chain that was lost last
    recovery: Recovery
    trouble: str  # why there is no chain, by the latest error
    story: str  # what was lost, and then how it goes on, for the user
    cause: str  # class name of the error that was first
    culprit: str  # the worker that it was of
    still_since: float | None  # seconds, monotonic; None if no request was under way
    timeline: Timeline = field(default_factory=lambda: Timeline(lost_at=time.monotonic()))

    @classmethod
    def by(
        cls,
        error: BrigadeError,
        lost: Deployment,
        still_since: float | None,
        limits: Limits,
        useless: Collection[str],
    ) -> Self:
        """One that begins now; `useless` are incarnations that nothing is to be opened with."""
        recovery = Recovery(lost.plan, limits)
        for incarnation in useless:
            recovery.rule_out(incarnation)
        return cls(lost, recovery, str(error), str(error), type(error).__name__, error.node, still_since)

    @property
    def is_return(self) -> bool:
        """Whether nothing was lost: the chain was ended for a node that is there again."""
        return self.cause == NodeReturned.__name__

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.timeline.lost_at

    @property
    def open_s(self) -> float:
        """For how long there has been a chain again."""
        return time.monotonic() - self.timeline.opened_at

    @property
    def took_s(self) -> float:
        """From the loss to the next chain."""
        return self.timeline.opened_at - self.timeline.lost_at

    def goes_on(self, how: str) -> None:
        """There is a chain again."""
        self.story += f"; going on {how} after {self.took_s:.1f} s"

    def end(self) -> Recovered:
        """It is over: what is told of it."""
        still_s = None if self.still_since is None else time.monotonic() - self.still_since
        still = "" if still_s is None else f", the stream stood still for {still_s:.1f} s"
        return Recovered(self.cause, self.culprit, self.story + still, self.took_s, still_s)
