"""Windows of a drafter's drafts: sessions that share steps, other sources beside it, and chains without a drafter."""

import random
from dataclasses import dataclass

import pytest

from coordinator.decoding.decode_options import Decode
from coordinator.decoding.decoders import DrafterDrafts, TextDrafts, Verified
from coordinator.decoding.suffix_automaton import TextSearch
from coordinator.decoding.window_lengths import DRAFTER_WINDOWS, MASK_WINDOWS, TEXT_WINDOWS, WindowChooser, WindowKind
from coordinator.planning.costs import ChainCosts, DraftingCosts, StepCosts
from protos.brigade_pb2 import Sample


@dataclass(frozen=True)
class Prices:
    """What a chain takes: seconds of a step, of each of its rows, of each draft, and of each slot in it."""

    step_s: float = 0.020
    row_s: float = 0.005
    draft_s: float = 0.004
    slot_s: float = 0.001

    def rows_s(self, num_rows: int) -> float:
        return self.step_s + self.row_s * num_rows

    def drafting_s(self, num_drafts: int, num_slots: int) -> float:
        return num_drafts * (self.draft_s + self.slot_s * num_slots)


def warmed(prices: Prices) -> StepCosts:
    """What a chain knows of its steps after a warm-up."""
    steps = StepCosts()
    for rows in (1, 1, 64, 64):
        steps.observe(rows, prices.rows_s(rows))
    return steps


def speed_against_ar(
    prices: Prices,
    held: float,
    num_together: int,
    num_steps: int = 48,
    num_answers: int = 7,
    kind: WindowKind = DRAFTER_WINDOWS,
) -> float:
    """Play answers that share every step, on costs that are learned as they go, those of the first three uncounted."""
    numbers, steps, drafting = random.Random(4), warmed(prices), DraftingCosts()
    seconds, num_tokens = 0.0, 0
    for answer in range(num_answers):
        choosers = [WindowChooser(steps, kind, drafting=drafting) for _ in range(num_together)]
        ready = [0] * num_together  # drafts that the step before made
        for _ in range(num_steps):
            asked = [max(0, made.choose(num_together) - 1) for made in choosers]
            num_rows = num_together + sum(ready)
            if kind is MASK_WINDOWS:
                num_rows += sum(1 + num_drafts for num_drafts in asked if num_drafts)
            took_s, num_slots = prices.rows_s(num_rows), sum(map(bool, asked))
            steps.observe(num_rows, took_s)
            if num_slots and kind is DRAFTER_WINDOWS:
                drafting.observe(max(asked), num_slots, prices.drafting_s(max(asked), num_slots))
                took_s += prices.drafting_s(max(asked), num_slots)
            for made, num_drafts in zip(choosers, ready, strict=True):
                num_held = next((n for n in range(num_drafts) if numbers.random() >= held), num_drafts)
                made.observe_drafts(num_held, num_drafts)
                num_tokens += (1 + num_held) * (answer > 2)
            seconds += took_s * (answer > 2)
            ready = asked
    return num_tokens / seconds * prices.rows_s(num_together) / num_together


@pytest.mark.parametrize("num_together", [1, 2, 4, 8])
@pytest.mark.parametrize("held", [0.0, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("prices", [Prices(), Prices(row_s=0.001), Prices(draft_s=0.02), Prices(step_s=0.05)])
def test_drafts_cost_a_tenth_at_most_however_few_hold(prices: Prices, held: float, num_together: int) -> None:
    assert speed_against_ar(prices, held, num_together) > 0.9


@pytest.mark.parametrize("num_together", [1, 2, 4, 8])
@pytest.mark.parametrize("held", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("prices", [Prices(), Prices(row_s=0.001), Prices(step_s=0.007, row_s=0.00012)])
def test_mask_windows_cost_a_tenth_at_most(prices: Prices, held: float, num_together: int) -> None:
    assert speed_against_ar(prices, held, num_together, kind=MASK_WINDOWS) > 0.9


@pytest.mark.parametrize("num_together", [1, 2, 4, 8])
@pytest.mark.parametrize("prices", [Prices(row_s=0.001), Prices(step_s=0.05)])
def test_drafts_that_nearly_all_hold_pay_for_sessions_that_share_steps(prices: Prices, num_together: int) -> None:
    assert speed_against_ar(prices, 0.98, num_together) > 1.2


def test_sessions_that_share_a_step_choose_the_same_window_and_a_new_one_begins_with_what_is_known() -> None:
    steps, drafting = warmed(Prices(step_s=0.01, row_s=0.001)), DraftingCosts()
    good, bad = (WindowChooser(steps, DRAFTER_WINDOWS, drafting=drafting) for _ in range(2))
    for _ in range(50):
        good.observe_drafts(15, 15)
        bad.observe_drafts(0, 15)
    assert good.choose() == 16 and bad.choose() == 0
    assert good.choose(2) == bad.choose(2)
    for _ in range(300):
        good.observe_drafts(15, 15)
    assert WindowChooser(steps, DRAFTER_WINDOWS, drafting=drafting).choose() == 16
    assert WindowChooser(steps, DRAFTER_WINDOWS, drafting=DraftingCosts()).choose() < 16


REPEATED = [*range(20)] * 2


@pytest.mark.parametrize(
    ("text_held", "drafter_held", "takes_text"),
    [(15, 15, True), (15, 0, True), (0, 15, False), (None, 0, True), (None, None, True)],
)
def test_the_better_source_makes_the_draft(text_held: int | None, drafter_held: int | None, takes_text: bool) -> None:
    """Drafts from the text cost no drafting."""
    steps, drafting = warmed(Prices(row_s=0.0005)), DraftingCosts()
    for _ in range(2):
        drafting.observe(15, 1, 0.005)
    ours, theirs = WindowChooser(steps, TEXT_WINDOWS), WindowChooser(steps, DRAFTER_WINDOWS, drafting=drafting)
    for chooser, held in ((ours, text_held), (theirs, drafter_held)):
        for _ in range(100 if held is not None else 0):
            chooser.observe_drafts(held or 0, 15)
    drafted = DrafterDrafts(theirs, frozenset())
    decoder = Verified(TextDrafts(ours, TextSearch(), least=8, rival=drafted), drafted)
    proposal = decoder.propose(REPEATED, 1, 99)
    assert bool(proposal.drafts) == takes_text and bool(proposal.to_draft) != takes_text


@pytest.mark.parametrize("num_drafts", [None, 4])
def test_without_a_drafter_steps_are_those_of_ar_until_there_is_one_again(num_drafts: int | None) -> None:
    most_drafts = 15
    decode = Decode("draft", num_drafts=num_drafts)
    decoder = decode.make_decoder(frozenset(), ChainCosts(1), most_drafts=lambda: most_drafts)
    proposal = decoder.propose([1], 1, 99)
    assert proposal.to_draft > 0
    decoder.accept(proposal, [Sample(token=5)], [Sample(token=token) for token in (6, 7, 8)])
    decoder.rewind()
    for most_drafts in (0, 1, 2, 15):
        proposal = decoder.propose([1, 5], 1, 99)
        assert (
            proposal.drafts == () and proposal.to_draft <= most_drafts and bool(proposal.to_draft) == bool(most_drafts)
        )
        decoder.accept(proposal, [Sample(token=5)], [])


def test_a_head_of_short_blocks_is_expected_to_bring_no_more_than_their_drafts() -> None:
    steps, drafting = warmed(Prices(row_s=0.0005)), DraftingCosts()
    for _ in range(2):
        drafting.observe(15, 1, 0.005)
    chooser = WindowChooser(steps, DRAFTER_WINDOWS, drafting=drafting)
    for _ in range(100):
        chooser.observe_drafts(15, 15)
    speeds = [DrafterDrafts(chooser, frozenset(), lambda most=most: most).speed(1) for most in (0, 1, 3, 15)]
    assert speeds[0] == 0 and speeds == sorted(set(speeds))
