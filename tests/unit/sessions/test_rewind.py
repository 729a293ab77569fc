"""Sessions outlive their chain and their process: they get the tokens that they would have got without a loss."""

import random
from copy import deepcopy
from dataclasses import dataclass, field

import pytest

from coordinator.decoding.window_lengths import WindowChooser
from coordinator.planning.costs import StepCosts
from coordinator.sessions.output import NO_TOKENS, KnownTokens, Token
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Cache, Sample, Sampling
from tests.unit.fake_chain import PLENTY, Rig, costs_per_row, decoders, make_session, masked, plain_answer, prompt_of
from worker.errors import FrameError, InputError


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: list[int]
    max_tokens: int
    eos: frozenset[int] = frozenset()
    kind: str = "ar"
    seed: int = 0  # 0: greedy
    window: int = 8
    cache: Cache = field(default_factory=Cache)
    priority: int = 0
    turn_ends: tuple[int, ...] = ()

    def build(self, rig: Rig, known: KnownTokens = NO_TOKENS) -> Session:
        """A session that is not submitted yet."""
        decoder = decoders(self.eos, self.window)[self.kind]()
        sampling = Sampling(seed=self.seed, temperature=1.0 if self.seed else 0.0)
        more = {"chunk": rig.chunk, "sampling": sampling, "cache": self.cache, "known": known}
        more |= {"priority": self.priority, "turn_ends": self.turn_ends}
        return make_session(self.prompt, self.max_tokens, self.eos, decoder, **more)  # type: ignore[arg-type]

    def submit(self, rig: Rig) -> Session:
        session = self.build(rig)
        rig.scheduler.slots.add(session)
        return session

    def undisturbed(self, is_lossy: bool = True) -> list[int]:
        if not is_lossy or self.kind != "diffusion-fast":
            return plain_answer(self.prompt, self.max_tokens, self.eos, self.seed)
        rig = Rig(chunk=16)
        rig.chain.is_lossy = True
        session = self.submit(rig)
        rig.run(session)
        return session.generated


@pytest.mark.parametrize("kind", decoders())
def test_what_is_known_is_fed_as_prompt_chunks_under_the_new_epoch(kind: str) -> None:
    rig = Rig(num_stages=1, chunk=8)
    session = Asked(prompt_of(20), 40, kind=kind).submit(rig)
    rig.step_until(lambda: session.num_generated >= 20)
    known = list(session.history.tokens)
    rig.lose_chain([session])
    assert (session.slot, session.fed, session.num_reused, session.is_streaming) == (0, 0, 0, False)
    while not (asking := [w for frame in rig.chain.frames for w in frame.windows if w.wanted or w.guessed]):
        assert session.history.tokens == known
        rig.step()
    windows = [window for frame in rig.chain.frames for window in frame.windows]
    chunks = windows[: windows.index(asking[0])]
    assert [window.base for window in chunks] == list(range(0, asking[0].base, 8))
    assert [token for window in chunks for token in window.tokens] == known[: asking[0].base]
    assert all(frame.epoch == 2 for frame in rig.chain.frames)


def test_drafts_of_a_lost_step_are_not_proposed_beside_many_tokens() -> None:
    """A proposal's tokens and its drafts share the rows that were reserved."""
    decoder = masked(WindowChooser(StepCosts(), fixed=4), frozenset())
    guesses = [Sample(token=token) for token in (5, 6, 7)]
    decoder.accept(decoder.propose([1], 1, 99), guesses[:1], guesses)
    assert deepcopy(decoder).propose([1, 5], 1, 99).drafts == (6, 7)
    decoder.rewind()
    assert decoder.propose([1, 5], 2, 99).drafts == ()


def test_a_rewound_session_is_as_if_it_had_just_arrived_and_results_of_the_lost_chain_are_refused() -> None:
    rig = Rig(num_stages=1, chunk=64, keep=True)
    rig.answer(prompt_of(30), 2)
    session = rig.submit([*prompt_of(30), 7], 9)
    rig.step()
    assert session.num_reused == 30 and session.rows_written == 31
    session.rewind()
    fresh = make_session(session.history.tokens, 9)
    for name in ("slot", "fed", "num_reused", "rows_written", "num_unfed", "is_prefilling", "is_ready"):
        assert getattr(session, name) == getattr(fresh, name), name
    rig = Rig()
    session = rig.submit(prompt_of(3))
    rig.send_all()
    result = rig.chain.receive()
    rig.lose_chain([session])
    rig.send_all()
    with pytest.raises(FrameError, match=r"expected a result of epoch 2, got epoch 1 \(step 1\)"):
        rig.scheduler.commit(result)
    rig.run(session)


def test_whoever_no_longer_fits_waits_or_is_refused() -> None:
    rig = Rig(budget=200)
    first, second = rig.submit(prompt_of(50), 30), rig.submit(prompt_of(60, seed=1), 30)
    rig.step_until(lambda: first.num_generated and second.num_generated)
    rig.costs = costs_per_row(100, num_stages=3)
    rig.lose_chain([first, second])
    assert (first.slot, second.slot, rig.scheduler.slots.num_waiting) == (0, None, 1)
    rig.run(first, second)
    third = rig.submit(prompt_of(60), 30)
    rig.step()
    rig.costs = costs_per_row(80, num_stages=3)
    with pytest.raises(InputError, match="of cache on node-0"):
        rig.lose_chain([third])


def test_sessions_that_begin_alike_share_what_one_of_them_has_fed_again() -> None:
    rig = Rig(num_stages=1, chunk=40)
    sessions = [rig.submit([*prompt_of(60), seed], 20) for seed in range(2)]
    rig.step_until(lambda: all(session.num_generated > 3 for session in sessions))
    rig.lose_chain(sessions)
    rig.run(*sessions)
    assert rig.chain.forks == [(1, 0)] and sessions[1].num_reused >= 40


def test_a_second_loss_before_the_first_frame_makes_no_row_complete() -> None:
    """The first stage holds 32 rows, of which the others had returned their parts of 16."""
    rig = Rig(num_stages=1, chunk=8, answers_alone=True)
    session = Asked(prompt_of(60), 5).build(rig)
    session.feeds_apart = True
    rig.scheduler.slots.add(session)
    while len(rig.chain.frames) < 4:
        rig.send_all()
        if session.fed_apart < 16:
            rig.take_one()
    assert session.fed_apart == 16
    rig.lose_chain([], len(rig.chain.frames))
    assert rig.scheduler.slots.reserved >= rig.chain.held(rig.costs.bytes_of), "the slot has its buffers still"
    session.rewind()
    session.feeds_apart = False
    rig.scheduler.slots.add(session)
    assert (session.fed, session.num_reused) == (16, 16)
    rig.send_all()
    assert session.fed >= 24
    rig.lose_chain([session], num_begun=0)
    assert (session.fed, session.num_reused) == (16, 16)
    rig.send_all()
    assert session.num_reused_at_first == 0, "these rows are its own"
    rig.run(session)
    rig.end()


def test_the_rows_of_masks_on_the_first_node_are_reserved_on_the_next_chain() -> None:
    rig = Rig(num_stages=1, chunk=64)
    session = Asked(prompt_of(60), 40, kind="diffusion", window=32).submit(rig)
    rig.step_until(lambda: session.num_generated >= 3)
    rig.send_all()
    rig.lose_chain([], len(rig.chain.frames))
    assert rig.scheduler.slots.reserved >= rig.chain.held(rig.costs.bytes_of) > (0,)


def test_the_snapshots_on_the_first_node_are_reserved_on_the_next_chain() -> None:
    rig = Rig(num_stages=1, chunk=300, cuttable=800)
    session = rig.submit(prompt_of(900), 5, turn_ends=(300, 600))
    rig.step_until(lambda: session.fed >= 600)
    rig.lose_chain([], 2)
    assert rig.scheduler.slots.reserved >= rig.chain.held(rig.costs.bytes_of) > (1200,)


def test_where_a_new_chain_has_less_memory_the_rows_of_running_sessions_are_kept_first() -> None:
    rig = Rig(num_stages=1, chunk=64, budget=200, keep=True)
    for seed in (1, 2):
        rig.answer(prompt_of(40, seed), 3)
    session = rig.submit(prompt_of(40), 20)
    rig.step_until(lambda: session.num_generated >= 3)
    rig.costs = costs_per_row(100, num_stages=1)
    rig.lose_chain([], len(rig.chain.frames))
    assert rig.scheduler.slots.reserved <= rig.costs.budgets and rig.scheduler.slots.num_kept == 2
    session.rewind()
    rig.scheduler.slots.add(session)
    rig.run(session)
    assert session.num_reused >= 40
    rig.end()


def test_where_memory_is_short_the_rows_of_the_oldest_session_are_kept() -> None:
    rig = Rig(num_stages=1, chunk=64, budget=200)
    sessions = [rig.submit(prompt_of(40, seed), 20) for seed in range(2)]
    rig.step_until(lambda: all(session.num_generated > 3 for session in sessions))
    rig.costs = costs_per_row(70, num_stages=1)
    rig.lose_chain(sessions, len(rig.chain.frames))
    rig.run(*sessions)
    assert [session.num_reused >= 40 for session in sessions] == [True, False]


def test_a_resumed_answer_with_fills_goes_on_where_the_first_stage_holds_its_rows() -> None:
    asked = Asked(prompt_of(40), 30, kind="diffusion-fast")
    rig = Rig(num_stages=1, chunk=64)
    first = asked.submit(rig)
    rig.step_until(lambda: first.fills)
    rig = Rig(num_stages=1, chunk=64)
    session = asked.build(rig, KnownTokens(tuple(map(Token, first.generated)), tuple(first.fills)))
    rig.scheduler.slots.add(session)
    for _ in range(3):
        rig.step()
    rig.lose_chain([session], len(rig.chain.frames))
    rig.run(session)
    assert session.num_reused >= 32


@pytest.mark.parametrize("budget", [PLENTY, 200], ids=["roomy", "tight"])
@pytest.mark.parametrize("kind", decoders())
def test_rows_that_the_first_stage_holds_are_not_fed_again_if_they_are_complete_and_other_slots_are_freed(
    kind: str, budget: int
) -> None:
    """The fake chain refuses numbers that are opened twice, and rows of other places or that lack some layers."""
    num_reused = 0
    for number in range(12):
        numbers = random.Random(f"{kind} {budget} {number}")
        answers_alone = number % 2 == 0
        rig = Rig(num_stages=1, chunk=8, keep=True, budget=budget, answers_alone=answers_alone)
        is_lossy = rig.chain.is_lossy = number % 4 < 2  # else tokens are guessed right, ahead of their places
        asked, sessions = list[Asked](), list[Session]()
        for turn in range(60):
            if turn % 8 == 0:
                prompt = [*prompt_of(30, numbers.randrange(3)), *prompt_of(numbers.randrange(1, 30), turn)]
                asked.append(Asked(prompt, 30, kind=kind, seed=numbers.choice((0, 3))))
                sessions.append(asked[-1].build(rig))
                sessions[-1].feeds_apart = answers_alone and numbers.random() < 0.5
                rig.scheduler.slots.add(sessions[-1])
            rig.send_all()
            for _ in range(numbers.randrange(len(rig.chain.in_flight) + 1)):
                rig.take_one()
            if numbers.random() < 0.3:
                live = [session for session in sessions if session.finish_reason is None]
                rig.costs = costs_per_row(numbers.choice((budget, budget // 2)), num_stages=1)
                rig.lose_chain([], len(rig.chain.frames) - numbers.randrange(len(rig.chain.in_flight) + 1))
                for session in live:
                    session.rewind()
                    session.feeds_apart = answers_alone and numbers.random() < 0.3
                for session in live:
                    rig.scheduler.slots.add(session, is_replayed=True)
                rig.send_all()
                num_reused += sum(session.num_reused for session in live if not session.feeds_apart)
                reserved, budgets = rig.scheduler.slots.reserved, rig.costs.budgets
                assert all(need <= most for need, most in zip(reserved, budgets, strict=True))
        rig.run(*sessions)
        assert [session.generated for session in sessions] == [each.undisturbed(is_lossy) for each in asked]
        rig.end()
    assert num_reused > 200


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("kind", decoders())
def test_an_answer_goes_on_from_any_step_by_its_tokens_and_fills_alone(kind: str, seed: int) -> None:
    request = Asked(prompt_of(11) * 3, 30, kind=kind, seed=seed)
    expected = request.undisturbed()
    rig = Rig(num_stages=2, chunk=16)
    rig.chain.is_lossy = True
    session = request.submit(rig)
    states = []
    while session.finish_reason is None:
        states.append(KnownTokens(tuple(map(Token, session.generated)), tuple(session.fills)))
        rig.step()
    assert session.generated == expected and len(states) > 1
    assert any(state.fills for state in states) == (kind == "diffusion-fast")
    for known in states:
        later = Rig(num_stages=2, chunk=16)
        later.chain.is_lossy = True
        resumed = request.build(later, known)
        later.scheduler.slots.add(resumed)
        later.run(resumed)
        assert (resumed.generated, resumed.num_prompt, resumed.finish_reason) == (expected, 33, "length")


def test_the_fills_of_a_session_are_in_the_order_of_their_positions_with_their_logprobs() -> None:
    token = Token(5, -0.5, (Token(5, -0.5), Token(6, -1.5)))
    assert Token.of(token.to_sample()) == token
    decoder = decoders()["diffusion-fast"]()
    places = random.Random(3).sample(range(20, 40), 9)
    decoder.restore([(at, Token(at).to_sample()) for at in places])
    assert [at for at, _ in decoder.fills] == sorted(places)
