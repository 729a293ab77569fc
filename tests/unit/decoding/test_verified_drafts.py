"""Drafts that are verified: whatever is guessed, the tokens are those of one-token decoding."""

import random
from collections import Counter

import pytest

from coordinator.decoding.decoders import DiffusionFast, verify_drafts
from coordinator.decoding.window_lengths import LENGTHS, WindowChooser, padded
from coordinator.planning.costs import StepCosts
from protos.brigade_pb2 import Sample
from tests.unit.decoding.fake_stage import FakeStage, fixed, opened, oracle, positions, run
from tests.unit.fake_chain import from_text, masked, plain_answer, prompt_of
from worker.compute.header import num_rows


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
def test_drafts_hold_until_one_fails(drafts: list[int], samples: list[int], known: list[int], num_cached: int) -> None:
    accepted = verify_drafts(drafts, [Sample(token=token) for token in samples])
    assert [sample.token for sample in accepted.samples] == known
    assert accepted.num_cached == num_cached


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
        session = opened(prompt, 80, decoder=masked(WindowChooser(costs), frozenset()))
        stage = FakeStage(oracle([*prompt, *expected], quality, numbers))
        while session.finish_reason is None:
            num_unfed, window = session.num_unfed, session.next_window(numbers.choice([1, 1, 1, 8]))
            session.commit(*stage.answer(window))
            kinds[bool(window.masks), len(window.tokens) > num_unfed] += bool(window.wanted)
        assert session.generated == expected
    assert all(kinds[with_masks, with_drafts] for with_masks in (True, False) for with_drafts in (False, True))
    assert quality > 0.5 or kinds[False, False] > 200


@pytest.mark.parametrize("quality", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("window", [1, 2, 3, 8, 13, 32, 64, None])
def test_lossless_diffusion_gives_the_tokens_of_one_token_decoding(window: int | None, quality: float) -> None:
    """In windows that have no more rows than drafts and about as many masks."""
    W = window or 16
    for num_prompt in (1, 7, W, W + 1, 2 * W, 100):
        numbers = random.Random(f"{window} {quality} {num_prompt}")
        prompt, N = prompt_of(num_prompt), numbers.randint(1, 60)
        expected = plain_answer(prompt, N)
        decoder = masked(WindowChooser(StepCosts(), fixed=window), frozenset())
        session = opened(prompt, N, decoder=decoder, chunk=numbers.choice([1, 4, 256]))
        found = run(session, FakeStage(oracle([*prompt, *expected], quality, numbers)))
        assert session.generated == expected and session.finish_reason == "length"
        bases = [step.window.base for step in found]
        assert bases == sorted(bases)
        for step in found:
            if not step.is_chunk:
                assert step.new and num_rows(step.window) in LENGTHS
                assert len(step.window.tokens) <= W < 2 * step.window.guessed and step.num_asked <= padded(2 * W)


@pytest.mark.parametrize("window", [2, 4, 8, 16, 32])
def test_guesses_that_are_all_right_yield_nearly_a_window_per_step_after_any_prompt(window: int) -> None:
    for num_prompt in (1, 2, 3, 4, 8, 13, 16, 24, 32):
        prompt = prompt_of(num_prompt)
        expected = plain_answer(prompt, 160)
        session = opened(prompt, 160, decoder=masked(fixed(window), frozenset()))
        found = run(session, FakeStage(oracle([*prompt, *expected], 1.0, random.Random(0))))
        num_steps = sum(1 for step in found if not step.is_chunk)
        assert num_steps <= 160 / window * 1.1 + 2, f"prompt of {num_prompt}"


@pytest.mark.parametrize("quality", [0.0, 0.7, 1.0])
def test_no_draft_goes_beyond_what_may_still_become_known(quality: float) -> None:
    prompt = prompt_of(9)
    expected = plain_answer(prompt, 37)
    for decoder in (masked(fixed(16), frozenset()), from_text(), DiffusionFast(16, 3.0, 0.0, frozenset())):
        session = opened(prompt, 37, decoder=decoder)
        for step in run(session, FakeStage(oracle([*prompt, *expected], quality, random.Random(2)))):
            if step.window.wanted > 1:
                assert len(step.before) + step.window.wanted - 1 < len(prompt) + 37
            assert all(at < len(prompt) + 37 for at in positions(step.window)[: len(step.window.tokens)])


def test_after_a_rejection_nothing_of_the_old_guesses_is_drafted() -> None:
    decoder = masked(fixed(4), frozenset())
    proposal = decoder.propose([1], 1, 99)
    decoder.accept(proposal, [Sample(token=5)], [Sample(token=token) for token in (5, 6, 7)])
    proposal = decoder.propose([1, 5], 1, 99)
    assert proposal.drafts == (6, 7)  # the first guess was for the place of the token that is known now
    decoder.accept(proposal, [Sample(token=9)] * 3, [Sample(token=8)] * 5)
    assert decoder.propose([1, 5, 9], 1, 99).drafts == ()
