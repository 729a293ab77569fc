"""Lengths of windows: few of them, and rows told by number."""

import random
from copy import deepcopy

import pytest

from coordinator.decoding.decoders import DiffusionFast
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
    """So that what a window costs is known from other windows of its length.

    No more known tokens share it than the decoder allows: 64 of them would make a window of 80 rows, padded to 256.
    """
    seen = set()
    for num_prompt in [*range(1, 36), 48, 63, 64, 65, 80, 128, 255, 256, 257, 272, 300, 512, 528]:
        prompt = prompt_of(num_prompt)
        text = [*prompt, *plain_answer(prompt, 5)]
        for window in (1, 2, 5, 16, 32, 48, 128) if num_prompt % 16 < 2 else (4, 16):
            for decoder in (masked(fixed(window), frozenset()), DiffusionFast(window, 0.5, 0.02, frozenset())):
                for chunk in (24, 256):
                    session = opened(prompt, 5, decoder=deepcopy(decoder), chunk=chunk)
                    for step in run(session, FakeStage(oracle(text, 0.7, random.Random(num_prompt)))):
                        assert step.is_chunk or step.num_unfed <= window
                        assert step.is_chunk or num_rows(step.window) <= padded(2 * window)
                        seen |= {num_rows(step.window)} if step.window.masks else set()
    assert seen <= set(LENGTHS) and len(LENGTHS) <= 8


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
