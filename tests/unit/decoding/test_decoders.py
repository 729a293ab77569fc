"""Decoders and the windows that sessions make of their proposals, against a stage that is a few functions."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx
import pytest

from coordinator.decoding.decoders import (
    Autoregressive,
    Decoder,
    Fill,
    LosslessDiffusion,
    PromptLookup,
    choose_fills,
    until_eos,
    verify,
)
from coordinator.decoding.lengths import LENGTHS, largest_within, mask_count, padded
from coordinator.decoding.window import WindowChooser
from coordinator.planning.costs import StepCosts
from coordinator.sessions.scheduler import Scheduler
from coordinator.sessions.session import Session, repeats
from protos.brigade_pb2 import Result, Sample, Sampling, Window
from tests.unit.fake_chain import VOCAB, costs_per_row, next_token, plain_answer, prompt_of
from worker.compute.engine import num_rows
from worker.compute.sampling import Sampler
from worker.memory.history import History

MASK = VOCAB - 1  # an id like any other in these tests: windows know their MASK rows by number, not by id

Guess = Callable[[int], tuple[int, float]]  # position to token and entropy
NextToken = Callable[[list[int]], int]


@dataclass
class FakeStage:
    """All stages, for one slot: refuses what a stage refuses, and answers every row that asks for something."""

    guess: Guess = lambda position: (0, 0.0)
    next_token: NextToken = next_token
    history: History = field(default_factory=History)

    def answer(self, window: Window) -> tuple[list[Sample], list[Sample]]:
        num_tokens = len(window.tokens)
        assert num_tokens >= max(1, window.wanted) and window.guessed <= window.masks
        assert len(window.positions) in (0, num_rows(window))
        assert window.base <= len(self.history)
        assert window.prefix_hash == self.history.prefix_hash(window.base)
        self.history.cut(window.base)
        self.history.extend(window.tokens)
        wanted = range(num_tokens - window.wanted, num_tokens)
        tokens = [self.next_token(self.history.tokens[: window.base + row + 1]) for row in wanted]
        at = positions(window)[num_tokens : num_tokens + window.guessed]
        guesses = [Sample(token=token, entropy=entropy) for token, entropy in map(self.guess, at)]
        return [Sample(token=token) for token in tokens], guesses


@dataclass(frozen=True)
class Step:
    """One window, its answer, what became known, and what was known before."""

    window: Window
    guesses: list[Sample]
    new: list[int]
    before: list[int]

    @property
    def is_chunk(self) -> bool:
        return not (self.window.wanted or self.window.guessed)

    @property
    def num_unfed(self) -> int:
        """Known tokens in the window."""
        return len(self.before) - self.window.base

    @property
    def num_asked(self) -> int:
        """Rows before padding."""
        return len(self.window.tokens) + self.window.guessed


def positions(window: Window) -> list[int]:
    return list(window.positions) or list(range(window.base, window.base + num_rows(window)))


def steps(session: Session, stage: FakeStage) -> Iterator[Step]:
    """Run a session to its end, a window at a time."""
    while session.finish_reason is None:
        before = list(session.history.tokens)
        window = session.next_window()
        samples, guesses = stage.answer(window)
        new = session.commit(samples, guesses)
        yield Step(window, guesses, [sample.token for sample in new], before)


def run(session: Session, stage: FakeStage) -> list[Step]:
    return list(steps(session, stage))


def opened(
    prompt: Sequence[int],
    max_tokens: int,
    eos: frozenset[int] = frozenset(),
    decoder: Decoder | None = None,
    repeat_guard: int = 0,
    chunk: int = 256,
) -> Session:
    """A session in slot 0, without a scheduler."""
    session = Session(prompt, max_tokens, eos, decoder, repeat_guard, chunk=chunk)
    session.slot = 0
    return session


def fixed(window: int) -> WindowChooser:
    return WindowChooser(StepCosts(), window)


# --- WeDLM's decoder ------------------------------------------------------------------------------------------------

# W=4, tau=0.4, lambda=0.02, prompt of 5; `t7` is the token chosen for position 7. Each row: the window's tokens and the
# positions of its MASK rows, its base, the entropies by position, what became known by it, what is filled ahead after.
TABLE = [
    ("p4", [5, 6, 7, 8], 4, {5: 0.10, 6: 0.50, 7: 0.37, 8: 0.36}, "t5", ""),
    ("t5", [6, 7, 8, 9], 5, {6: 0.45, 7: 0.60, 8: 0.50, 9: 0.20}, "", "t9"),
    ("t9", [6, 7, 8], 6, {6: 0.30, 7: 1.07, 8: 0.38}, "t6", "t9"),
    ("t6 t9", [7, 8, 10], 6, {7: 1.07, 8: 0.90, 10: 0.39}, "", "t9 t10"),
    ("t9 t10", [7, 8], 7, {7: 1.07, 8: 1.08}, "t7", "t9 t10"),
    ("t7 t9 t10", [8, 11], 7, {8: 1.08, 11: 1.11}, "t8 t9 t10", ""),
    ("t8 t9 t10", [11, 12, 13, 14], 8, {11: 0.0, 12: 9.0, 13: 9.0, 14: 9.0}, "t11", ""),
]


def test_the_windows_and_fills_of_wedlm_are_those_of_the_table() -> None:
    """research/diffusion.md section 7; a filled leading run is known at once, and the prompt's last token is fused."""

    def name(token: int, position: int) -> str:
        return f"p{position}" if position < 5 else f"t{token - 100}"

    decoder = Fill(4, 0.4, 0.02, frozenset())
    session = opened([0, 1, 2, 3, 4], 50, decoder=decoder)
    entropies: dict[int, float] = {}
    stage = FakeStage(lambda position: (100 + position, entropies[position]))
    chunk = session.next_window()
    assert list(chunk.tokens) == [0, 1, 2, 3] and not (chunk.wanted or chunk.masks)
    session.commit(*stage.answer(chunk))
    for tokens, masks, base, given, known, ahead in TABLE:
        entropies = given
        num_known = 5 + len(session.generated)
        window = session.next_window()
        at, num_tokens = positions(window), len(window.tokens)
        named = [name(token, position) for token, position in zip(window.tokens, at, strict=False)]
        assert " ".join(named) == tokens
        assert at[num_tokens : num_tokens + window.guessed] == masks
        assert window.base == base and not window.wanted
        assert masks[0] == num_known  # what is known reaches to the leftmost MASK
        new = session.commit(*stage.answer(window))
        assert " ".join(f"t{sample.token - 100}" for sample in new) == known
        assert " ".join(f"t{token - 100}" for _, token in decoder.propose([0] * 99, 0, 1).fills) == ahead


@pytest.mark.parametrize(
    ("at", "entropies", "threshold", "penalty", "chosen"),
    [
        ([5, 6, 7, 8], [0.10, 0.50, 0.37, 0.36], 0.4, 0.02, [0]),  # .37 + .04 and .36 + .06 both miss
        ([5, 6, 7, 8], [0.10, 0.50, 0.37, 0.36], 0.43, 0.02, [0, 2, 3]),
        ([5, 6, 7, 8], [0.10, 0.50, 0.37, 0.36], 0.4, 0.0, [0, 2, 3]),
        ([7, 8, 10], [1.07, 0.90, 0.39], 0.4, 0.02, [2]),  # none is below: the best one
        ([7, 8], [1.07, 1.08], 0.4, 0.02, [0]),
        ([7, 9], [0.5, 0.45], 0.0, 0.02, [1]),
        ([7, 9], [0.5, 0.47], 0.0, 0.02, [0]),  # by distance, not by row: .47 + .04
        ([3, 4], [0.7, 0.7], 0.0, 0.0, [0]),  # the leftmost of equals
        ([3, 4], [0.4, 0.4], 0.4, 0.0, [0]),  # below means below
        ([3], [99.0], 0.4, 0.02, [0]),
    ],
)
def test_what_is_filled_is_what_is_sure_and_near_or_else_the_best(
    at: list[int], entropies: list[float], threshold: float, penalty: float, chosen: list[int]
) -> None:
    assert choose_fills(at, entropies, threshold, penalty) == chosen


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.3] * 97, math.log(97)),
        ([0.0, 200.0, 0.0], 0.0),
        ([math.log(3), 0.0], 0.562335),
        ([0.0, 0.0, -math.inf], math.log(2)),
    ],
)
def test_the_entropy_of_a_guess_is_in_nats(logits: list[float], expected: float) -> None:
    draws = Sampler(Sampling())(mx.array([logits]), [0], [], [0], entropy=True)
    assert draws.to_samples(0)[0].entropy == pytest.approx(expected, abs=1e-5)


def test_the_entropy_of_a_guess_is_that_of_the_raw_logits() -> None:
    """Before temperature, filters, penalties and bias (WeDLM's engine, sampler.py)."""
    logits = mx.array([[0.0, 1.0, 2.0, -1.0]])
    plain = Sampler(Sampling())(logits, [0], [], [0], entropy=True).to_samples(0)[0].entropy
    changed = Sampling(temperature=0.3, top_k=2, top_p=0.5, repetition_penalty=2.0, logit_bias={1: 9.0})
    assert Sampler(changed)(logits, [0], [2], [1], entropy=True).to_samples(0)[0].entropy == plain


def random_guess(numbers: random.Random, certainty: float) -> Guess:
    return lambda position: (numbers.randrange(VOCAB), numbers.expovariate(certainty))


@pytest.mark.parametrize("seed", range(60))
def test_what_holds_of_every_run_of_wedlm(seed: int) -> None:
    numbers = random.Random(seed)
    W, N = numbers.choice([1, 2, 3, 4, 7, 8, 16, 32]), numbers.randint(1, 60)
    threshold = numbers.choice([0.0, 0.2, 0.8, 3.0])
    prompt = prompt_of(numbers.randint(1, 90), seed)
    session = opened(prompt, N, decoder=Fill(W, threshold, 0.02, frozenset()), chunk=numbers.choice([8, 256]))
    base, filled, num_steps = 0, {}, 0
    for step in steps(session, FakeStage(random_guess(numbers, numbers.choice([0.3, 3.0])))):
        window, at = step.window, positions(step.window)
        num_tokens = len(window.tokens)
        assert window.base >= base, "a base went back"
        base = window.base
        if step.is_chunk:
            continue
        assert num_rows(window) in LENGTHS
        num_steps += 1
        known = len(step.before)
        assert at[: step.num_unfed] == list(range(base, known)), "known tokens come first, in order"
        ahead = dict(zip(at[step.num_unfed : num_tokens], window.tokens[step.num_unfed :], strict=True))
        assert list(ahead) == sorted(ahead) and ahead == filled, "what is filled stays as it is"
        masks = at[num_tokens : num_tokens + window.guessed]
        assert masks == sorted(masks) and masks[0] == known, "the leftmost place that is not known is a MASK"
        assert sorted([*ahead, *masks]) == list(range(known, known + min(W, len(prompt) + N - known)))
        assert step.num_asked <= 2 * W
        entropies = [guess.entropy for guess in step.guesses]
        chosen = choose_fills(masks, entropies, threshold, 0.02)
        assert chosen, "at least one is filled"
        filled = ahead | {masks[row]: step.guesses[row].token for row in chosen}
        run_ = []
        while known + len(run_) in filled:
            run_.append(filled.pop(known + len(run_)))
        assert step.new == run_, "committed from the left, as soon as it is whole"
    assert len(session.generated) == N and session.finish_reason == "length"
    assert num_steps <= N + W + 1


def test_a_threshold_that_all_pass_fills_a_window_per_step() -> None:
    session = opened(prompt_of(8), 64, decoder=Fill(16, 1e9, 0.02, frozenset()))
    found = [len(step.new) for step in run(session, FakeStage(lambda at: (at % VOCAB, 1.0)))]
    assert [n for n in found if n] == [16] * 4
    assert session.generated == [at % VOCAB for at in range(8, 72)]


def test_a_filled_end_of_sequence_ends_the_window_there() -> None:
    """Nothing behind it is worth a row (tail-drop), and the session does not end before all ahead of it is filled."""
    eos = 7
    entropy = {5: 0.5, 6: 0.6, 7: 0.0, 8: 0.7}
    session = opened([1], 40, frozenset({eos}), Fill(8, 0.1, 0.0, frozenset({eos})))
    stage = FakeStage(lambda at: (eos if at == 7 else 20, entropy.get(at, 0.9)))
    found = run(session, stage)
    masks = [positions(s.window)[len(s.window.tokens) :][: s.window.guessed] for s in found]
    assert masks[0] == list(range(1, 9))
    assert masks[1] == [1, 2, 3, 4, 5, 6]
    assert all(max(at) < 7 for at in masks[1:])
    assert session.generated == [20] * 6 + [eos] and session.finish_reason == "stop"


def test_a_filled_end_of_sequence_further_left_wins() -> None:
    eos = frozenset({7})
    session = opened([1], 40, eos, Fill(4, 0.1, 0.0, eos))
    entropies = iter([{1: 0.9, 2: 0.8, 3: 0.8, 4: 0.0}, {1: 0.9, 2: 0.0, 3: 0.8}, {1: 0.0}])
    now: dict[int, float] = {}
    stage = FakeStage(lambda at: (7 if at in (2, 4) else 20, now[at]))
    while session.finish_reason is None:
        now = next(entropies)
        session.commit(*stage.answer(session.next_window()))
    assert session.generated == [20, 7]


# --- verified drafts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafts", "samples", "known", "num_cached"),
    [
        ([], [5], [5], 0),
        ([5], [5, 6], [5, 6], 1),
        ([4], [5, 6], [5], 0),
        ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 6, 9, 8], [5, 6, 9], 2),
        ([5, 9, 7], [5, 6, 7, 8], [5, 6], 1),  # what follows a wrong draft is an answer to another text
        ([9, 6, 7], [5, 6, 7, 8], [5], 0),
    ],
)
def test_drafts_hold_up_to_the_first_that_differs_and_one_token_comes_on_top(
    drafts: list[int], samples: list[int], known: list[int], num_cached: int
) -> None:
    accepted = verify(drafts, [Sample(token=token) for token in samples])
    assert [sample.token for sample in accepted.samples] == known
    assert accepted.num_cached == num_cached


def oracle(text: Sequence[int], quality: float, numbers: random.Random) -> Guess:
    """Guesses what will stand there with this probability, and anything otherwise."""

    def guess(position: int) -> tuple[int, float]:
        right = position < len(text) and numbers.random() < quality
        return (text[position] if right else numbers.randrange(VOCAB)), numbers.random()

    return guess


@pytest.mark.parametrize("quality", [0.0, 0.3, 0.8, 0.97, 1.0])
def test_windows_that_come_and_go_change_no_token(quality: float) -> None:
    """Where rows cost much, a step may have no MASK rows, and still verifies what the one before it guessed."""
    costs = StepCosts()
    for rows in (1, 1, 64, 64):
        costs.observe(rows, 0.010 + 0.002 * rows)
    numbers, kinds = random.Random(quality), Counter[tuple[bool, bool]]()
    for seed in range(4):
        prompt = prompt_of(numbers.randint(1, 100), seed)
        expected = plain_answer(prompt, 80)
        session = opened(prompt, 80, decoder=LosslessDiffusion(WindowChooser(costs), frozenset()))
        stage = FakeStage(oracle([*prompt, *expected], quality, numbers))
        while session.finish_reason is None:
            num_unfed, window = session.num_unfed, session.next_window(numbers.choice([1, 1, 1, 8]))
            session.commit(*stage.answer(window))
            kinds[bool(window.masks), len(window.tokens) > num_unfed] += bool(window.wanted)
        assert session.generated == expected
    assert all(kinds[with_masks, with_drafts] for with_masks in (True, False) for with_drafts in (False, True))
    assert quality > 0.5 or kinds[False, False] > 200


@pytest.mark.parametrize("quality", [0.0, 0.3, 0.8, 0.97, 1.0])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 8, 13, 16, 32, 64, None])
def test_lossless_diffusion_gives_the_tokens_of_one_token_decoding_however_good_the_guesses(
    window: int | None, quality: float
) -> None:
    for seed in range(3):
        numbers = random.Random(f"{window} {quality} {seed}")
        prompt, N = prompt_of(numbers.randint(1, 100), seed), numbers.randint(1, 60)
        expected = plain_answer(prompt, N)
        decoder = LosslessDiffusion(WindowChooser(StepCosts(), window), frozenset())
        session = opened(prompt, N, decoder=decoder, chunk=numbers.choice([1, 4, 256]))
        found = run(session, FakeStage(oracle([*prompt, *expected], quality, numbers)))
        assert session.generated == expected and session.finish_reason == "length"
        bases = [step.window.base for step in found]
        assert bases == sorted(bases)
        assert all(len(step.new) >= 1 for step in found if not step.is_chunk)
        assert all(num_rows(step.window) in LENGTHS for step in found if not step.is_chunk)


@pytest.mark.parametrize("window", [2, 4, 8, 16, 32])
def test_guesses_that_are_all_right_yield_nearly_a_window_per_step_after_any_prompt(window: int) -> None:
    for num_prompt in (1, 2, 3, 4, 8, 13, 16, 24, 32):
        prompt = prompt_of(num_prompt)
        expected = plain_answer(prompt, 160)
        session = opened(prompt, 160, decoder=LosslessDiffusion(fixed(window), frozenset()))
        found = run(session, FakeStage(oracle([*prompt, *expected], 1.0, random.Random(0))))
        num_steps = sum(1 for step in found if not step.is_chunk)
        assert num_steps <= 160 / window * 1.1 + 2, f"prompt of {num_prompt}"


@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("window", [1, 4, 16, 32, 64])
def test_a_verifying_window_has_no_more_rows_than_drafts_and_as_many_masks(window: int, quality: float) -> None:
    for num_prompt in sorted({1, 2, 3, 7, 8, window, window + 1, 2 * window}):
        prompt = prompt_of(num_prompt)
        expected = plain_answer(prompt, 40)
        session = opened(prompt, 40, decoder=LosslessDiffusion(fixed(window), frozenset()))
        for step in run(session, FakeStage(oracle([*prompt, *expected], quality, random.Random(1)))):
            if not step.is_chunk:
                assert len(step.window.tokens) <= window
                assert step.num_asked <= padded(2 * window)
                assert step.window.guessed > window // 2


@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
def test_no_draft_goes_beyond_what_may_still_become_known(quality: float) -> None:
    prompt = prompt_of(9)
    expected = plain_answer(prompt, 37)
    for decoder in (LosslessDiffusion(fixed(16), frozenset()), PromptLookup(), Fill(16, 3.0, 0.0, frozenset())):
        session = opened(prompt, 37, decoder=decoder)
        for step in run(session, FakeStage(oracle([*prompt, *expected], quality, random.Random(2)))):
            if step.window.wanted > 1:
                assert len(step.before) + step.window.wanted - 1 < len(prompt) + 37
            assert all(at < len(prompt) + 37 for at in positions(step.window)[: len(step.window.tokens)])


def test_after_a_rejection_nothing_of_the_old_guesses_is_drafted() -> None:
    decoder = LosslessDiffusion(fixed(4), frozenset())
    proposal = decoder.propose([1], 1, 99)
    decoder.accept(proposal, [Sample(token=5)], [Sample(token=token) for token in (5, 6, 7)])
    proposal = decoder.propose([1, 5], 1, 99)
    assert proposal.drafts == (6, 7)  # the first guess was for the place of the token that is known now
    decoder.accept(proposal, [Sample(token=9)] * 3, [Sample(token=8)] * 5)
    assert decoder.propose([1, 5, 9], 1, 99).drafts == ()


# --- ends inside a window -------------------------------------------------------------------------------------------


def decoders(eos: frozenset[int] = frozenset()) -> dict[str, Callable[[], Decoder]]:
    return {
        "ar": Autoregressive,
        "ngram": PromptLookup,
        "diffusion": lambda: LosslessDiffusion(fixed(16), eos),
        "diffusion-fast": lambda: Fill(16, 1e9, 0.02, eos),  # with right guesses: the text, a window at a time
    }


@pytest.mark.parametrize("kind", decoders())
@pytest.mark.parametrize(
    ("max_tokens", "eos_at"), [(1, None), (11, None), (50, 0), (50, 1), (50, 10), (11, 10), (50, 17)]
)
def test_a_session_ends_at_the_same_token_for_the_same_reason_whatever_the_decoder(
    kind: str, max_tokens: int, eos_at: int | None
) -> None:
    prompt = prompt_of(6, seed=4)
    text = plain_answer(prompt, 50)
    eos = frozenset() if eos_at is None else frozenset({text[eos_at]})
    expected = plain_answer(prompt, max_tokens, eos)
    session = opened(prompt, max_tokens, eos, decoders(eos)[kind]())
    found = run(session, FakeStage(oracle([*prompt, *text], 1.0, random.Random(0))))
    assert session.generated == expected
    assert session.finish_reason == ("stop" if expected[-1] in eos else "length")
    assert [token for step in found for token in step.new] == expected


def test_a_draft_that_ends_the_sequence_is_the_last_draft_and_needs_no_masks() -> None:
    prompt = prompt_of(6, seed=4)
    text = plain_answer(prompt, 50)
    eos = frozenset({text[9]})
    session = opened(prompt, 50, eos, LosslessDiffusion(fixed(16), eos))
    last = run(session, FakeStage(oracle([*prompt, *text], 1.0, random.Random(0))))[-1]
    assert last.window.tokens[-1] == text[9] and last.window.guessed == 0
    assert until_eos([3, 4, 5, 4], frozenset({4, 5})) == [3, 4]
    assert until_eos([3, 6], frozenset({4, 5})) == [3, 6]


def test_a_stop_inside_a_window_drops_the_rest_of_it() -> None:
    """Of a session stopped by its client while a window is on its way nothing more becomes known."""
    prompt = prompt_of(6)
    text = plain_answer(prompt, 40)
    scheduler = Scheduler(num_stages=2, costs=costs_per_row())
    session = Session(prompt, 40, decoder=LosslessDiffusion(fixed(8), frozenset()), chunk=16)
    scheduler.submit(session)
    stage = FakeStage(oracle([*prompt, *text], 1.0, random.Random(0)))
    while len(session.generated) < 3:
        frame = scheduler.schedule()
        assert frame is not None
        samples, guesses = stage.answer(frame.windows[0])
        scheduler.commit(Result(epoch=1, step=frame.step, samples=samples, guesses=guesses))
    known = session.generated
    frame = scheduler.schedule()
    assert frame is not None
    samples, guesses = stage.answer(frame.windows[0])
    session.stop()
    assert len(samples) > 1
    assert scheduler.commit(Result(epoch=1, step=frame.step, samples=samples, guesses=guesses)) == []
    assert session.generated == known and session.finish_reason == "stop"
    assert scheduler.schedule() is None


@pytest.mark.parametrize(
    ("tokens", "times", "expected"),
    [
        ([1, 2, 3, 3, 3], 3, True),
        ([1, 2, 3, 3, 3], 4, False),
        ([9, 1, 2, 1, 2, 1, 2], 3, True),
        ([9, 1, 2, 1, 2, 1, 2, 3], 3, False),
        ([3, 3, 3, 1], 3, False),
        ([2, 1, 2, 1, 2], 3, False),
        ([5] * 2, 3, False),
        ([], 2, False),
        (list(range(64)) * 2, 2, True),
        (list(range(65)) * 2, 2, False),  # longer than anything that is taken for a repeat
        (list(range(64)) + list(range(63)) + [9], 2, False),
    ],
)
def test_a_repeat_is_the_same_few_tokens_in_a_row_at_the_end(tokens: list[int], times: int, expected: bool) -> None:
    assert repeats(tokens, times) == expected


def test_the_repeat_guard_ends_an_answer_inside_a_window_too() -> None:
    loop = [4, 5, 6]
    for kind, make in decoders().items():
        stage = FakeStage(lambda at: (loop[at % 3], 0.0), lambda tokens: loop[len(tokens) % 3])
        session = opened([4, 9], 200, decoder=make(), repeat_guard=4)
        run(session, stage)
        assert session.finish_reason == "stop" and len(session.generated) == 12, kind


# --- drafts from the text -------------------------------------------------------------------------------------------


def looping(period: int) -> NextToken:
    return lambda tokens: len(tokens) % period


def draft_of(step: Step) -> list[int]:
    return list(step.window.tokens[step.num_unfed :])


@pytest.mark.parametrize("seed", range(8))
def test_prompt_lookup_drafts_what_followed_the_last_three_tokens_before(seed: int) -> None:
    numbers = random.Random(seed)
    phrases = [prompt_of(numbers.randint(6, 30), seed=i) for i in range(3)]
    text = [token for _ in range(100) for token in numbers.choice(phrases)]
    session = opened(text[:50], 500, decoder=PromptLookup())
    num_drafts = 0
    for step in steps(session, FakeStage(next_token=lambda tokens: text[len(tokens)])):
        if drafts := draft_of(step):
            num_drafts += 1
            before, now = step.before, step.before[-3:]
            ends = [end for end in range(3, len(before)) if before[end - 3 : end] == now]
            period = len(before) - ends[-1]
            assert drafts == [before[ends[-1] + i % period] for i in range(len(drafts))]
            assert len(drafts) in (3, 7, 15)
    assert session.generated == text[50:550] and num_drafts > 20


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 6, 7, 10, 15, 20, 40])
def test_prompt_lookup_is_fast_on_any_loop(period: int) -> None:
    """However short the loop: a draft may run past the end of the text, into itself."""
    session = opened([i % period for i in range(2 * period + 3)], 320, decoder=PromptLookup())
    found = [step for step in run(session, FakeStage(next_token=looping(period))) if not step.is_chunk]
    assert len(found) < 320 / 16 + 8
    lengths = [len(draft_of(step)) for step in found if draft_of(step)]
    assert lengths[:3] == [3, 7, 15]


def test_prompt_lookup_drafts_less_while_drafts_hold_less() -> None:
    """Two thirds of a text that repeats, with one token in five changed: drafts stay short."""
    numbers = random.Random(5)
    once = prompt_of(40)
    text = list(once)
    while len(text) < 1100:
        text += [token if numbers.random() < 0.8 else numbers.randrange(VOCAB) for token in once]
    session = opened(text[:80], 1000, decoder=PromptLookup())
    found = [step for step in run(session, FakeStage(next_token=lambda tokens: text[len(tokens)])) if not step.is_chunk]
    lengths = [len(draft_of(step)) for step in found if draft_of(step)]
    assert session.generated == text[80:1080]
    assert lengths.count(3) > lengths.count(15)
    assert len(found) < 1000


def test_prompt_lookup_backs_off_where_nothing_holds() -> None:
    """Drafts are found at every step and never hold: 1 window in 20 at most is spent on them."""
    prompt = prompt_of(60)
    decoder = PromptLookup()
    tokens, num_failed = list(prompt), 0
    for _ in range(1000):
        proposal = decoder.propose([*tokens, *prompt[10:13]], 1, 999)
        num_failed += bool(proposal.drafts)
        tokens += prompt[10:13]  # the last three tokens stood there before
        accepted = decoder.accept(proposal, [Sample(token=VOCAB + 1)] * (1 + len(proposal.drafts)), [])
        assert len(accepted.samples) == 1
    assert 10 < num_failed <= 50


def test_prompt_lookup_takes_up_again_where_the_text_repeats_after_all() -> None:
    numbers = random.Random(3)
    text = [numbers.randrange(4) for _ in range(400)] + prompt_of(40) * 10  # four tokens: found often, held rarely
    session = opened(text[:20], 700, decoder=PromptLookup())
    found = [step for step in run(session, FakeStage(next_token=lambda tokens: text[len(tokens)])) if not step.is_chunk]
    in_loop = [step for step in found if len(step.before) > 400 + 40 + 32 + 30]
    assert session.generated == text[20:720]
    assert sum(len(step.new) for step in in_loop) / len(in_loop) > 8


def test_prompt_lookup_costs_nothing_on_a_text_without_repetition() -> None:
    session = opened([0, 1, 2], 500, decoder=PromptLookup())
    found = [step for step in run(session, FakeStage(next_token=len)) if not step.is_chunk]
    assert [num_rows(step.window) for step in found] == [3] + [1] * 499  # the prompt, and then a token at a time


# --- lengths --------------------------------------------------------------------------------------------------------


def test_lengths_are_powers_that_hold_what_they_should() -> None:
    for n in range(1, 257):
        assert largest_within(n) <= n <= padded(n)
        assert {largest_within(n), padded(n)} <= set(LENGTHS)
        assert largest_within(padded(n)) == padded(n)


@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 8, 16, 20, 32, 64, 100, 128])
def test_masks_fill_the_window_and_are_more_than_half_of_what_is_wanted(wanted: int) -> None:
    for num_tokens in range(1, wanted + 1):
        num_masks = mask_count(num_tokens, wanted)
        assert num_masks > wanted // 2
        assert num_tokens + num_masks in LENGTHS


def test_windows_with_mask_rows_have_eight_lengths_whatever_the_decoder_and_the_prompt() -> None:
    """So that what a window costs is known from other windows of its length."""
    seen = set()
    for num_prompt in [*range(1, 36), 48, 63, 64, 65, 80, 128, 255, 256, 257, 272, 300, 512, 528]:
        prompt = prompt_of(num_prompt)
        text = [*prompt, *plain_answer(prompt, 5)]
        made: list[Decoder] = []
        for window in (1, 2, 5, 16, 32, 48, 128) if num_prompt % 16 < 2 else (4, 16):
            made += [LosslessDiffusion(fixed(window), frozenset()), Fill(window, 0.5, 0.02, frozenset())]
        for decoder in made:
            for chunk in (24, 256):
                session = opened(prompt, 5, decoder=deepcopy(decoder), chunk=chunk)
                found = run(session, FakeStage(oracle(text, 0.7, random.Random(num_prompt))))
                seen |= {num_rows(step.window) for step in found if step.window.masks}
    assert seen <= set(LENGTHS), f"other lengths: {sorted(seen - set(LENGTHS))}"
    assert len(LENGTHS) <= 8


@pytest.mark.parametrize("window", [4, 16, 32])
def test_no_more_known_tokens_share_a_window_with_a_proposal_than_the_decoder_allows(window: int) -> None:
    """A prompt of exactly 64 tokens would else make a window of 80 rows, padded to 256."""
    for num_prompt in (*range(1, 70), 128, 256, 512):
        for decoder in (LosslessDiffusion(fixed(window), frozenset()), Fill(window, 0.5, 0.02, frozenset())):
            session = opened(prompt_of(num_prompt), 4, decoder=decoder)
            for step in run(session, FakeStage()):
                assert step.is_chunk or step.num_unfed <= window
                assert step.is_chunk or num_rows(step.window) <= padded(2 * window)


@pytest.mark.parametrize("kind", decoders())
def test_mask_rows_are_told_by_number_so_the_mask_id_in_a_text_is_a_token_like_any_other(kind: str) -> None:
    prompt = [3, MASK, MASK, 5, MASK]
    session = opened(prompt, 8, decoder=decoders()[kind]())
    fed: dict[int, int] = {}
    for step in run(session, FakeStage(lambda at: (MASK, 0.1), lambda tokens: MASK)):
        window = step.window
        fed |= dict(zip(positions(window)[: step.num_unfed], window.tokens[: step.num_unfed], strict=True))
    assert session.generated == [MASK] * 8
    assert [fed[at] for at in range(5)] == prompt


def test_bases_of_frames_in_flight_follow_each_other() -> None:
    """A long prompt's chunks are sent before the first is answered, the proposal with the last of them."""
    session = opened(prompt_of(77), 8, decoder=Fill(16, 1e9, 0.0, frozenset()), chunk=32)
    windows = []
    while session.is_ready:
        windows.append(session.next_window())
    ends = [window.base + len(window.tokens) for window in windows]
    assert all(window.base == end for end, window in zip(ends, windows[1:], strict=False))
    assert ends[-1] == 77 and windows[-1].guessed == 8
    assert not any(window.guessed for window in windows[:-1])
    assert all(earlier < later for earlier, later in pairwise(ends))
