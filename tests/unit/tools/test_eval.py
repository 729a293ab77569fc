"""The figures of windows: what they count, and that the report says so."""

from pathlib import Path

import pytest

from coordinator.sessions.output import Answer, Token, Usage
from tools.eval_windows import ACCURACY, PricedCosts, Prices
from tools.figures import load, save
from tools.windows_data import Measured, Score, Speed
from tools.windows_report import to_markdown

SETTINGS = (("ar", None, None), ("diffusion", 16, None), ("diffusion-fast", 16, 0.4))


def score(kind: str, decoder: str, window: int | None = None, threshold: float | None = None, right: int = 4) -> Score:
    steps, rows = (100, 100) if decoder == "ar" else (20, 500)
    return Score(kind, decoder, window, threshold, 4, right, 4, num_tokens=100, num_steps=steps, num_rows=rows)


def measured(fast_right: int = 4) -> Measured:
    return Measured(
        "a machine", "demo", {"1": 10.0, "2": 11.0, "32": 40.0},
        scores=[score(kind, *setting) for kind in ACCURACY for setting in SETTINGS],
        wanted=[score("arithmetic", *each, right=n) for each, n in zip(SETTINGS, (4, 4, fast_right), strict=True)],
        chain=[score("facts", *setting) for setting in SETTINGS],
        speeds=[
            Speed(kind, decoder, window, delay_ms, 100, seconds)
            for kind in ACCURACY
            for delay_ms in (0.0, 60.0)
            for decoder, window, seconds in (
                ("ar", None, 2.0), ("diffusion", 16, 1.0), ("diffusion", None, 1.25),
            )
        ],
    )  # fmt: skip


def test_figures_are_per_token_and_per_answer(tmp_path: Path) -> None:
    ar, window = score("facts", "ar"), score("facts", "diffusion", 16)
    assert (ar.tokens_per_step, ar.rows_per_token, ar.round_trips) == (1, 1, 100)
    assert (window.tokens_per_step, window.rows_per_token, window.round_trips) == (5, 5, 20)
    total = Score("facts", "ar", None, None)
    for count, has_it_right in (8, True), (2, False):
        tokens = list(range(count))
        usage = Usage(num_prompt=7, started=0, num_reused=0, num_steps=count, num_rows=6 + count)
        total.add(Answer(samples=[Token(token) for token in tokens], usage=usage), tokens, is_right=has_it_right)
    assert (total.accuracy, total.equal, total.num_tokens, total.rows_per_token) == (50, 100, 10, 1)
    assert measured().break_even(16, delay_ms=0) == 4 and measured().break_even(16, delay_ms=50) == 1.5
    save(measured(), tmp_path / "windows.json")
    assert load(Measured, tmp_path / "windows.json") == measured()


def test_the_page_is_what_the_stored_figures_give() -> None:
    docs = Path(__file__).parents[3] / "docs"
    assert to_markdown(load(Measured, docs / "windows.json")) == (docs / "windows.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("right", "said"), [(4, "|0.0(100%to100%)|"), (3, "|25.0(100%to75%)|")])
def test_the_report_says_what_diffusion_fast_loses(right: int, said: str) -> None:
    [line] = [line for line in to_markdown(measured(right)).splitlines() if "`diffusion-fast` loses" in line]
    assert line.replace(" ", "").endswith(said)


def test_a_step_with_drafts_costs_what_its_rows_and_its_drafts_do() -> None:
    prices = Prices({1: 0.010, 8: 0.024}, 0.060, {3: 0.004, 7: 0.008})
    assert prices.seconds(8) == pytest.approx(0.084)
    assert [prices.drafting_s(count) for count in (0, 3, 5, 7)] == pytest.approx([0, 0.004, 0.006, 0.008])
    assert Prices({1: 0.010}, 0.0).drafting_s(7) == 0
    costs = PricedCosts(1, prices)
    for _ in range(3):
        costs.drafting.observe(7, 1, 99.0)
        costs.drafting.observe_start(1, 99.0)
    assert costs.drafting.seconds(7, 1) == 0.008 and costs.drafting.start_s(1) == 0
