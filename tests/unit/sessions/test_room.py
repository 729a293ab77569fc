"""Who gives way to a session that needs memory, as a table; and what a slot may become."""

import pytest

from coordinator.sessions.admission import ACTIVE, ON_STAGES, Bytes, Room, SessionSlot, SlotState, make_room
from tests.unit.fake_chain import make_session


def kept(*sizes: int) -> list[Bytes]:
    """So much on the first stage, twice as much on the second."""
    return [(size, 2 * size) for size in sizes]


@pytest.mark.parametrize(
    ("needed", "free", "others", "source", "extends", "room"),
    [
        pytest.param(5, 5, [], None, False, Room(), id="there is room"),
        pytest.param(6, 5, [], None, False, None, id="there is none"),
        pytest.param(5, 5, [3, 3], None, False, Room(), id="nobody leaves without need"),
        pytest.param(8, 5, [3, 3], None, False, Room((0,)), id="the least recently used one leaves first"),
        pytest.param(9, 5, [3, 3], None, False, Room((0, 1)), id="as many as it takes"),
        pytest.param(7, 5, [1, 9], None, False, Room((0, 1)), id="the oldest though it is too small by itself"),
        pytest.param(12, 5, [3, 3], None, False, None, id="all together are too few: nobody leaves in vain"),
        pytest.param(5, 5, [3, 3], 0, False, Room(), id="a copy where there is room for one"),
        pytest.param(8, 5, [3, 3], 0, False, Room((1,)), id="the source stays, whoever is the oldest"),
        pytest.param(9, 5, [3, 3], 0, False, Room((1,), True), id="and is taken over if it must go, too"),
        pytest.param(8, 5, [3], 0, False, Room((), True), id="it alone"),
        pytest.param(12, 5, [3, 3], 0, False, None, id="even so too few"),
        pytest.param(5, 5, [3, 3], 0, True, Room((), True), id="who goes on where it ends takes it over without need"),
        pytest.param(8, 5, [3, 3], 0, True, Room((), True), id="in its memory"),
        pytest.param(9, 5, [3, 3], 0, True, Room((1,), True), id="and the others leave for what is missing"),
        pytest.param(12, 5, [3, 3], 0, True, None, id="unless that is still too few"),
    ],
)
def test_who_gives_way(
    needed: int, free: int, others: list[int], source: int | None, extends: bool, room: Room | None
) -> None:
    assert make_room(*kept(needed, free), kept(*others), source, extends=extends) == room


def test_every_stage_has_to_have_room() -> None:
    """The first slot is large on the first stage, the second on the other."""
    rooms = {(5, 5): Room(), (4, 5): Room((0,)), (5, 4): Room((0, 1)), (4, 4): Room((0, 1))}
    assert {free: make_room((5, 5), free, [(2, 0), (0, 2)]) for free in rooms} == rooms


def test_a_slot_extendse_way_through_its_states() -> None:
    """Promised or taken over, then open, perhaps kept; and it can be freed at any time, once."""
    allowed = {(before, after) for before in SlotState for after in SlotState if can_follow(before, after)}
    waiting, promised, taken_over, opened, kept_, free = SlotState
    assert allowed == {
        (waiting, promised), (waiting, taken_over), (promised, opened), (taken_over, opened), (opened, kept_),
        (waiting, free), (promised, free), (taken_over, free), (opened, free), (kept_, free),
    }  # fmt: skip
    assert set(ACTIVE) == {promised, taken_over, opened} and set(ON_STAGES) == {taken_over, opened, kept_}


def can_follow(before: SlotState, after: SlotState) -> bool:
    slot = SessionSlot(make_session([1], 1), (0,), (0,), before)
    try:
        slot.enter(after)
    except AssertionError:
        return False
    return slot.state is after
