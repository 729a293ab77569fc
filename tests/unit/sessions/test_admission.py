"""Slots: which sessions are admitted, whose prefix is reused and how, and which slots give way when memory is short."""

from dataclasses import replace

import pytest

from coordinator.decoding.decoders import Verified
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from coordinator.sessions.admission import Slots
from coordinator.sessions.cache_costs import Bytes, Room, cache_costs, make_room
from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, DTYPE_BFLOAT16, Cache
from tests.unit.fake_chain import PLENTY, Rig, costs_per_row, decoders, make_session, prompt_of
from worker.errors import InputError, QueueFull
from worker.model.cache_spec import Memory
from worker.model.model_spec import LayerSpec, ModelSpec

TEXT = prompt_of(200, seed=77)


def fed(rig: Rig) -> dict[int, int]:
    """Rows that the stages have, by slot."""
    return {number: slot.num_rows for number, slot in rig.chain.slots.items()}


# --- admission ------------------------------------------------------------------------------------------------------


def test_what_could_never_fit_is_refused_with_the_node_that_is_too_small() -> None:
    rig = Rig(budget=100)
    assert rig.submit(prompt_of(60), 40).slot == 0
    with pytest.raises(InputError, match="of cache on node-0, which has"):
        rig.submit(prompt_of(61), 40)
    assert rig.scheduler.slots.num_waiting == 0
    rig = Rig(budget=100)
    rig.submit(prompt_of(100), 100, cache=Cache(kind=CACHE_INT8))  # half as large
    assert rig.scheduler.slots.reserved == rig.costs.budgets
    rig = Rig(budget=52)
    for name in ("diffusion", "diffusion-fast"):
        with pytest.raises(InputError):
            rig.submit(prompt_of(40), 10, decoder=decoders(window=4)[name]())  # whose MASK rows need room too
    rig.submit(prompt_of(40), 10)


def test_sessions_start_in_the_order_of_arrival_once_there_is_memory() -> None:
    """A small one does not overtake a large one: else large ones would never start."""
    rig = Rig(budget=100)
    first = rig.submit(prompt_of(50), 10)
    large, small = rig.submit(prompt_of(80, seed=1), 10), rig.submit(prompt_of(5, seed=2), 5)
    assert rig.scheduler.slots.num_waiting == 2 and (large.slot, small.slot) == (None, None)
    rig.run(first)
    assert rig.scheduler.slots.num_waiting == 0 and small.slot != large.slot >= 0
    rig.run(large, small)
    rig.end()


def test_whoever_is_cancelled_makes_room_at_once() -> None:
    rig = Rig(budget=100)
    first, second = rig.submit(prompt_of(60), 10), rig.submit(prompt_of(60, seed=1), 10)
    rig.send_all()
    rig.scheduler.close(first)
    assert rig.scheduler.slots.num_waiting == 0 and second.slot != first.slot, "frames of the first one are in flight"
    large, small = rig.submit(prompt_of(80, seed=1), 10), rig.submit(prompt_of(5, seed=2), 5)
    rig.scheduler.close(large)  # while it waits
    assert rig.scheduler.slots.num_waiting == 0 and small.slot is not None
    rig.send_all()
    rig.run(second, small)
    rig.end()


def test_a_full_queue_says_so_and_what_need_not_wait_runs_though_none_may_wait() -> None:
    rig = Rig(budget=20, max_waiting=2)
    for seed in range(3):
        rig.submit(prompt_of(10, seed=seed), 10)
    with pytest.raises(QueueFull, match="2 requests wait already"):
        rig.submit(prompt_of(10, seed=4), 10)
    with pytest.raises(InputError):  # not "try again later"
        rig.submit(prompt_of(30, seed=5), 10)
    rig = Rig(budget=20, max_waiting=0)
    first = rig.submit(prompt_of(10), 10)
    with pytest.raises(QueueFull, match="no memory for it now, and 0 requests wait already"):
        rig.submit(prompt_of(10, seed=1), 10)
    assert rig.scheduler.slots.num_waiting == 0
    rig.run(first)
    rig.run(rig.submit(prompt_of(10, seed=2), 10))
    rig.end()


# --- reuse ----------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_in_its_slot_and_a_part_of_it_is_copied() -> None:
    rig = Rig(keep=True, chunk=64)
    first = rig.answer(TEXT[:40], 5)
    held = rig.scheduler.slots.reserved
    assert held == rig.chain.held(rig.costs.bytes_of) == (44 * 2, 44 * 4, 44 * 6), "no more than what is kept holds"
    second = rig.answer([*first.history.tokens, 1, 2, 3], 5)
    assert second.slot == first.slot and rig.chain.forks == [(0, 0)]
    assert second.num_reused == 44  # all but its last token, which was never fed
    assert rig.scheduler.slots.num_kept == 1
    third = rig.answer([*TEXT[:30], 1, 2, 3], 5)
    assert rig.chain.forks[1:] == [(1, 0)] and third.num_reused == 30
    assert fed(rig) == {0: 52, 1: 37} and rig.scheduler.slots.num_kept == 2
    rig.end()


def test_a_prefix_of_a_live_session_is_copied_as_far_as_it_was_fed() -> None:
    rig = Rig(num_stages=1, chunk=20)
    live = rig.submit(TEXT[:100], 40)
    rig.send_one()
    rig.send_one()
    other = rig.submit([*TEXT[:90], 1], 5)
    rig.run(other)
    assert rig.chain.forks == [(other.slot, live.slot)]
    assert other.num_reused in (40, 60, 80, 90)  # whole chunks, or all that is shared
    rig.run(live)


def test_the_slot_with_most_of_the_prefix_is_the_one() -> None:
    rig = Rig(keep=True, chunk=256)
    for length in (50, 90, 70):
        rig.answer([*TEXT[:length], 1, 2], 1)
    assert rig.answer([*TEXT[:80], 3, 4], 1).num_reused == 80
    assert rig.chain.forks[-1][1] == 1


@pytest.mark.parametrize(("num_shared", "hits"), [(15, 0), (16, 1)])
def test_a_short_common_beginning_is_not_worth_a_copy(num_shared: int, hits: int) -> None:
    rig = Rig(keep=True, chunk=64)
    rig.answer([*TEXT[:num_shared], 1, 2], 2)
    rig.answer([*TEXT[:num_shared], 3, 4], 2)
    assert len(rig.chain.forks) == hits


def test_where_a_cache_cannot_be_cut_only_what_goes_on_where_it_ends_is_reused() -> None:
    rig = Rig(keep=True, chunk=64, cuttable=0)
    first = rig.answer(TEXT[:60], 5)
    assert rig.answer([*TEXT[:40], 1, 2], 5).num_reused == 0
    assert rig.answer([*first.history.tokens, 1], 5).num_reused == 64
    rig.end()
    for length, reused in ((50, 40), (60, 0)):  # it can be cut while it is short enough
        rig = Rig(keep=True, chunk=64, cuttable=55)
        rig.answer(TEXT[:length], 2)
        assert rig.answer([*TEXT[:40], 1, 2], 2).num_reused == reused


class OnGrid(Verified):
    grid = 4


@pytest.mark.parametrize(("num_shared", "num_reused"), [(39, 36), (36, 36), (35, 32), (17, 16), (16, 16), (15, 0)])
def test_tokens_of_a_grid_are_reused_in_whole_blocks(num_shared: int, num_reused: int) -> None:
    rig = Rig(num_stages=2, chunk=256, keep=True)
    rig.answer(TEXT[:60], 1)
    second = rig.submit([*TEXT[:num_shared], TEXT[num_shared] ^ 1, 2, 3], 1, decoder=OnGrid())
    assert rig.scheduler.schedule() is not None
    assert second.num_reused == num_reused


def test_nobody_begins_with_what_was_fed_under_another_api_key() -> None:
    rig = Rig(keep=True, chunk=64)
    for owner, reused in (("ada", 0), ("bob", 0), ("ada", 49), ("bob", 49)):
        assert rig.answer(TEXT[:50], 2, owner=owner).num_reused == reused
    assert rig.scheduler.slots.num_kept == 2
    rig.end()


LONG = prompt_of(9000, seed=5)


def test_where_it_cannot_be_cut_the_next_turn_goes_on_from_the_deepest_snapshot() -> None:
    """Its template dropped the thoughts of the turn before."""
    rig = Rig(keep=True, chunk=500, cuttable=0)
    first = rig.answer(LONG[:6000], 5, turn_ends=(300, 5990))
    assert first.snapshots == (300, 4096, 5990)
    ends = [base + rows for _, base, rows, wanted in rig.chain.windows if not wanted]
    assert ends == [300, 800, 1300, 1800, 2300, 2800, 3300, 3800, 4096, 4596, 5096, 5596, 5990]
    second = rig.answer([*LONG[:5995], *prompt_of(1000, seed=9)], 5, turn_ends=(300, 6900))
    assert second.num_reused == 5990
    assert second.snapshots == (300, 4096, 5990, 6900) and rig.scheduler.slots.num_kept == 2
    third = rig.answer([*LONG[:4500], *prompt_of(100, seed=8)], 5)
    assert (third.num_reused, third.snapshots) == (4096, (300, 4096, 4500))
    rig.end()


def test_what_two_requests_begin_with_is_known_to_the_third() -> None:
    rig = Rig(keep=True, chunk=500, cuttable=0)
    for seed, reused in ((1, 0), (2, 0), (3, 1000), (4, 1000)):
        assert rig.answer([*LONG[:1000], *prompt_of(300, seed=seed)], 2).num_reused == reused


def test_snapshots_take_only_memory_that_nobody_needs() -> None:
    rows = 1000 + 5
    for budget, snapshots in ((rows + 3, ()), (rows + 8, (300,)), (rows + 13, (300, 900))):  # of 10 bytes, rows of 2
        rig = Rig(num_stages=1, keep=True, chunk=500, cuttable=0, budget=budget)
        assert rig.answer(LONG[:1000], 5, turn_ends=(300, 900)).snapshots == snapshots
        rig.end()
    rig.answer(prompt_of(1005, seed=3), 5)  # and give way to those who do
    assert rig.scheduler.slots.num_kept == 1


@pytest.mark.parametrize(("cuttable", "length", "num_reused"), [(PLENTY, 1000, 900), (0, 2004, 2004), (0, 900, 700)])
def test_a_cancel_before_the_first_frame_keeps_what_was_taken_over(cuttable: int, length: int, num_reused: int) -> None:
    rig = Rig(num_stages=1, chunk=256, keep=True, cuttable=cuttable, budget=9000)
    text = rig.answer(prompt_of(2000), 5, turn_ends=(700,)).history.tokens[:length]
    busy = [rig.submit(prompt_of(3000, seed=seed), 5) for seed in (1, 2)]
    rig.send_all()
    rig.scheduler.close(rig.submit([*text, 1, 2, 3], 5), keep=True)
    again = rig.submit([*text, 4, 5], 5)
    rig.run(*busy, again)
    assert again.num_reused >= num_reused
    rig.end()


def test_snapshots_leave_the_memory_that_the_answer_needs_to_end() -> None:
    rig = Rig(num_stages=1, chunk=500, cuttable=0, budget=2000)
    session = rig.answer(LONG[:1000], 1000, turn_ends=(300, 900))
    assert (session.snapshots, session.finish_reason) == ((), "length")


def test_the_memory_of_the_snapshot_that_is_sent_is_not_the_answers() -> None:
    slots = Slots(replace(costs_per_row(1000, num_stages=1, cuttable=0), context=40_000))
    session = make_session(prompt_of(600), 5000)
    for session.feeds_apart, most_rows in ((False, 1000), (True, 995)):  # of 2 bytes, and the snapshot of 10
        assert slots.most_rows(session) == most_rows


def test_a_slot_that_was_taken_over_is_copied_only_where_its_long_rows_can_be_cut() -> None:
    """It holds them until its first window: here while the frames of another prompt fill the pipe."""
    rig = Rig(num_stages=2, chunk=256, cuttable=1023, budget=4000, keep=True)
    rig.answer([*LONG[:700], *prompt_of(2600, 1)], 5, turn_ends=(700,))
    rig.answer(prompt_of(3, seed=9), 1)
    busy = rig.submit(prompt_of(300, 5), 5)
    rig.send_all()
    long = rig.submit([*LONG[:700], *prompt_of(2000, 2)], 5, turn_ends=(700,))
    short = rig.submit([*LONG[:300], *prompt_of(20, 3)], 5)
    rig.run(busy, long, short)
    assert (long.num_reused, short.num_reused) == (700, 0)


def test_a_slot_has_at_most_8_snapshots_and_ends_of_turns_go_last() -> None:
    session = make_session(LONG, 5, turn_ends=(300, 700, 8990))
    session.take_slot(0)
    session.snapshots = (300, 700, 2000, 2600, 3000, 4096, 8192)
    assert session.snapshots_with(8990) == (300, 700, 2000, 2600, 3000, 4096, 8192, 8990)
    session.snapshots = (300, 700, 2000, 2600, 3000, 3900, 4096, 8192)
    assert session.snapshots_with(8990) == (300, 700, 2000, 2600, 3000, 3900, 8192, 8990)
    session = make_session(LONG, 5, turn_ends=(*range(300, 2700, 300), 8990))
    session.snapshots = tuple(range(300, 2700, 300))
    assert session.snapshots_with(8990) == (*range(600, 2700, 300), 8990)


def test_a_kept_slot_that_another_covers_is_dropped() -> None:
    rig = Rig(keep=True, chunk=256)
    rig.answer(TEXT[:60], 1)
    long = rig.answer(TEXT[:100], 1)  # takes it over
    again = rig.answer(TEXT[:100], 1)
    assert rig.scheduler.slots.num_kept == 1 and fed(rig) == {again.slot: 100}
    assert long.slot != again.slot, "a copy, since it did not go on where the other ended"


def test_at_most_64_slots_are_kept_the_latest_ones() -> None:
    rig = Rig(keep=True, chunk=64)
    for seed in range(70):
        rig.answer(prompt_of(20, seed=seed), 1)
    assert rig.scheduler.slots.num_kept == len(rig.chain.slots) == 64
    assert rig.answer(prompt_of(20, seed=5), 1).num_reused == 0
    assert rig.answer(prompt_of(20, seed=69), 1).num_reused == 19


# --- short memory ---------------------------------------------------------------------------------------------------


def kept_three(budget: int) -> Rig:
    """Three kept slots of 41 rows, used in the order 1, 2, 0."""
    rig = Rig(keep=True, chunk=64, budget=budget)
    for seed in range(3):
        rig.answer(prompt_of(40, seed=seed), 2)
    rig.keep = False
    rig.answer([*prompt_of(40)[:30], 1], 2)  # a copy of slot 0
    return rig


def test_the_least_recently_used_slot_gives_way_first_and_none_without_need() -> None:
    for budget, num_kept in ((160, 2), (200, 3)):
        rig = kept_three(budget)
        rig.submit(prompt_of(50, seed=9), 10)
        rig.send_all()
        assert {0, 2} <= rig.chain.slots.keys() and rig.scheduler.slots.num_kept == num_kept
        assert (1 in rig.chain.slots) == (num_kept == 3)


def test_a_number_is_used_again_once_the_frame_that_closed_its_slot_has_passed_all_stages() -> None:
    """Where one node makes the answers its frames go no further: what they close would stay open on the others."""
    for answers_alone in (False, True):
        rig = Rig(keep=True, chunk=64, budget=110, answers_alone=answers_alone)
        rig.answer(prompt_of(40), 2)
        rig.answer(prompt_of(40, seed=1), 2)
        used = set(rig.chain.slots)
        session = rig.submit(prompt_of(50, seed=2), 10)
        assert rig.scheduler.slots.num_kept == 1 and session.slot not in used
        rig.run(session)
        rig.drain()
        other = rig.submit(prompt_of(3, seed=3), 2)
        assert other.slot in used - set(rig.chain.slots), "the number is free by now"
        rig.run(other)
        rig.end()


def test_the_slot_that_a_session_copies_goes_last_and_then_becomes_its_own() -> None:
    """Slot 1 is the least recently used, but it has the prefix: the others go first, then it is taken over and cut."""
    rig = kept_three(budget=160)
    other = rig.submit([*prompt_of(40, seed=1)[:30], 1], 40)  # 71 rows: without slot 2 there is room for a copy
    rig.send_all()
    assert rig.chain.forks[-1] == (other.slot, 1) and rig.scheduler.slots.num_kept == 2
    assert {0, 1} <= rig.chain.slots.keys()
    rig = kept_three(budget=160)
    greedy = rig.submit([*prompt_of(40, seed=1)[:30], 1], 120)  # 151 rows: no other session fits beside it
    rig.send_all()
    assert rig.chain.forks[-1] == (1, 1) and greedy.num_reused == 30
    assert rig.chain.slots.keys() == {1} and rig.scheduler.slots.num_kept == 0
    rig.run(greedy)
    rig.end()


def test_a_slot_with_the_prefix_is_taken_over_before_a_session_of_the_background_loses_its_own() -> None:
    rig = kept_three(budget=400)
    other = rig.submit(prompt_of(50, seed=9), 100, priority=1)
    rig.step_until(lambda: other.num_generated)
    better = rig.submit([*prompt_of(40, seed=1)[:30], 1], 200)  # fits beside the other one, but not beside slot 1
    assert other.slot is not None and better.slot == 1 and better.num_reused == 30
    rig.run(other, better)
    rig.end()


def test_a_cancel_before_the_first_frame_frees_a_slot_that_was_taken_over() -> None:
    rig = Rig(keep=True, chunk=64)
    first = rig.answer(prompt_of(40), 5)
    session = rig.submit([*first.history.tokens, 1], 5)
    assert session.slot == first.slot
    rig.scheduler.close(session)
    [frame] = rig.send_all()
    assert list(frame.closed) == [first.slot] and not frame.opened
    assert rig.chain.slots == {} and not any(rig.scheduler.slots.reserved)


def test_what_a_takeover_gives_back_lets_the_next_one_in() -> None:
    """A kept slot of 90 rows is taken over by a session of 50, and 40 are enough for the one that waits."""
    rig = Rig(num_stages=2, budget=100, keep=True, chunk=16)
    shared = prompt_of(20)
    rig.answer(shared + prompt_of(60, 1), 10)
    first = rig.submit(shared + prompt_of(5, 2), 25)
    second = rig.submit(prompt_of(20, 3), 20)
    assert first.slot is not None and second.slot is None
    rig.step()
    assert first.finish_reason is None and second.slot is not None
    rig.run(first, second)
    rig.end()


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


MIB = 2**20
ROW = 2 * 8 * 128 * 2  # keys and values of 8 heads of 128 numbers in bfloat16
FULL, INT8, ROTATING = Cache(), Cache(kind=CACHE_INT8), Cache(kind=CACHE_ROTATING, size=1000, keep=4)
WHOLE = LayerSpec(7, (Memory(None, 8, 128, 128, 2),))
SLIDING = LayerSpec(7, (Memory(512, 8, 128, 128, 2),))
RECURRENT = LayerSpec(7, (Memory(state_arrays=2, state_bytes=5 * MIB),))


@pytest.mark.parametrize(
    ("layers", "cache", "context", "mib"),
    [
        ((WHOLE,) * 36, FULL, 2048, 288),
        ((WHOLE,) * 36, FULL, 2100, 576),  # a capacity is a power of two of blocks
        ((WHOLE,) * 36, FULL, 4097, 720),  # beyond 4,096 rows it grows by an eighth of the next power of two
        ((WHOLE,) * 36, INT8, 2100, 36 * 2304 * (2048 + 128) / MIB),  # never packed
        ((WHOLE,) * 36, ROTATING, 2100, 36 * 2048 * ROW / MIB),
        ((WHOLE, *[SLIDING] * 5) * 6, FULL, 2100, (6 * 4096 + 30 * 1536) * ROW / MIB),
        ((WHOLE, *[RECURRENT] * 3) * 9, FULL, 2100, 9 * 4096 * ROW / MIB + 27 * 2 * 5),
    ],
)
def test_what_a_plan_says_fits_is_let_in(layers: tuple[LayerSpec, ...], cache: Cache, context: int, mib: float) -> None:
    spec = ModelSpec("tiny", "qwen3", layers, 0, 0, False, 64, 99, 8192, DTYPE_BFLOAT16, cache=cache)
    weights, needed = 36 * 7, round(mib * MIB)
    for budget in (weights + needed, weights + needed - 1):
        found = plan(spec, [Node("mini", budget)], NO_SPEEDS, Objective(context))
        assert found.assignments[0].cache_bytes == needed
        slots = Slots(cache_costs(found, spec))
        session = make_session([1] * (context - 10), 10, cache=cache)
        if found.fits:
            slots.add(session)
            assert slots.reserved == (needed,)
        else:
            with pytest.raises(InputError, match="of cache on mini"):
                slots.add(session)
    assert not found.fits
