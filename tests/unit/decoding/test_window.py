"""The window chooser: most tokens per second, by what steps cost and by how far drafts hold."""

import random
from itertools import pairwise

import pytest

from coordinator.decoding.window_lengths import WindowChooser
from coordinator.planning.costs import StepCosts


def costs_of(seconds_by_rows: dict[int, float]) -> StepCosts:
    """A chain on which steps of so many rows were seen to take so many seconds."""
    costs = StepCosts()
    for num_rows, seconds in seconds_by_rows.items():
        costs.observe(num_rows, 60.0)  # the first of its size compiles kernels: it must not count
        costs.observe(num_rows, seconds)
    return costs


def chooser(costs: StepCosts | dict[int, float], held: float | None = None, fixed: int | None = None) -> WindowChooser:
    """One on a chain with these costs, where so large a part of drafts hold."""
    made = WindowChooser(costs if isinstance(costs, StepCosts) else costs_of(costs), fixed=fixed)
    if held is not None:
        observe(made, held)
    return made


def observe(made: WindowChooser, held: float, times: int = 200, num_drafts: int = 15) -> None:
    """Drafts that hold each with this probability."""
    numbers = random.Random(1)
    for _ in range(times):
        made.observe_drafts(next((n for n in range(num_drafts) if numbers.random() >= held), num_drafts), num_drafts)


FLAT = {1: 0.010, 8: 0.010, 16: 0.010, 32: 0.010, 64: 0.010}
LINEAR = {1: 0.001, 8: 0.008, 16: 0.016, 32: 0.032, 64: 0.064}


def sloped(slope: float) -> dict[int, float]:
    """Steps of 10 ms, and so many seconds more for each row."""
    return {num_rows: 0.010 + slope * num_rows for num_rows in FLAT}


@pytest.mark.parametrize("window", [1, 5, 16, 64])
def test_a_fixed_window_stays_whatever_it_costs_and_yields(window: int) -> None:
    for costs in ({}, FLAT, LINEAR):
        for held in (None, 0.0, 1.0):
            assert chooser(costs, held, fixed=window).choose() == window
    assert WindowChooser(StepCosts()).choose() == 16, "while nothing is measured"
    assert chooser({}, 0.0).choose() == 16, "without costs, drafts tell nothing"


def test_the_dearer_rows_are_and_the_worse_drafts_hold_the_smaller_the_window() -> None:
    assert chooser(FLAT, 0.97).choose() == 32
    assert chooser(sloped(1e-4), 0.2).choose() == 4
    for num_together in (1, 8):
        assert chooser(FLAT, 0.0).choose(num_together) in (0, 4), "rows cost nothing, but drafts never hold"
    for windows in (
        [chooser(sloped(5e-4), held).choose() for held in (0.1, 0.5, 0.8, 0.9, 0.99)],
        [chooser(sloped(slope), 0.9).choose() for slope in (1e-2, 1e-3, 1e-4, 0)],
    ):
        assert windows == sorted(windows) and windows[0] == 0 and windows[-1] == 32
    for left_out in (8, 16, 32, 64):  # what is not measured lies on the line through the two nearest
        guessed = chooser({rows: cost for rows, cost in sloped(5e-4).items() if rows != left_out}, 0.9)
        assert guessed.choose() == chooser(sloped(5e-4), 0.9).choose()
    always = chooser(sloped(5e-4))
    for _ in range(60):
        always.observe_drafts(3, 3)  # three of three held, not three of four
    assert always.choose() == 32


def test_after_a_pause_a_window_is_tried_and_its_guesses_are_verified_before_the_next() -> None:
    costs = sloped(1e-3)
    made, windows = chooser(costs, 0.1), []
    for _ in range(100):
        windows.append(made.choose())
        made.observe_drafts(0, 3 if windows[-2:-1] == [4] else 0)
    tried = [at for at, window in enumerate(windows) if window]
    assert set(windows) == {0, 4} and all(after - before == 32 + 2 for before, after in pairwise(tried))


def play(made: WindowChooser, held: float, num_steps: int) -> list[int]:
    """Return the windows of a session: one's guesses are the next one's drafts, unless a draft failed before them."""
    numbers, windows, num_drafts = random.Random(2), list[int](), 0
    for _ in range(num_steps):
        windows.append(made.choose())
        num_drafts = min(num_drafts, max(windows[-1], 4) - 1)
        num_held = next((n for n in range(num_drafts) if numbers.random() >= held), num_drafts)
        made.observe_drafts(num_held, num_drafts)
        num_drafts = windows[-1] - 1 if windows[-1] and num_held == num_drafts else 0
    return windows


def test_windows_are_tried_only_where_they_could_pay_and_come_back_with_drafts_that_hold() -> None:
    assert play(chooser(LINEAR), held=1.0, num_steps=100) == [0] * 100
    made = chooser(sloped(1e-3))
    assert play(made, held=0.0, num_steps=300)[-20:].count(0) >= 19
    assert play(made, held=1.0, num_steps=100)[-10:] == [32] * 10


def test_what_pays_for_one_session_may_not_pay_for_many_that_share_the_step() -> None:
    """Rows cost nothing up to 64 of them, and after that what they cost alone."""
    costs = {1: 0.064, 64: 0.064, 128: 0.128, 1024: 1.024}
    made = chooser(costs, 0.8)
    windows = [made.choose(num_together) for num_together in (1, 2, 4, 8, 16)]
    assert windows == sorted(windows, reverse=True)
    assert windows[0] == 32 and windows[-1] in (0, 4)
    assert chooser(costs, 0.8, fixed=16).choose(16) == 16


@pytest.mark.parametrize("held", [0.3, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("slope", [0.0, 1e-4, 5e-4, 2e-3])
def test_the_choice_is_the_window_that_yields_most_tokens_per_second(held: float, slope: float) -> None:
    """Counted out: drafts are drawn and steps are paid for, for each window; close calls may go either way."""
    numbers = random.Random(3)

    def rate(window: int) -> float:
        tokens = 0
        for _ in range(4000):
            run = 1
            while run < window and numbers.random() < held:
                run += 1
            tokens += run
        return tokens / (4000 * (0.010 + slope * (2 * window or 1)))

    costs = sloped(slope)
    rates = {window: rate(window) for window in (0, 4, 8, 16, 32)}
    assert rates[chooser(costs, held).choose()] > 0.93 * max(rates.values())


def test_a_single_measurement_is_no_reason_for_a_smaller_window_and_a_single_outlier_is_outvoted() -> None:
    """As if steps cost the same: the largest is tried, and measured by that."""
    costs = costs_of({1: 0.01})
    made = chooser(costs, 0.97)
    assert made.choose() == 32
    for _ in range(2):
        costs.observe(64, 0.64)
    assert made.choose() < 32
    for _ in range(30):
        costs.observe(64, 0.010)
    assert made.choose() == 32


def test_measurements_that_fall_with_the_rows_do_not_make_rows_free_of_cost() -> None:
    """Noise: an extrapolation to no seconds, or less, would make one window look infinitely good."""
    for costs in ({8: 0.02, 16: 0.01}, {1: 0.02, 2: 0.001}, {32: 0.03, 64: 0.01}, {16: 0.001, 64: 1.0}):
        assert chooser(costs, 1.0).choose() in (4, 8, 16, 32)


def test_drafts_that_begin_to_fail_shrink_the_window_within_a_dozen_steps() -> None:
    made = chooser(sloped(5e-4), 0.97)
    before = made.choose()
    observe(made, 0.1, times=12)
    shrunk = made.choose()
    assert shrunk < before
    observe(made, 0.97, times=12)
    assert made.choose() > shrunk


def test_drafts_that_were_not_made_say_nothing_of_how_far_drafts_hold() -> None:
    costs = sloped(5e-4)
    made, other = chooser(costs, 0.9), chooser(costs, 0.9)
    assert made.choose() > 4
    for _ in range(50):
        made.observe_drafts(0, 0)
    assert made.choose() == other.choose()
    observe(made, 0.5, times=1)
    observe(other, 0.5, times=1)
    assert made.choose() == other.choose()


def test_what_a_step_costs_is_known_to_every_request_and_how_drafts_hold_to_its_own_alone() -> None:
    costs = StepCosts()
    code, prose = chooser(costs, 0.99), chooser(costs, 0.1)
    assert code.choose() == prose.choose() == 16 and not costs.is_known
    for num_rows in (1, 8, 16, 32, 64):
        costs.observe(num_rows, 60.0)
        assert num_rows > 1 or not costs.is_known
        costs.observe(num_rows, 0.010 + 0.0005 * num_rows)
    assert (code.choose(), prose.choose()) == (32, 0)
    assert costs.seconds(48) == pytest.approx(0.034)
