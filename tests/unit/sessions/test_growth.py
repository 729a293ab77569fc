"""Memory for an answer is reserved as it grows; where it ends, the newest sessions give way and are replayed later."""

import random
from itertools import pairwise

import pytest

from coordinator.decoding.decoders import Verified
from coordinator.sessions.session import LEAST_PROGRESS, Session, SessionState
from tests.unit.fake_chain import Rig, decoders, make_session, prompt_of


def test_long_limits_do_not_keep_others_waiting() -> None:
    rig = Rig(budget=6 * 900)
    sessions = [rig.submit(prompt_of(20, seed=seed), 3000, frozenset()) for seed in range(6)]
    assert rig.scheduler.slots.num_waiting == 0
    rig.step_until(lambda: min(session.num_generated for session in sessions) >= 300)
    assert {session.state for session in sessions} == {SessionState.RUNNING} and rig.scheduler.slots.num_waiting == 0
    for session in sessions:
        rig.scheduler.close(session)
    rig.end()


@pytest.mark.parametrize("kind", ["ar", "ngram", "diffusion"])
def test_answers_that_outgrow_the_memory_are_those_that_they_are_alone(kind: str) -> None:
    rig = Rig(budget=1500, chunk=64, num_stages=2)
    sessions = [rig.submit(prompt_of(30, seed=seed), 1000, decoder=decoders()[kind]()) for seed in range(4)]
    preempted = watch(rig, sessions)
    rig.run(*sessions)
    assert preempted and sessions[0] not in [session for session, _ in preempted], "the oldest always runs"
    for session in sessions:
        at = [num_tokens for each, num_tokens in preempted if each is session]
        assert all(later - earlier >= LEAST_PROGRESS for earlier, later in pairwise(at))
    rig.end()


def watch(rig: Rig, sessions: list[Session]) -> list[tuple[Session, int]]:
    """Run the sessions to their ends; return those that lost their slots, and how many tokens they had then."""
    found, had = [], dict.fromkeys(sessions, False)
    while any(session.finish_reason is None for session in sessions):
        oldest = next(session for session in sessions if session.finish_reason is None)
        rig.send_all()
        for session in sessions:
            if had[session] and session.slot is None:
                found.append((session, session.num_generated))
            had[session] = session.slot is not None and session.finish_reason is None
        assert oldest.slot is not None
        assert not rig.scheduler.is_idle, "nothing goes on any more"
        held, reserved = rig.chain.held(rig.costs.bytes_of), rig.scheduler.slots.reserved
        assert rig.scheduler.slots.closed or all(h <= p for h, p in zip(held, reserved, strict=True))
        assert all(p <= b for p, b in zip(reserved, rig.costs.budgets, strict=True))
        rig.take_one()
    return found


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_and_grows_every_answer_ends_as_alone(seed: int) -> None:
    numbers = random.Random(seed)
    rig = Rig(budget=numbers.choice([700, 1000, 2000]), chunk=numbers.choice([16, 300]), keep=seed % 2 == 0)
    sessions: list[Session] = []
    for number in range(9):
        sessions.append(rig.submit(prompt_of(numbers.randrange(1, 200), seed=number), numbers.randrange(1, 490)))
        for _ in range(numbers.randrange(60)):
            if rig.send_one() or not rig.scheduler.is_idle:
                rig.take_one()
    watch(rig, sessions)
    rig.run(*sessions)
    rig.end()


def test_the_oldest_never_waits_for_one_that_is_replayed() -> None:
    """Its tokens are fed again in many small frames, and it may not give way before it has made progress."""
    rig = Rig(budget=2300, chunk=4)
    sessions = [rig.submit(prompt_of(length, seed=length), 1000) for length in (30, 400, 500)]
    oldest, waited, longest = sessions[0], 0, 0
    while oldest.finish_reason is None:
        commits = rig.step()
        waited = 0 if any(session is oldest for session, _ in commits) else waited + 1
        longest = max(longest, waited)
    assert longest < 10
    rig.run(*sessions)


def test_a_session_that_lost_its_slot_gives_way_again_only_after_some_tokens() -> None:
    session = make_session(prompt_of(5), 500, decoder=Verified())
    assert session.may_be_preempted
    session.take_slot(0)
    session.preempt()
    assert not session.may_be_preempted and session.slot is None
    session.history.extend([1] * (LEAST_PROGRESS - 1))
    assert not session.may_be_preempted
    session.is_paused = True
    assert session.may_be_preempted, "or others would wait for its reader"
    session.is_paused = False
    session.history.extend([1])
    assert session.may_be_preempted


def test_an_answer_that_ends_beside_another_is_not_preempted_for_who_waits_for_that_memory() -> None:
    """Two in the background end in one frame, one of which has lost its slot before, and a better one waits."""
    rig = Rig(budget=3000, chunk=4000, num_stages=1, lanes=lambda num_streams, share: 1)
    first, other, preempted = (
        rig.submit(prompt_of(length, seed), max_tokens, priority=5)
        for seed, (length, max_tokens) in enumerate([(20, 1), (900, 60), (900, 59)])
    )
    rig.step_until(lambda: preempted.num_generated and first.finish_reason)
    rig.run(rig.submit(prompt_of(1200, 4), 1))
    rig.step_until(lambda: preempted.slot is not None)
    waiting = rig.submit(prompt_of(2500, 5), 1)
    assert waiting.slot is None
    ended = []
    while not waiting.finish_reason:
        ended.append((other.finish_reason, preempted.finish_reason))
        rig.step()
    assert (None, "length") not in ended and ("length", None) not in ended, "they did not end in one frame"


def test_no_answer_that_has_begun_is_refused_when_its_chain_is_replaced() -> None:
    """All are replayed at the same length: the memory that they shared while some were short is too small then."""
    rig = Rig(budget=1900, chunk=64, max_waiting=0)
    sessions = [rig.submit(prompt_of(20, seed=seed), 900, frozenset()) for seed in range(3)]
    rig.step_until(lambda: min(session.num_generated for session in sessions) >= 150)
    rig.lose_chain(sessions)
    assert rig.scheduler.slots.num_waiting > 0
    rig.run(*sessions)
    rig.end()


def test_a_session_whose_reader_is_slow_takes_no_more_memory() -> None:
    rig = Rig(budget=1460, chunk=64)
    first, second = (rig.submit(prompt_of(20, seed=seed), 900) for seed in range(2))
    rig.step_until(lambda: first.num_generated > 256)
    first.is_paused = True
    rig.run(second)
    first.is_paused = False
    rig.run(first)
    rig.end()
