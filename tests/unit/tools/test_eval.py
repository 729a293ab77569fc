"""The tools' numbers: what they count, and that the report says what was counted."""

import json

from tools.demo_data.turn import Turn
from tools.eval_windows import ACCURACY, is_right
from tools.windows_data import Measured, Score, Speed
from tools.windows_report import table, to_markdown


def score(kind: str, decoder: str, window: int | None = None, threshold: float | None = None, right: int = 4) -> Score:
    steps, rows = (100, 100) if decoder == "ar" else (20, 500)
    return Score(kind, decoder, window, threshold, 4, right, 4, num_tokens=100, num_steps=steps, num_rows=rows)


def measured(fast_right: int = 4) -> Measured:
    settings = (("ar", None, None), ("diffusion", 16, None), ("diffusion-fast", 16, 0.4))
    speeds = [
        Speed(kind, *decoder, delay_ms, 100, seconds, picked)
        for kind in ACCURACY
        for delay_ms in (0.0, 60.0)
        for decoder, seconds, picked in (
            (("ar", None), 2.0, {}),
            (("diffusion", 16), 1.0, {}),
            (("diffusion", None), 1.25, {"32": 3}),
        )
    ]
    return Measured(
        "a machine", "demo", {"1": 10.0, "2": 11.0, "32": 40.0},
        scores=[score(kind, *setting) for kind in ACCURACY for setting in settings],
        wanted=[score("arithmetic", *settings[0]), score("arithmetic", *settings[1]),
                score("arithmetic", *settings[2], right=fast_right)],
        chain=[score("facts", *setting) for setting in settings],
        speeds=speeds,
    )  # fmt: skip


def test_rows_that_are_computed_in_vain_lower_the_cacheability() -> None:
    ar, window = score("facts", "ar"), score("facts", "diffusion", 16)
    assert (ar.tokens_per_step, ar.cacheability, ar.rows_per_token, ar.round_trips) == (1, 1, 1, 100)
    assert (window.tokens_per_step, window.cacheability, window.rows_per_token, window.round_trips) == (5, 0.2, 5, 20)
    total = Score("facts", "ar", None, None)
    total.add(is_right=True, is_equal=True, num_tokens=8, num_steps=8, num_rows=8)
    total.add(is_right=False, is_equal=True, num_tokens=2, num_steps=2, num_rows=2)
    assert (total.accuracy, total.equal, total.num_tokens) == (50, 100, 10)
    assert measured().break_even(16, delay_ms=0) == 4 and measured().break_even(16, delay_ms=50) == 1.5
    assert Measured.from_json(json.loads(measured().to_json())) == measured()
    turn = Turn("facts", "Tell me.", "So it is.")
    assert is_right(turn, "So it is.", True) and not is_right(turn, "So it is.", False)  # it did not end


def test_the_report_admits_what_was_missed() -> None:
    for right, said in ((4, "|yes|"), (3, "|**no**|")):
        page = to_markdown(measured(right))
        line = next(line for line in page.splitlines() if "`diffusion-fast` loses" in line)
        assert line.replace(" ", "").endswith(said)
    assert table(("a", "long"), [("xyz", "1")]) == "| a   | long |\n| --- | ---  |\n| xyz | 1    |\n"
