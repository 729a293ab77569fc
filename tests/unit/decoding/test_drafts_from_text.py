"""Drafts from the text: what followed the longest end of it that stood before."""

import random
from array import array

import pytest

from coordinator.decoding.decoders import TextDrafts, Verified
from coordinator.decoding.suffix_automaton import EndedTexts, SuffixAutomaton, TextSearch
from coordinator.decoding.window_lengths import TEXT_WINDOWS, WindowChooser
from coordinator.planning.costs import StepCosts
from protos.brigade_pb2 import Sample
from tests.unit.decoding.fake_stage import FakeStage, NextToken, Step, opened, run, steps
from tests.unit.fake_chain import VOCAB, from_text, prompt_of
from worker.compute.header import num_rows


def looping(period: int) -> NextToken:
    return lambda tokens: len(tokens) % period


def draft_of(step: Step) -> list[int]:
    return list(step.window.tokens[step.num_unfed :])


def costs_per_row() -> StepCosts:
    """Rows that cost a twentieth of a step each."""
    costs = StepCosts()
    for rows in (1, 2, 4, 8, 16):
        for _ in range(2):
            costs.observe(rows, 0.010 + 0.0005 * rows)
    return costs


def places_of(end: list[int], text: list[int]) -> list[int]:
    """Where the tokens stand in a text, by the index of the token that follows."""
    sought, within = (array("q", tokens).tobytes() for tokens in (end, text[:-1]))
    found, at = [], within.find(sought)
    while at >= 0:
        if at % 8 == 0:
            found.append(at // 8 + len(end))
        at = within.find(sought, at + 1)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_end_of_a_text_that_stood_before_is_found(seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(20):
        text, automaton = [], SuffixAutomaton()
        for token in (numbers.randrange(numbers.choice([2, 3, 5])) for _ in range(numbers.randint(1, 60))):
            text.append(token)
            automaton.extend([token])
            length, end = automaton.find_repeat()
            assert length == max((n for n in range(1, len(text)) if places_of(text[-n:], text)), default=0)
            assert length == 0 or end in places_of(text[-length:], text)


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_what_followed_the_longest_end_of_the_text_that_stood_before(seed: int) -> None:
    numbers = random.Random(seed)
    phrases = [prompt_of(numbers.randint(6, 30), seed=i) for i in range(3)]
    text = [token for _ in range(100) for token in numbers.choice(phrases)]
    session = opened(text[:50], 500, decoder=from_text())
    num_drafts = 0
    for step in steps(session, FakeStage(next_token=lambda tokens: text[len(tokens)])):
        if drafts := draft_of(step):
            num_drafts += 1
            before = step.before
            length = max(n for n in range(1, len(before)) if places_of(before[-n:], before))
            followed = [before[end:] for end in places_of(before[-length:], before)]
            repeated = [(rest * len(drafts))[: len(drafts)] for rest in followed]
            assert drafts in repeated
            assert len(drafts) in (1, 3, 7, 15) and len(drafts) <= length
    assert session.generated == text[50:550] and num_drafts > 20


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 6, 7, 10, 15, 20, 40])
def test_drafts_are_long_on_any_loop(period: int) -> None:
    """However short the loop: a draft may run past the end of the text, into itself."""
    session = opened([i % period for i in range(2 * period + 3)], 320, decoder=from_text())
    found = [step for step in run(session, FakeStage(next_token=looping(period))) if not step.is_chunk]
    assert len(found) < 320 / 16 + 8
    lengths = [len(draft_of(step)) for step in found if draft_of(step) and session.num_prompt + 300 > len(step.before)]
    assert lengths == sorted(lengths) and lengths[4:] == [15] * len(lengths[4:])


def test_drafts_leave_room_for_the_token_after_them() -> None:
    found = [len(from_text().propose([1, 2, 3] * 3, 1, room).drafts) for room in (1, 2, 3, 4, 99)]
    assert found == [0, 1, 1, 3, 3]


def test_drafts_that_never_hold_are_tried_now_and_then_only() -> None:
    """Drafts are found at every step: 1 window in 20 at most is spent on them."""
    prompt = prompt_of(60)
    decoder = from_text(costs_per_row())
    tokens, num_failed = list(prompt), 0
    for _ in range(1000):
        proposal = decoder.propose([*tokens, *prompt[10:13]], 1, 999)
        num_failed += bool(proposal.drafts)
        tokens += prompt[10:13]  # the last three tokens stood there before
        accepted = decoder.accept(proposal, [Sample(token=VOCAB + 1)] * (1 + len(proposal.drafts)), [])
        assert len(accepted.samples) == 1
    assert 10 < num_failed <= 50


def test_a_text_without_repetition_costs_no_row() -> None:
    session = opened([0, 1, 2], 500, decoder=from_text())
    found = [step for step in run(session, FakeStage(next_token=len)) if not step.is_chunk]
    assert [num_rows(step.window) for step in found] == [3] + [1] * 499  # the prompt, and then a token at a time


def test_an_answer_that_was_given_before_is_drafted_from_that_answer() -> None:
    """A second session gets the same text in a few steps, and no draft crosses from one ended answer to the next."""
    answer, ended = prompt_of(200, seed=7), EndedTexts()
    for tokens in (prompt_of(60, seed=8), answer, prompt_of(60, seed=9)):
        ended.add("of one key", tokens)
    num_steps = {}
    for owner in ("of one key", "of another"):
        decoder = Verified(TextDrafts(WindowChooser(StepCosts(), TEXT_WINDOWS), TextSearch(ended.of(owner))))
        session = opened(prompt_of(5, seed=11), 200, decoder=decoder)
        found = run(session, FakeStage(next_token=lambda tokens: answer[len(tokens) - 5]))
        assert session.generated == answer
        assert all(min(draft_of(step), default=0) >= 0 for step in found)
        num_steps[owner] = len(found)
    assert num_steps["of one key"] < 200 / 16 + 12
    assert num_steps["of another"] == 200


def test_answers_that_end_meanwhile_disturb_no_search() -> None:
    """What is found stands there, whatever was added since the session began."""
    numbers = random.Random(4)
    for _ in range(100):
        texts, tokens = EndedTexts(), []
        texts.add("", [numbers.randrange(3) for _ in range(20)])
        ended = texts.of("")
        search = TextSearch(ended)
        for number in range(40):
            if number % 10 == 9:
                texts.add("", [numbers.randrange(3) for _ in range(20)])
            tokens.append(numbers.randrange(3))
            length = search.find(tokens)
            stood = places_of(tokens[-length:], tokens) or places_of(tokens[-length:], [*ended.tokens, -1])
            assert length == 0 or stood
            assert all(token >= 0 for token in search.drafts(15))
            assert search.find(tokens) == length and len(search.drafts(7)) <= 7


def test_ended_answers_are_forgotten_once_those_of_all_owners_together_are_too_many() -> None:
    ended = EndedTexts()
    for number in range(33):  # of 2,048 tokens each, of which 65,536 are kept
        ended.add(f"key {number % 2}", prompt_of(2048, seed=number))
    assert [len(ended.of(f"key {number}").tokens) for number in range(3)] == [2049, 0, 0]


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    tokens = prompt_of(40) * 1000
    search, num_steps = TextSearch(), 0
    while not search.find(tokens):
        num_steps += 1
    assert 60 <= num_steps < 70 and search.drafts(7) == tokens[:7], "the last 32,768 of 40,000"
