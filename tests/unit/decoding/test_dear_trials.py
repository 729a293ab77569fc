"""Trials of drafts that do not pay, where steps are computed ahead of their frames: a frame with drafts loses those."""

import random

import pytest

from coordinator.decoding.window_lengths import DRAFTER_WINDOWS, WindowChooser
from coordinator.planning.costs import DraftingCosts, StepCosts

_NUM_TOKENS = 64  # of an answer, as of `tools.bench_auto`


class Device:
    """One node that computes two steps ahead of their frames: what steps take, and what they teach."""

    def __init__(self, step_s: float, row_s: float, build_s: float, draft_s: float) -> None:
        self.steps, self.drafting = StepCosts(), DraftingCosts()
        self._step_s, self._row_s, self._build_s, self._draft_s = step_s, row_s, build_s, draft_s
        self._num_ahead = 0
        for rows in (1, 1, 64, 64):  # as the warm-up of a chain
            self.steps.observe(rows, self.rows_s(rows))

    def rows_s(self, num_rows: int) -> float:
        return self._step_s + self._row_s * num_rows

    def step(self, drafts: list[int], asked: list[int]) -> float:
        """Take a step in which the slots verify so many drafts and want so many new ones; return its seconds."""
        num_slots, num_rows, num_asked = len(drafts), len(drafts) + sum(drafts), max(asked)
        is_plain = not (any(drafts) or num_asked)
        took_s, lost_s, drafting_s = self.rows_s(num_rows), 0.0, num_asked * self._draft_s
        if not is_plain:
            took_s += self._num_ahead * self.rows_s(num_slots)
        if not (is_plain and self._num_ahead):
            took_s += self._build_s
        self._num_ahead = 2 if is_plain else 0
        if num_asked:
            self.drafting.observe(num_asked, sum(map(bool, asked)), drafting_s)
            if not any(drafts):
                lost_s = max(0.0, took_s - self.steps.seconds(num_rows))
                self.drafting.observe_start(num_slots, lost_s)
        self.steps.observe(num_rows, took_s - lost_s)
        return took_s + drafting_s


def speed_against_ar(device: Device, held: float, num_slots: int, num_answers: int) -> float:
    """Play answers that share every step; those of the first half teach and do not count."""
    numbers, seconds, num_tokens = random.Random(5), 0.0, 0
    for answer in range(num_answers):
        choosers = [WindowChooser(device.steps, DRAFTER_WINDOWS, drafting=device.drafting) for _ in range(num_slots)]
        counts, drafts, is_counted = [0] * num_slots, [0] * num_slots, answer >= num_answers // 2
        while min(counts) < _NUM_TOKENS:
            asked = [max(0, chooser.choose(num_slots) - 1) for chooser in choosers]
            took_s = device.step(drafts, asked)
            for at, chooser in enumerate(choosers):
                num_held = next((n for n in range(drafts[at]) if numbers.random() >= held), drafts[at])
                chooser.observe_drafts(num_held, drafts[at])
                counts[at] += 1 + num_held
            drafts = asked
            seconds += is_counted * took_s
        num_tokens += is_counted * sum(counts)
    return num_tokens / seconds * device.rows_s(num_slots) / num_slots


DEVICES = [
    (0.003, 0.00001, 0.002, 0.001),  # a GPU whose steps take little more than their building
    (0.010, 0.0005, 0.001, 0.001),
    (0.002, 0.002, 0.0005, 0.0003),
]


@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("prices", DEVICES)
def test_drafts_that_never_hold_cost_little(prices: tuple[float, float, float, float], num_slots: int) -> None:
    assert speed_against_ar(Device(*prices), 0.0, num_slots, num_answers=12) > 0.92


@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("held", [0.3, 0.5])
def test_drafts_that_seldom_hold_are_given_up_where_steps_are_computed_ahead(held: float, num_slots: int) -> None:
    """What a frame loses that begins to draft is no cost of its rows: else steps without drafts seem slow for good."""
    assert speed_against_ar(Device(*DEVICES[0]), held, num_slots, num_answers=16) > 0.9


@pytest.mark.parametrize("prices", DEVICES[:2])
def test_drafts_that_come_to_hold_are_found_by_a_later_answer(prices: tuple[float, float, float, float]) -> None:
    device = Device(*prices)
    speed_against_ar(device, 0.0, 1, num_answers=12)
    assert speed_against_ar(device, 0.98, 1, num_answers=20) > 1.5
