"""Slot: one session's place on the stages, from waiting for it to leaving it. Pure."""

from dataclasses import dataclass
from enum import Enum

from coordinator.sessions.session import Session

Bytes = tuple[int, ...]  # a number per stage


class SlotState(Enum):
    """How far a slot has come."""

    WAITING = "waiting"  # for memory; it has no number yet
    PROMISED = "promised"  # it has a number and its memory, but no stage has heard of it
    TAKEN_OVER = "taken over"  # likewise, and the stages have the rows that were kept under its number
    OPEN = "open"  # the stages have it
    KEPT = "kept"  # its session has ended, its rows serve whoever begins alike
    FREE = "free"  # it is no slot any more


_NEXT = {
    SlotState.WAITING: (SlotState.PROMISED, SlotState.TAKEN_OVER, SlotState.FREE),
    SlotState.PROMISED: (SlotState.OPEN, SlotState.FREE),
    SlotState.TAKEN_OVER: (SlotState.OPEN, SlotState.FREE),
    SlotState.OPEN: (SlotState.KEPT, SlotState.FREE),
    SlotState.KEPT: (SlotState.FREE,),
    SlotState.FREE: (),
}
ACTIVE = (SlotState.PROMISED, SlotState.TAKEN_OVER, SlotState.OPEN)
ON_STAGES = (SlotState.TAKEN_OVER, SlotState.OPEN, SlotState.KEPT)


@dataclass(eq=False)
class SessionSlot:
    """One session's slot."""

    session: Session
    needed: Bytes  # what its caches take at the end of the session
    promised: Bytes  # what is promised to it now
    state: SlotState = SlotState.WAITING
    last_step: int = 0  # that carried a window of it

    @property
    def number(self) -> int:
        assert self.session.slot is not None, "a slot that waits has no number"
        return self.session.slot

    def enter(self, state: SlotState) -> None:
        """The one way into another state."""
        assert state in _NEXT[self.state], f"what is {self.state.value} cannot become {state.value}"
        self.state = state
