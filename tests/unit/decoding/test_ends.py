"""Ends inside a window: a session ends at the same token whatever the decoder."""

import random

import pytest

from coordinator.decoding.decoders import until_eos
from coordinator.sessions.session import RepeatGuard
from tests.unit.decoding.fake_stage import FakeStage, decoders, fixed, opened, oracle, run
from tests.unit.fake_chain import VOCAB, masked, plain_answer, prompt_of


@pytest.mark.parametrize("kind", decoders())
@pytest.mark.parametrize(
    ("max_tokens", "eos_at"), [(1, None), (11, None), (50, 0), (50, 1), (50, 10), (11, 10), (50, 17)]
)
def test_a_session_ends_at_the_same_token_with_every_decoder(kind: str, max_tokens: int, eos_at: int | None) -> None:
    """An end-of-sequence token of the prompt ends nothing."""
    prompt = [VOCAB + 1, *prompt_of(6, seed=4)]
    text = plain_answer(prompt, 50)
    eos = frozenset({VOCAB + 1}) | (frozenset() if eos_at is None else {text[eos_at]})
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
    session = opened(prompt, 50, eos, masked(fixed(16), eos))
    last = run(session, FakeStage(oracle([*prompt, *text], 1.0, random.Random(0))))[-1]
    assert last.window.tokens[-1] == text[9] and last.window.guessed == 0
    assert until_eos([3, 4, 5, 4], frozenset({4, 5})) == [3, 4]
    assert until_eos([3, 6], frozenset({4, 5})) == [3, 6]


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
    prompt, by_step = [5, 5], RepeatGuard(2, times)
    assert RepeatGuard(2, times).note([*prompt, *tokens]) == expected
    assert [by_step.note([*prompt, *tokens[:end]]) for end in range(len(tokens) + 1)][-1] == expected


def test_the_repeat_guard_ends_an_answer_inside_a_window_too() -> None:
    loop = [4, 5, 6]
    for kind, make in decoders().items():
        stage = FakeStage(lambda at: (loop[at % 3], 0.0), lambda tokens: loop[len(tokens) % 3])
        session = opened([4, 9], 200, decoder=make(), repeat_guard=4)
        run(session, stage)
        assert session.finish_reason == "stop" and len(session.generated) == 12, kind
