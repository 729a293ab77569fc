"""The scheduler, driven against a chain that checks every frame the way a stage does."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from coordinator.decoding.decode_options import make_decode
from coordinator.decoding.decoders import Proposal, Verified
from coordinator.planning.costs import ChainCosts
from coordinator.sessions.scheduler import Scheduler
from coordinator.sessions.session import LEAST_PROGRESS, Session
from protos.brigade_pb2 import Failure, Frame, Result
from tests.unit.fake_chain import Rig, decoders, make_session, prompt_of
from worker.compute.header import MOST_GRAMMAR

DECODERS = decoders()


def streaming(rig: Rig, num_sessions: int, max_tokens: int = 1000) -> list[Session]:
    """So many sessions that have their first token, each from a prompt of its own, with nothing in flight."""
    sessions = [rig.submit(prompt_of(3, seed=number), max_tokens) for number in range(num_sessions)]
    rig.step_until(lambda: all(session.num_generated for session in sessions))
    while rig.chain.in_flight:
        rig.take_one()
    return sessions


def slots_of(frame: Frame) -> list[int]:
    return [window.slot for window in frame.windows]


def is_chunk_of(frame: Frame, session: Session) -> bool:
    return any(window.slot == session.slot and not window.wanted for window in frame.windows)


class Counting(Verified):
    """One token per step, which notes how many sessions share its last one."""

    num_together = 0

    def propose(self, tokens: Sequence[int], num_unfed: int, room: int, num_together: int = 1) -> Proposal:
        self.num_together = num_together
        return super().propose(tokens, num_unfed, room)


# --- what a frame is ------------------------------------------------------------------------------------------------


def test_every_decoder_is_told_how_many_sessions_share_the_frame() -> None:
    rig, counting = Rig(num_stages=1), Counting()
    rig.submit(prompt_of(3, seed=9), 1000, decoder=counting)
    streaming(rig, 4)
    rig.step()
    assert counting.num_together == 5


def test_a_slot_is_opened_by_the_first_frame_with_its_sampling_and_closed_by_the_one_after_the_end() -> None:
    rig = Rig(epoch=3)
    assert rig.scheduler.schedule() is None and rig.scheduler.is_idle
    rig.submit(prompt_of(2), 2, seed=77)
    rig.send_all()
    assert not rig.scheduler.is_idle
    rig.drain()
    opened = [[opening.slot for opening in frame.opened] for frame in rig.chain.frames]
    closed = [list(frame.closed) for frame in rig.chain.frames]
    assert opened == [[0], [], []] and closed == [[], [], [0]] and rig.chain.openings == [(0, 77)]
    assert {frame.epoch for frame in rig.chain.frames} == {3}
    assert not rig.chain.frames[-1].windows
    assert rig.chain.slots == {} and rig.scheduler.is_idle


# --- lanes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_stages", "num_sessions", "num_lanes", "sizes"),
    [
        (1, 5, None, [5]),
        (2, 1, None, [1]),
        (2, 5, None, [3, 2]),
        (3, 2, None, [1, 1]),
        (3, 7, None, [3, 3, 1]),
        (4, 9, None, [3, 3, 3]),
        (8, 1, None, [1]),  # its next token depends on the last one
        (3, 7, 1, [7]),
        (3, 7, 2, [4, 3]),
    ],
)
def test_streams_share_as_many_lanes_as_the_chooser_says_or_there_are_stages(
    num_stages: int, num_sessions: int, num_lanes: int | None, sizes: list[int]
) -> None:
    asked: list[int] = []

    def choose(num_sessions: int, rows_each: float) -> int:
        asked.append(num_sessions)
        return num_lanes or 1

    rig = Rig(num_stages=num_stages, lanes=choose if num_lanes else None)
    sessions = streaming(rig, num_sessions)
    frames = rig.send_all()
    assert [len(frame.windows) for frame in frames] == sizes
    assert sorted(slot for frame in frames for slot in slots_of(frame)) == sorted(s.slot for s in sessions)
    for _ in range(20):
        rig.take_one()
        assert len(rig.send_all()) == 1, "a lane that has come back goes again, whole"
        assert sorted(map(len, rig.chain.lanes_in_flight)) == sorted(sizes)
    assert not num_lanes or asked[-1] == num_sessions


def test_sessions_that_are_paused_for_their_readers_count_neither_for_lanes_nor_as_streams() -> None:
    rig = Rig(num_stages=2)
    sessions = streaming(rig, 8)
    for session in sessions[2:]:
        session.is_paused = True
    rig.send_all()
    assert [len(lane) for lane in rig.chain.lanes_in_flight] == [1, 1], "both stages are at work"
    for session in sessions[:2]:
        rig.scheduler.close(session)
    rig.drain()
    rig.submit(prompt_of(100, seed=9))
    rig.send_all()
    assert len(rig.chain.in_flight) == 3, "a prompt fills the pipe"


@pytest.mark.parametrize("seed", range(8))
def test_whoever_comes_and_goes_lanes_are_few_and_equal_and_nobody_waits_while_another_steps_twice(seed: int) -> None:
    numbers = random.Random(seed)
    num_stages = numbers.randint(1, 5)
    rig = Rig(num_stages=num_stages, chunk=6)
    alive: list[Session] = []
    lanes: set[int] = set()  # by step
    passed: dict[Session, Counter[Session]] = {}  # since it became ready: how often each other one stepped
    last: Counter[Session] = Counter()  # the step of its latest window
    for number in range(600):
        if numbers.random() < 0.1 and len(alive) < 12:
            prompt = prompt_of(numbers.choice([1, 2, 5, 20]), seed=number)
            alive.append(rig.submit(prompt, numbers.randint(1, 30), decoder=numbers.choice([*DECODERS.values()])()))
        decoding = [session for session in alive if not session.is_prefilling]
        ready = {session for session in decoding if session.is_ready}
        frame = rig.send_one()
        stepping = {session for session in ready if frame and session.slot in slots_of(frame)}
        if stepping:
            assert frame and len(frame.windows) == len(stepping) <= -(-len(decoding) // num_stages)
            for waiting in ready - stepping:
                assert max(last[session] for session in stepping) <= last[waiting], "the latest first"
                passed.setdefault(waiting, Counter()).update(stepping)
                assert max(passed[waiting].values()) == 1
            for session in stepping:
                passed.pop(session, None)
            lanes.add(frame.step)
        last.update({each: frame.step - last[each] for each in alive if frame and each.slot in slots_of(frame)})
        in_flight = [frame for frame, _ in rig.chain.in_flight if frame.step in lanes]
        assert len(in_flight) <= num_stages
        slots = [slot for frame in in_flight for slot in slots_of(frame)]
        assert len(set(slots)) == len(slots), "in two lanes at once"
        if rig.chain.in_flight and (frame is None or numbers.random() < 0.3):
            rig.take_one()
        alive = [session for session in alive if session.finish_reason is None]


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
@pytest.mark.parametrize("answers_alone", [False, True])
def test_while_nobody_streams_a_prompt_fills_the_pipe_and_no_more(num_stages: int, *, answers_alone: bool) -> None:
    """Where caches travel back they are a stage more."""
    rig = Rig(num_stages=num_stages, chunk=2, answers_alone=answers_alone)
    rig.submit(prompt_of(100))
    rig.send_all()
    assert len(rig.chain.in_flight) == num_stages + 1 + answers_alone
    rig.take_one()
    rig.send_all()
    assert len(rig.chain.in_flight) == num_stages + 1 + answers_alone


@pytest.mark.parametrize(("num_stages", "num_streams"), [(1, 1), (2, 5), (3, 1), (8, 5)])
def test_beside_streams_a_chunk_per_stage_is_in_flight(num_stages: int, num_streams: int) -> None:
    rig = Rig(num_stages=num_stages, chunk=4)
    streams = streaming(rig, num_streams)
    rig.send_all()
    rig.take_one()
    long = [rig.submit(prompt_of(200, seed=seed), max_tokens=1) for seed in (1, 2)]
    num_chunks, most = 0, []
    while not all(session.num_generated for session in long):
        num_chunks += sum(any(is_chunk_of(frame, session) for session in long) for frame in rig.send_all())
        chunks = [frame for frame, _ in rig.chain.in_flight if any(is_chunk_of(frame, session) for session in long)]
        most.append(len(chunks))
        rig.take_one()
    assert max(most) == num_stages and max(most[:2]) == 1
    assert max(later - before for before, later in pairwise(most)) == 1, "no two enter at once"
    assert num_chunks >= 98 and all(session.finish_reason is None for session in streams)
    if num_stages == 1:  # a stream steps between any two chunks
        steps = [slot == streams[0].slot for slot, *_ in rig.chain.windows[2:]]
        assert steps[:80] == [False, True] * 40 or steps[:80] == [True, False] * 40


def test_the_oldest_prompt_and_the_shortest_take_turns() -> None:
    rig = Rig(num_stages=1, chunk=4)
    oldest, middle, shortest = (rig.submit(prompt_of(length), 1) for length in (60, 80, 30))
    order = []
    while len(order) < 14:
        rig.send_all()
        order = [slot for slot, *_ in rig.chain.windows]
        rig.take_one()
    assert order[:14] == [oldest.slot, shortest.slot] * 7
    rig.run(oldest, middle, shortest)
    assert [slot for slot, *_ in rig.chain.windows].count(middle.slot) == 20


def test_beside_a_long_prompt_a_short_one_has_its_first_token_within_a_few_chunks() -> None:
    rig = Rig(num_stages=2, chunk=8)
    streaming(rig, 1)
    long = rig.submit(prompt_of(800), 1)
    for _ in range(10):
        rig.step()
    short = rig.submit(prompt_of(5), 1)
    before = long.fed
    rig.run(short)
    assert long.fed - before <= 2 * 8


def test_short_prompts_share_a_frame_as_far_as_they_fit_into_a_chunk() -> None:
    rig = Rig(num_stages=2, chunk=16)
    sessions = [rig.submit(prompt_of(length, seed=length), 1) for length in (5, 6, 7, 3, 2)]
    rig.send_all()
    lengths = [[len(window.tokens) for window in frame.windows] for frame in rig.chain.frames]
    assert lengths == [[5, 6, 3, 2], [7]]
    rig.run(*sessions)


def test_prompts_share_a_frame_as_far_as_their_grammars_fit_into_one_message() -> None:
    rig = Rig(chunk=64)
    for number, share in enumerate((2, 3, 3, 1)):
        session = rig.submit(prompt_of(5, seed=number), 1)
        session.request.sampling.grammar.text = "x" * (MOST_GRAMMAR * share // 6)
    rig.send_all()
    assert [len(frame.windows) for frame in rig.chain.frames] == [3, 1]
    rig = Rig(num_stages=1)
    for number in range(3):  # of one token, which the first lane feeds
        rig.submit([number], 9).request.sampling.grammar.text = "x" * (MOST_GRAMMAR // 2)
    rig.step()
    rig.send_all()
    assert [len(frame.windows) for frame in rig.chain.frames] == [2, 3]  # stages have those of two by then


def test_a_prompt_frame_is_sized_by_all_prompts_and_takes_each_within_its_own_limit() -> None:
    asked: set[int] = set()

    def choose(session: Session, num_unfed: int, beside_streams: bool) -> int:
        asked.add(num_unfed)
        return 4 if len(session.request.prompt) == 6 else num_unfed

    rig = Rig(num_stages=1)
    rig.scheduler = Scheduler(1, rig.costs, chunk_rows=choose)
    for length in (5, 6, 7):
        rig.submit(prompt_of(length, seed=length), 1)
    frame = rig.scheduler.schedule()
    assert asked == {5 + 6 + 7}
    assert frame and [len(window.tokens) for window in frame.windows] == [5, 7]


def test_the_end_of_a_long_prompt_shares_its_frame_too() -> None:
    rig = Rig(num_stages=1, chunk=16)
    long, short = rig.submit(prompt_of(36), 1), rig.submit(prompt_of(9), 1)
    rig.run(long, short)
    assert [len(window.tokens) for window in rig.chain.frames[0].windows] == [16]
    lanes = [[long.slot], [short.slot], [long.slot], [long.slot]]  # the shortest in its turn: no chunk fits beside it
    assert [slots_of(frame) for frame in rig.chain.frames[:4]] == lanes
    rig = Rig(num_stages=1, chunk=16)
    long = rig.submit(prompt_of(20), 1)
    rig.send_one()
    short = rig.submit(prompt_of(9), 1)
    frame = rig.send_one()
    assert frame and [(w.slot, len(w.tokens)) for w in frame.windows] == [(long.slot, 4), (short.slot, 9)]


# --- who leaves early -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODERS)
def test_a_cancel_frees_the_slot_with_the_very_next_frame_at_any_moment(kind: str) -> None:
    for num_moves in range(24):
        require_freed_after(num_moves, kind)


def require_freed_after(num_moves: int, kind: str) -> None:
    rig = Rig(num_stages=2, chunk=8)
    numbers = random.Random(num_moves)
    other = rig.submit(prompt_of(11, seed=5), 40)
    session = rig.submit(prompt_of(50), 40, decoder=DECODERS[kind]())
    for _ in range(num_moves):
        if numbers.random() < 0.5 or not rig.chain.in_flight:
            rig.send_one()
        else:
            rig.take_one()
    was_opened = session.slot in rig.chain.slots
    known = session.generated
    rig.scheduler.close(session)
    frame = rig.send_one()
    assert list(frame.closed if frame else []) == ([session.slot] if was_opened else [])
    assert session.slot not in rig.chain.slots
    num_left = len(rig.chain.in_flight)
    for _ in range(num_left):
        assert all(owner is not session for owner, _ in rig.take_one())
    assert session.generated == known and session.finish_reason == "stop"
    rig.run(other)
    rig.end()


def test_to_close_twice_frees_once() -> None:
    rig = Rig()
    session = rig.answer(prompt_of(3))
    new = rig.submit(prompt_of(4))
    assert new.slot == session.slot
    rig.send_all()
    rig.scheduler.close(session)
    rig.run(new)
    rig.end()


def test_a_lane_lists_its_slots_in_their_order() -> None:
    rig = Rig(num_stages=1)
    streaming(rig, 5)
    for _ in range(3):
        rig.answer(prompt_of(3, seed=9), 2)  # it steps alone first, and those who wait meanwhile would come before it
    lanes = [slots_of(frame) for frame in rig.chain.frames if len(frame.windows) > 3]
    assert lanes and all(lane == sorted(lane) for lane in lanes)


def test_a_lane_has_no_more_rows_than_a_frame_and_a_result_take_and_every_session_has_its_turn() -> None:
    rig = Rig(num_stages=1, most_lane_rows=3)
    sessions = streaming(rig, 7)
    before = [session.num_generated for session in sessions]
    for _ in range(7):
        rig.step()
    assert max(len(frame.windows) for frame in rig.chain.frames[-7:]) == 3
    assert min(session.num_generated - count for session, count in zip(sessions, before, strict=True)) >= 2


@pytest.mark.parametrize(("num_sessions", "has_masks"), [(1, True), (16, False)])
def test_windows_are_chosen_for_all_that_share_the_step(num_sessions: int, has_masks: bool) -> None:
    """Up to 32 rows cost as much as one, 128 four times that: a window pays for one session, not for 16."""
    costs = ChainCosts(1)
    for num_rows, seconds in {1: 0.01, 32: 0.01, 128: 0.04}.items():
        for _ in range(9):
            costs.steps.observe(num_rows, seconds)
    rig = Rig(num_stages=1, most_lane_rows=4096)
    for number in range(num_sessions):
        decoder = make_decode("diffusion").make_decoder(frozenset(), costs)
        rig.submit(prompt_of(1, seed=number), 8, decoder=decoder)
    rig.step()
    assert [bool(window.masks) for window in rig.chain.frames[0].windows] == [has_masks] * num_sessions


# --- windows that a stage cannot compute ------------------------------------------------------------------------------


def failed(result: Result, slot: int | None) -> Result:
    """The result, had a stage not been able to take the window of this slot."""
    result.failures.append(Failure(slot=slot, kind="CacheMismatch", message="holds another prefix", node="mini"))
    for samples in (result.samples, result.guesses):
        for sample in [sample for sample in samples if sample.slot == slot]:
            samples.remove(sample)
    return result


@pytest.mark.parametrize("num_steps", [0, 3])
def test_only_the_session_of_a_failed_window_ends(num_steps: int) -> None:
    rig = Rig(num_stages=1, chunk=16, keep=True)
    sessions = [rig.submit(prompt_of(4, seed=seed), 12) for seed in range(3)]
    for _ in range(num_steps):
        rig.step()
    rig.send_all()
    failing, known = sessions[1], sessions[1].generated
    commits = rig.scheduler.commit(failed(rig.chain.receive(), failing.slot))
    assert (failing, []) in commits and len(commits) == 3
    assert (failing.finish_reason, failing.generated) == ("error", known)
    rig.scheduler.close(failing, keep=True)
    frame = rig.send_one()
    assert frame and list(frame.closed) == [failing.slot], "the stages do not hold the same of it: it is not kept"
    rig.run(sessions[0], sessions[2])
    assert rig.scheduler.slots.num_kept == 2
    rig.end()


def test_a_window_that_fails_after_its_session_was_interrupted_leaves_no_prefix() -> None:
    rig = Rig(num_stages=2, chunk=16)
    session = rig.submit(prompt_of(20), 12)
    rig.step_until(lambda: session.num_generated)
    rig.send_all()
    rig.scheduler.close(session, keep=True)
    assert rig.scheduler.slots.num_kept == 1
    assert rig.scheduler.commit(failed(rig.chain.receive(), session.slot)) == []
    assert rig.scheduler.slots.num_kept == 0
    frame = rig.send_one()
    assert frame and list(frame.closed) == [session.slot]
    rig.end()


def test_what_else_of_a_failed_session_is_in_flight_is_dropped() -> None:
    """A prompt's chunks follow each other: where one fails the next do, too."""
    rig = Rig(num_stages=3, chunk=4)
    session = rig.submit(prompt_of(14), 5)
    assert len(rig.send_all()) == 4
    assert rig.scheduler.commit(failed(rig.chain.receive(), 0)) == [(session, [])]
    rig.scheduler.close(session)
    other = rig.submit(prompt_of(3), 5)
    assert other.slot != session.slot
    rig.send_all()
    for _ in range(3):
        assert rig.scheduler.commit(failed(rig.chain.receive(), 0)) == []
    rig.run(other)
    assert session.generated == []
    rig.end()


# --- background sessions ----------------------------------------------------------------------------------------------

BACKGROUND = 1


def test_the_background_has_one_frame_in_so_many_until_it_is_alone() -> None:
    rig = Rig(num_stages=2)
    others = [rig.submit(prompt_of(20, seed=9 + n), 40, priority=BACKGROUND) for n in range(3)]
    rig.step_until(lambda: min(session.num_generated for session in others) >= 2)
    better = [rig.submit(prompt_of(5, seed=n), 400) for n in range(3)]
    late = rig.submit(prompt_of(20, seed=20), 5, priority=BACKGROUND)
    rig.step_until(lambda: all(session.num_generated for session in better))
    first, before = len(rig.chain.frames), [session.num_generated for session in others]
    rig.run(*better)
    frames = [{window.slot for window in frame.windows} for frame in rig.chain.frames[first:]]
    slots = {session.slot for session in better}
    shared = [frame for frame in frames if frame - slots]
    assert all(not frame & slots for frame in shared), "a lane with the background waits for it"
    assert 0 < len(shared) <= len(frames) / 20
    assert all(session.num_generated > count for session, count in zip(others, before, strict=True))
    first = len(rig.chain.frames)
    rig.run(*others, late)
    assert len(rig.chain.frames) - first < 3 * 40 + 20
    rig.end()


def test_a_better_session_takes_memory_and_turns_from_the_background() -> None:
    rig = Rig(num_stages=1, budget=600)
    others = [rig.submit(prompt_of(30, seed=9 + n), 200, priority=BACKGROUND) for n in range(4)]
    rig.step_until(lambda: rig.scheduler.slots.num_waiting >= 1 and others[0].num_generated)
    worst, better = rig.submit(prompt_of(5, seed=2), 60, priority=2), rig.submit(prompt_of(5, seed=1), 60)
    assert better.slot is not None and worst.slot is None and any(session.slot is None for session in others)
    rig.run(better)
    assert any(session.finish_reason is None for session in others)
    rig.run(*others, worst)
    rig.end()


def test_who_gave_way_and_went_on_gives_way_again_to_one_that_waits() -> None:
    rig = Rig(num_stages=1, budget=700)
    background = rig.submit(prompt_of(40), 640, priority=BACKGROUND)
    rig.step_until(lambda: background.num_generated == 100)
    rig.run(rig.submit(prompt_of(40, seed=1), 300))
    rig.step_until(lambda: background.num_generated > 101)
    urgent = rig.submit(prompt_of(40, seed=2), 300)
    assert urgent.slot is None
    rig.step_until(lambda: urgent.slot is not None)
    assert background.finish_reason is None and background.num_generated < 100 + 2 * LEAST_PROGRESS
    rig.run(urgent, background)
    rig.end()


def test_sessions_of_the_background_that_do_not_fit_into_one_lane_take_turns() -> None:
    rig = Rig(num_stages=1, most_lane_rows=40)
    better = rig.submit(prompt_of(5), 3000)
    others = [
        rig.submit(prompt_of(20, seed=n), 400, priority=BACKGROUND, decoder=DECODERS["diffusion"]())
        for n in range(1, 5)
    ]
    rig.step_until(lambda: better.num_generated > 1000)
    late = rig.submit(prompt_of(20, seed=9), 400, priority=BACKGROUND)
    rig.step_until(lambda: better.num_generated > 2000)
    assert all(each.num_generated for each in (*others, late))


def test_no_session_gives_way_to_another_one_while_its_frame_is_made() -> None:
    """One of the background that has lost its slot before may do so again once it has generated enough."""
    rig = Rig(num_stages=1, chunk=16, budget=9000)
    first = rig.submit(prompt_of(200, seed=1), 900, priority=5)
    rig.step_until(lambda: first.num_generated > 5)
    rig.run(rig.submit(prompt_of(8700, seed=2), 5))  # for which it lost its slot
    rig.step_until(lambda: first.slot is not None and first.num_generated > 8)
    others = [rig.submit(prompt_of(length, seed=length), 300, priority=5) for length in (2000, 1900, 1800)]
    urgent = rig.submit(prompt_of(8700, seed=3), 5)
    assert urgent.slot is None and all(session.slot is not None for session in others)
    rig.run(urgent, first, *others)


def test_where_the_first_node_answers_alone_its_slots_are_freed_beside_the_prompts_of_others() -> None:
    rig = Rig(num_stages=2, chunk=500, budget=4000, answers_alone=True)
    long = make_session(prompt_of(1500), 5, chunk=500)
    long.feeds_apart = True
    rig.scheduler.slots.add(long)
    prompts = rig.send_all()
    assert prompts and not any(frame.stays for frame in prompts)
    for seed in range(30):
        short = rig.submit(prompt_of(400, seed=seed), 2)
        rig.send_all()
        while short.finish_reason is None:  # the results of the first node overtake those of the others
            own = next(each for each in rig.chain.in_flight if each[0].stays)
            rig.chain.in_flight.remove(own)
            rig.scheduler.commit(own[1])
            rig.send_all()
        rig.scheduler.close(short)
        rig.send_all()
        assert rig.chain.held(rig.costs.bytes_of)[0] <= 4000 * 2
    rig.run(long)
    rig.end()
