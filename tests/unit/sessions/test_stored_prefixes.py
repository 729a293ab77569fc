"""Prefixes on disk, as the scheduler sees them: what is written and read when, and what a lost piece changes."""

import random
from collections.abc import Sequence

import pytest

from coordinator.sessions.session import Session
from coordinator.sessions.stored_prefixes import PIECE_TOKENS, StoredPrefixes
from protos.brigade_pb2 import CACHE_INT8, Cache, Piece
from tests.unit.fake_chain import PLENTY, Rig, prompt_of

KEY = bytes(32)
LONG = prompt_of(2 * PIECE_TOKENS + 40)


def rig_with(pieces: Sequence[Piece] = (), cuttable: int = PLENTY, key: bytes = KEY, **more: int) -> Rig:
    stored = StoredPrefixes(key, pieces, lambda cache: cuttable)
    return Rig(keep=True, cuttable=cuttable, chunk=256, stored=stored, **more)  # type: ignore[arg-type]


def written(rig: Rig) -> list[Piece]:
    return [store.piece for frame in rig.chain.frames for store in frame.stores]


def read(rig: Rig) -> list[bytes]:
    return [window.stored for frame in rig.chain.frames for window in frame.windows if window.stored]


def restarted(rig: Rig, cuttable: int = PLENTY, **more: int) -> Rig:
    """Other stages with the same disks."""
    other = rig_with(written(rig), cuttable, **more)
    other.chain.disk = rig.chain.disk
    return other


def test_pieces_follow_each_other_and_are_read_once_in_their_order() -> None:
    rig = rig_with()
    rig.answer(LONG)
    ends = [(piece.begin, piece.end) for piece in written(rig)]
    assert ends == [(0, PIECE_TOKENS), (PIECE_TOKENS, 2 * PIECE_TOKENS)]
    again = restarted(rig)
    session = again.answer(LONG)
    assert read(again) == [piece.name for piece in written(rig)] and not written(again)
    assert session.num_reused == 2 * PIECE_TOKENS
    assert session.num_rows == 40 + 2
    assert again.answer([*LONG, 7]).num_reused >= len(LONG), "what is in memory is nearer"
    assert len(read(again)) == 2


def test_a_session_that_nothing_can_be_cut_of_is_kept_from_snapshot_to_snapshot() -> None:
    rig = rig_with(cuttable=10)
    rig.answer(LONG, turn_ends=(300, 900))
    assert [(piece.begin, piece.end) for piece in written(rig)] == [(0, 300), (300, 900)]
    again = restarted(rig, 10)
    longer = [*LONG, *prompt_of(300, 5)]
    session = again.answer(longer, turn_ends=(300, 900, 1300))
    assert session.num_reused == 900
    assert [(piece.begin, piece.end) for piece in written(again)] == [(900, 1300)]
    third = restarted(again, 10)
    third.chain.disk |= rig.chain.disk
    assert third.answer(longer).num_reused == 0, "not all nodes have its beginning"


@pytest.mark.parametrize("other", ["key", "owner", "cache", "text"])
def test_names_differ_with_the_secret_the_api_key_the_cache_and_every_token(other: str) -> None:
    rig = rig_with()
    rig.answer(LONG)
    again = rig_with(written(rig), key=bytes(31) + b"1" if other == "key" else KEY)
    again.chain.disk = rig.chain.disk
    more = {"owner": {"owner": "else"}, "cache": {"cache": Cache(kind=CACHE_INT8)}}.get(other, {})
    text = [(LONG[0] + 1) % 50, *LONG[1:]] if other == "text" else LONG
    session = again.answer(text, **more)
    assert session.num_reused == 0 and not read(again)
    assert not {piece.name for piece in written(again)} & {piece.name for piece in written(rig)}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("cuttable", [PLENTY, 10])
def test_a_lost_piece_costs_its_session_time_and_is_written_again(number: int, cuttable: int) -> None:
    rig = rig_with(cuttable=cuttable)
    rig.answer(LONG, turn_ends=(300, 900))
    names = [piece.name for piece in written(rig)]
    again = restarted(rig, cuttable)
    del again.chain.disk[names[number]]
    session = again.answer(LONG, turn_ends=(300, 900))
    assert session.num_reused == (0 if number == 0 else 300 if cuttable == 10 else PIECE_TOKENS)
    assert read(again) == names[: number + 1] + names[:number]
    assert [piece.name for piece in written(again)] == [names[number]]
    assert restarted(rig, cuttable).answer(LONG).num_reused >= 900


def test_a_session_that_ends_while_it_reads_is_neither_kept_nor_copied() -> None:
    rig = rig_with()
    rig.answer(LONG)
    again = restarted(rig)
    again.chain.disk.clear()
    first = again.submit(LONG)
    [_] = again.send_all()
    second = again.submit(LONG)
    again.send_all()
    assert not again.chain.forks
    again.scheduler.close(first, keep=True)
    assert again.scheduler.slots.num_kept == 0
    again.run(second)
    again.end()


def test_beside_streams_a_piece_is_written_once_in_many_frames() -> None:
    rig = rig_with(num_stages=2)
    stream = rig.submit(prompt_of(5), 400)
    rig.run(rig.submit(LONG))
    rig.step_until(lambda: stream.finish_reason)
    steps = [frame.step for frame in rig.chain.frames if frame.stores]
    assert len(steps) == 2 and steps[1] - steps[0] >= 64 and steps[-1] < rig.chain.frames[-1].step


@pytest.mark.parametrize("cuttable", [PLENTY, 10])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_lost_and_shared_answers_are_the_same(seed: int, cuttable: int) -> None:
    numbers = random.Random(seed)
    rig = rig_with(cuttable=cuttable, budget=9000)
    pieces: dict[bytes, Piece] = {}
    reused = 0
    for _ in range(6):
        sessions: list[Session] = []
        for _ in range(numbers.randrange(1, 6)):
            text = prompt_of(1800, numbers.randrange(2))[: numbers.randrange(200, 1800)]
            text += prompt_of(numbers.randrange(300), numbers.randrange(3))
            ends = tuple(sorted(numbers.sample(range(1, len(text)), 3)))
            sessions.append(rig.submit(text, numbers.randrange(1, 9), turn_ends=ends))
            for _ in range(numbers.randrange(4)):
                rig.send_one()
        rig.run(*sessions)
        reused += sum(session.num_reused for session in sessions)
        rig.drain()
        pieces |= {piece.name: piece for piece in written(rig)}
        disk = rig.chain.disk
        rig = rig_with(list(pieces.values()), cuttable, budget=9000)
        rig.chain.disk = {name: tokens for name, tokens in disk.items() if numbers.random() < 0.9}
    assert reused > 1000


@pytest.mark.parametrize("cuttable", [PLENTY, 10])
def test_a_chain_that_retires_writes_what_running_sessions_have_and_goes_no_further(cuttable: int) -> None:
    """Frames in flight come to their end first; a session that waits has nothing, nor has one at its first chunk."""
    rig = rig_with(cuttable=cuttable, num_stages=2)
    first, second = rig.submit(LONG, 50, turn_ends=(300, 900)), rig.submit(prompt_of(600, 1), 50)
    rig.step_until(lambda: first.num_generated > 2 and second.num_generated > 2)
    late = rig.submit(prompt_of(700, 2))
    rig.send_all()
    rig.scheduler.retire()
    numbers = first.num_generated, second.num_generated
    rig.drain()
    pieces = [(piece.begin, piece.end) for piece in written(rig)]
    of_first = [(0, 512), (512, 1024)] if cuttable == PLENTY else [(0, 300), (300, 900)]
    assert pieces == [*of_first, *([(0, 512)] if cuttable == PLENTY else [])]
    assert rig.scheduler.slots.stored_names(of_running=True) == {piece.name for piece in written(rig)}
    assert rig.scheduler.is_idle and rig.scheduler.schedule() is None
    assert first.num_generated - numbers[0] <= 1 >= second.num_generated - numbers[1] and not late.num_generated
    again = restarted(rig, cuttable)
    session = again.answer([*LONG, *first.generated], turn_ends=(300, 900))
    assert session.num_reused == of_first[-1][1]


def test_nothing_of_ended_sessions_is_written_while_running_ones_wait() -> None:
    rig = rig_with()
    stream = rig.submit(prompt_of(600, 1), 50)
    rig.step_until(lambda: stream.num_generated > 2)
    ended = rig.submit(prompt_of(700, 2), 1)
    rig.step_until(lambda: ended.finish_reason)
    rig.scheduler.retire()
    rig.drain()
    assert len(written(rig)) == 1
    assert rig.scheduler.slots.stored_names(of_running=True) == {written(rig)[0].name}


def test_a_piece_that_a_stage_does_not_write_is_not_counted_as_stored_and_its_slot_not_asked_again() -> None:
    rig = rig_with()
    rig.run(session := rig.submit(LONG))
    [frame] = rig.send_all()
    result = rig.chain.receive()
    result.failures.add(slot=frame.stores[0].slot, kind="PrefixLost")
    assert rig.scheduler.commit(result) == [] and rig.scheduler.schedule() is None
    rig.answer([*LONG, *session.generated, 1])
    assert [(piece.begin, piece.end) for piece in written(rig)][1:] == [(0, 512), (512, 1024)]


def test_a_slot_that_was_taken_over_is_not_written_under_its_old_owner() -> None:
    rig = rig_with(num_stages=2)
    rig.run(first := rig.submit(LONG))
    stream = rig.submit([*LONG, *first.generated, 4], 300)
    rig.run(stream)
    rig.drain()
    assert [(piece.begin, piece.end) for piece in written(rig)] == [(0, 512), (512, 1024)]
    assert rig.chain.forks
