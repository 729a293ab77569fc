"""How `docs/windows.md` shows drafts of the bundled drafter beside the other decoders."""

import json
from dataclasses import replace

import pytest

from tests.unit.tools.test_eval import measured
from tools.eval_windows import PricedCosts, Prices
from tools.windows_data import Measured, Score, Speed
from tools.windows_report import to_markdown


def drafted(num_steps: int, kind: str = "facts") -> Score:
    return Score(kind, "draft", 15, None, 4, 4, 4, num_tokens=100, num_steps=num_steps, num_rows=150)


def with_drafts() -> Measured:
    whole = measured()
    return replace(
        whole,
        draft_ms={"15": 5.0},
        drafts=[drafted(20, kind) for kind in whole.kinds],
        unknown=[drafted(80)],
        drafted_speeds=[
            Speed(kind, "draft", size, delay_ms, 100, 0.5)
            for kind in whole.kinds for delay_ms in (0.0, 60.0) for size in (15, None)
        ],
    )  # fmt: skip


def test_drafts_have_their_rows_in_every_table() -> None:
    made = with_drafts()
    assert Measured.from_json(json.loads(made.to_json())) == made
    lines = [line.replace(" ", "") for line in to_markdown(made).splitlines()]
    assert "|`draft`|15|100.0|100.0|5.00|1.50|20.0|" in lines
    assert "|facts|15|1.25|1.50|" in lines and "|60|`draft`|auto|200.0|200.0|200.0|200.0|" in lines
    assert any("5.0msfor15drafts" in line for line in lines) and any("|44of44|" in line for line in lines)
    changed = replace(made, drafts=[replace(score, num_equal=3) for score in made.drafts])
    assert any("|40of44|" in line.replace(" ", "") for line in to_markdown(changed).splitlines())
    without = to_markdown(measured())
    assert "left out" not in without and "| `draft`" not in without


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
