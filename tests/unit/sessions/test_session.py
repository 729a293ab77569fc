"""One session: which windows it makes of a prompt and of what a decoder proposes, and when it ends."""

from collections.abc import Callable

import pytest

from coordinator.decoding.decoders import Decoder, DiffusionFast, Verified
from tests.unit.decoding.fake_stage import FakeStage, opened, run, steps
from tests.unit.fake_chain import decoders, prompt_of
from worker.compute.header import num_rows

DECODERS = decoders(window=16)


def fill(window: int = 16) -> DiffusionFast:
    return DiffusionFast(window, 0.4, 0.02, frozenset())


@pytest.mark.parametrize(
    ("make", "num_prompt", "chunk", "expected"),
    [
        (Verified, 1, 4, [(0, 1, 1)]),
        (Verified, 3, 4, [(0, 3, 1)]),
        (Verified, 4, 4, [(0, 4, 1)]),
        (Verified, 5, 4, [(0, 4, 0), (4, 1, 1)]),
        (Verified, 8, 4, [(0, 4, 0), (4, 4, 1)]),
        (Verified, 9, 4, [(0, 4, 0), (4, 4, 0), (8, 1, 1)]),
        (Verified, 3, 1, [(0, 1, 0), (1, 1, 0), (2, 1, 1)]),
        (Verified, 700, 300, [(0, 300, 0), (300, 300, 0), (600, 100, 1)]),
        (fill, 1, 8, [(0, 1, 4)]),
        (fill, 4, 8, [(0, 4, 4)]),  # as many tokens as the decoder allows beside a proposal
        (fill, 5, 8, [(0, 4, 0), (4, 1, 4)]),  # the last one is left for it
        (fill, 8, 8, [(0, 7, 0), (7, 1, 4)]),
        (fill, 9, 8, [(0, 8, 0), (8, 1, 4)]),
        (fill, 12, 8, [(0, 8, 0), (8, 4, 4)]),
        (fill, 13, 8, [(0, 8, 0), (8, 4, 0), (12, 1, 4)]),
    ],
)
def test_a_prompt_goes_in_whole_chunks_and_few_of_its_tokens_share_a_window_with_mask_rows(
    make: Callable[[], Decoder], num_prompt: int, chunk: int, expected: list[tuple[int, int, int]]
) -> None:
    """Only the last row is wanted, or the places after it are guessed."""
    session = opened(prompt_of(num_prompt), 20, chunk=chunk, decoder=fill(4) if make is fill else make())
    windows = []
    while session.is_ready:
        windows.append(session.next_window())
    assert [(w.base, len(w.tokens), w.wanted + w.guessed) for w in windows] == expected
    assert {(bool(w.wanted), bool(w.masks)) for w in windows[:-1]} <= {(False, False)}


def test_a_session_is_ready_while_it_has_chunks_and_then_again_once_its_proposal_is_answered() -> None:
    session = opened(prompt_of(9), 3, chunk=4)
    states = [(session.is_prefilling, session.is_ready, session.is_streaming)]
    states += [(session.is_prefilling, session.is_ready, session.is_streaming) for _ in steps(session, FakeStage())]
    assert states == [
        (True, True, False),
        (True, True, False),
        (False, True, False),  # one token of the prompt is left: the size of a decoding step
        (False, True, True),
        (False, True, True),
        (False, False, True),
    ]
    waiting = opened(prompt_of(2), 3)
    waiting.next_window()
    assert not waiting.is_ready


def test_a_prompt_is_computed_as_far_as_the_results_of_its_chunks_have_come() -> None:
    session = opened(prompt_of(9), 3, chunk=4)
    stage, computed = FakeStage(), [0]
    windows = [session.next_window() for _ in range(3)]
    for window in windows:
        assert session.num_prompt_computed == computed[-1]
        session.commit(*stage.answer(window))
        computed.append(session.num_prompt_computed)
    assert computed == [0, 4, 8, 9]
    session.rewind()
    assert session.num_prompt_computed == 9, "its first token is there"
    lost = opened(prompt_of(9), 3, chunk=4)
    lost.commit(*FakeStage().answer(lost.next_window()))
    lost.next_window()  # its result never comes
    lost.rewind()
    assert lost.num_prompt_computed == 0
    lost.slot = 0
    lost.commit(*FakeStage().answer(lost.next_window()))
    assert lost.num_prompt_computed == 4


def test_what_is_reused_is_not_fed_again_and_one_token_at_least_is_fed() -> None:
    prompt = prompt_of(20)
    session = opened(prompt, 3, chunk=8)
    for num_tokens in (20, 21):
        with pytest.raises(AssertionError):
            session.reuse(num_tokens)
    session.reuse(10)
    window = session.next_window()
    assert (window.base, list(window.tokens)) == (10, prompt[10:18])
    assert window.prefix_hash == session.history.prefix_hash(10)
    assert (session.num_reused, session.fed, session.num_unfed, session.num_rows) == (10, 18, 2, 8)
    with pytest.raises(AssertionError):  # something has been fed
        session.reuse(15)
    session.finish()
    assert session.finish_reason == "stop" and not session.is_ready


def test_steps_and_rows_are_counted_those_that_are_fed_again_too() -> None:
    session = opened(prompt_of(9), 5, chunk=4)
    assert sum(step.window.wanted for step in run(session, FakeStage())) == session.num_steps == 5
    assert session.num_rows == 9 + 4
    filled, windows = opened(prompt_of(1), 60, decoder=fill()), []
    for step in steps(filled, FakeStage(lambda at: (at % 50, at * 13 % 10 / 10))):
        windows.append(step.window)
        assert filled.num_rows_last == num_rows(step.window)
    assert any(window.positions for window in windows), "some were filled out of order"
    assert filled.num_steps == sum(window.guessed > 0 for window in windows)
    assert filled.num_rows == sum(map(num_rows, windows))


@pytest.mark.parametrize("name", ["ar", "ngram"])
def test_the_rows_of_a_prompts_end_say_nothing_of_those_to_come(name: str) -> None:
    session = opened(prompt_of(9), 3, decoder=DECODERS[name]())
    first = next(steps(session, FakeStage()))
    assert num_rows(first.window) == 9 and session.num_rows_last == 1
