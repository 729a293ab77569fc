"""Sessions outlive their chain and their process: they get the tokens that they would have got without a loss."""

import random
from copy import deepcopy
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.decoding.window_lengths import WindowChooser
from coordinator.planning.costs import StepCosts
from coordinator.sessions.output import NO_TOKENS, KnownTokens, Token
from coordinator.sessions.session import Session
from protos.brigade_pb2 import Sample, Sampling
from tests.unit.fake_chain import VOCAB, Rig, costs_per_row, decoders, make_session, masked, plain_answer, prompt_of
from worker.errors import FrameError, InputError


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: list[int]
    max_tokens: int
    eos: frozenset[int]
    kind: str
    seed: int  # 0: greedy

    def build(self, rig: Rig, known: KnownTokens = NO_TOKENS) -> Session:
        """A session that is not submitted yet."""
        sampling = Sampling(seed=self.seed, temperature=1.0 if self.seed else 0.0)
        decoder = decoders(self.eos)[self.kind]()
        return make_session(
            self.prompt, self.max_tokens, self.eos, decoder, chunk=rig.chunk, sampling=sampling, known=known
        )

    def submit(self, rig: Rig) -> Session:
        session = self.build(rig)
        rig.scheduler.submit(session)
        return session

    def undisturbed(self) -> list[int]:
        if self.kind != "diffusion-fast":
            return plain_answer(self.prompt, self.max_tokens, self.eos, self.seed)
        rig = Rig(chunk=16)
        rig.chain.is_lossy = True
        session = self.submit(rig)
        rig.run(session)
        return session.generated


def asked(numbers: random.Random) -> Asked:
    shared = prompt_of(40, seed=numbers.randrange(2))[: numbers.randint(0, 40)]
    rest = prompt_of(numbers.choice([1, 2, 9, 30]), seed=numbers.randrange(1000))
    prompt = [*shared, *rest] if numbers.random() < 0.7 else rest * 3  # so that something can be looked up
    eos = frozenset(numbers.sample(range(VOCAB), numbers.choice([0, 0, 1, 3])))
    return Asked(
        prompt, numbers.randint(1, 40), eos, numbers.choice([*decoders()]), numbers.choice([0, numbers.randrange(99)])
    )


def check(session: Session, request: Asked) -> None:
    """It is the request's answer, so far."""
    expected = request.undisturbed()
    assert session.num_prompt == len(request.prompt) and session.history.tokens[: session.num_prompt] == request.prompt
    assert session.generated == expected[: session.num_generated]
    if session.finish_reason is not None:
        assert session.generated == expected
        assert session.finish_reason == ("stop" if expected[-1] in request.eos else "length")


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=True))
def test_sessions_over_lost_chains_give_the_tokens_of_an_undisturbed_run(numbers: random.Random) -> None:
    """Six sessions each time, over one to three chains that die at any moment: some run, some wait, some are done."""
    rig = Rig(
        num_stages=numbers.randint(1, 3), chunk=numbers.choice([3, 16, 256]), budget=numbers.choice([160, 300, 2000]),
        keep=numbers.random() < 0.5,
    )  # fmt: skip
    rig.chain.is_lossy = True
    requests = [asked(numbers) for _ in range(6)]
    sessions: dict[Session, Asked] = {}
    losses = set(numbers.sample(range(90), numbers.randint(1, 3)))
    for move in range(90):
        if requests and numbers.random() < 0.2:
            request = requests.pop()
            sessions[request.submit(rig)] = request
        if move in losses:
            rig.lose_chain([session for session in sessions if session.finish_reason is None])
        elif rig.chain.in_flight and numbers.random() < 0.5:
            rig.take_one()
        else:
            rig.send_one()
        held, promised = rig.chain.held(rig.costs.bytes_of), rig.scheduler.slots.promised
        assert rig.scheduler.slots.closed or all(h <= p for h, p in zip(held, promised, strict=True))
    rig.run(*sessions)
    for session, request in sessions.items():
        check(session, request)
    rig.end()


@pytest.mark.parametrize("kind", decoders())
def test_what_is_known_is_fed_as_prompt_chunks_under_the_new_epoch(kind: str) -> None:
    rig = Rig(num_stages=1, chunk=8)
    session = Asked(prompt_of(20), 40, frozenset(), kind, 0).submit(rig)
    while session.num_generated < 20:
        rig.step()
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
    """A proposal's tokens and its drafts share the rows that were promised."""
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
    assert session.generated == plain_answer(prompt_of(3), 3)


def test_whoever_no_longer_fits_waits_or_is_refused() -> None:
    rig = Rig(budget=200)
    first, second = rig.submit(prompt_of(50), 30), rig.submit(prompt_of(60, seed=1), 30)
    while not (first.num_generated and second.num_generated):
        rig.step()
    rig.costs = costs_per_row(100, num_stages=3)
    rig.lose_chain([first, second])
    assert (first.slot, second.slot, rig.scheduler.num_waiting) == (0, None, 1)
    rig.run(first, second)
    assert first.generated == plain_answer(prompt_of(50), 30)
    assert second.generated == plain_answer(prompt_of(60, seed=1), 30)
    third = rig.submit(prompt_of(60), 30)
    rig.step()
    rig.costs = costs_per_row(80, num_stages=3)
    with pytest.raises(InputError, match="of cache on node-0"):
        rig.lose_chain([third])


def test_sessions_that_begin_alike_share_what_one_of_them_has_fed_again() -> None:
    rig = Rig(num_stages=1, chunk=40)
    sessions = [rig.submit([*prompt_of(60), seed], 20) for seed in range(2)]
    while not all(session.num_generated > 3 for session in sessions):
        rig.step()
    rig.lose_chain(sessions)
    rig.run(*sessions)
    assert rig.chain.forks == [(1, 0)] and sessions[1].num_reused >= 40
    assert [session.generated for session in sessions] == [
        plain_answer([*prompt_of(60), seed], 20) for seed in range(2)
    ]


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("kind", decoders())
def test_an_answer_goes_on_from_any_step_by_its_tokens_and_fills_alone(kind: str, seed: int) -> None:
    request = Asked(prompt_of(11) * 3, 30, frozenset(), kind, seed)
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
        later.scheduler.submit(resumed)
        later.run(resumed)
        assert (resumed.generated, resumed.num_prompt, resumed.finish_reason) == (expected, 33, "length")


def test_the_fills_of_a_session_are_in_the_order_of_their_positions_with_their_logprobs() -> None:
    token = Token(5, -0.5, (Token(5, -0.5), Token(6, -1.5)))
    assert Token.of(token.to_sample()) == token
    decoder = decoders()["diffusion-fast"]()
    places = random.Random(3).sample(range(20, 40), 9)
    decoder.restore([(at, Token(at).to_sample()) for at in places])
    assert [at for at, _ in decoder.fills] == sorted(places)
