"""Room: which kept slots give way to a session that needs their memory. Numbers in, a choice out. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from coordinator.sessions.slot import Bytes


@dataclass(frozen=True)
class Room:
    """How a session gets its memory: kept slots that are freed for it, and whether it takes its source over."""

    leaving: tuple[int, ...] = ()  # by their place among the kept ones
    takes_over: bool = False


def make_room(
    needed: Bytes, free: Bytes, kept: Sequence[Bytes], source: int | None = None, *, goes_on: bool = False
) -> Room | None:
    """Free as few kept slots as needed, the least recently used first; None if even all of them are too few.

    Args:
        needed: bytes per stage for the session.
        free: bytes per stage that are promised to nobody.
        kept: what each kept slot would give, the least recently used first.
        source: the one among them that the session begins as a copy of. It goes last, and then the session takes it
            over, rows and all.
        goes_on: the session continues it where it ends, and takes it over in any case.
    """
    others = [place for place in range(len(kept)) if place != source]
    choices = [Room(tuple(others[:count]), goes_on) for count in range(len(others) + 1)]
    if source is not None:
        choices.append(Room(tuple(others), takes_over=True))
    for room in choices:
        given = room.leaving if source is None or not room.takes_over else (*room.leaving, source)
        if _is_enough(needed, free, kept, given):
            return room
    return None


def _is_enough(needed: Bytes, free: Bytes, kept: Sequence[Bytes], given: Collection[int]) -> bool:
    return all(need <= free[stage] + sum(kept[place][stage] for place in given) for stage, need in enumerate(needed))
