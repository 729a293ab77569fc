"""Drafts from the text: what followed the last few tokens before."""

import random

import pytest

from coordinator.decoding.decoders import PromptLookup
from protos.brigade_pb2 import Sample
from tests.unit.decoding.fake_stage import FakeStage, NextToken, Step, opened, run, steps
from tests.unit.fake_chain import VOCAB, prompt_of
from worker.compute.header import num_rows


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


def test_prompt_lookup_leaves_room_for_the_token_after_its_drafts() -> None:
    found = [len(PromptLookup().propose([1, 2, 3] * 3, 1, room).drafts) for room in (1, 3, 4)]
    assert found == [0, 0, 3]


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
