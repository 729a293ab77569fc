"""Lengths of windows: few of them, and rows told by number."""

import random
from copy import deepcopy
from itertools import pairwise

import pytest

from coordinator.decoding.decoders import Decoder, Fill
from coordinator.decoding.window_lengths import LENGTHS, largest_within, mask_count, padded
from tests.unit.decoding.fake_stage import FakeStage, decoders, fixed, opened, oracle, positions, run
from tests.unit.fake_chain import VOCAB, masked, plain_answer, prompt_of
from worker.compute.header import num_rows

MASK = VOCAB - 1  # an id like any other in these tests: windows know their MASK rows by number, not by id


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
            made += [masked(fixed(window), frozenset()), Fill(window, 0.5, 0.02, frozenset())]
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
        for decoder in (masked(fixed(window), frozenset()), Fill(window, 0.5, 0.02, frozenset())):
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
