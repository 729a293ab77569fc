"""Tokens per second against latency: the fastest answers count, and numbers survive their JSON."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from coordinator.quality.report import ComparedAnswer, Rounding
from coordinator.sessions.output import Answer, Token, Usage
from tools.plot_latency import DECODES, Curves, Point, Taken, write_plot
from tools.verify_gpus import Run, _visible, summarise


class Took(Answer):
    """An answer of so many seconds."""

    ttft_s = 0.5
    decode_s = 0.0

    def __init__(self, seconds: float, count: int) -> None:
        super().__init__(samples=[Token(7)] * count, usage=Usage(1, 0, 0, num_steps=4, num_rows=count))
        self.decode_s = seconds - self.ttft_s


def test_each_prompt_counts_when_it_was_fastest() -> None:
    taken = Taken(2)
    for number, seconds in ((0, 3.0), (1, 2.0), (0, 1.0), (1, 9.0)):
        taken.add(number, Took(seconds, 6))  # type: ignore[arg-type]
    assert taken.tokens_per_s == pytest.approx(12 / 3.0) and taken.num_tokens / taken.num_steps == 1.5


def test_numbers_survive_their_json_and_are_drawn(tmp_path: Path) -> None:
    points = [Point(name, delay, delay + 0.1, 100 - delay, 2.0, True) for name in DECODES for delay in (5.0, 0.0)]
    curves = Curves("a machine", "demo", [4, 4], points)
    assert Curves.from_json(json.loads(json.dumps(asdict(curves)))) == curves
    assert [point.delay_ms for point in curves.of("ar")] == [0.0, 5.0]
    write_plot(curves, tmp_path / "latency.svg")
    assert "ar" in (tmp_path / "latency.svg").read_text(encoding="utf-8")
    one, two = (  # of two runs the faster points count
        Curves("here", "demo", [4, 4], [Point("ar", delay, delay, rate, 1.0, True) for delay, rate in rates])
        for rates in (((0.0, 9.0), (1.0, 5.0)), ((0.0, 7.0), (1.0, 6.0), (2.0, 4.0)))
    )
    assert [point.tokens_per_s for point in one.faster(two).of("ar")] == [9.0, 6.0, 4.0]


EQUAL, DIFFERING = (
    ComparedAnswer("a", [1, 2], [1, 2]),
    ComparedAnswer("b", [1, 2], [1, 3], 0.5, {1: Rounding(0.5, 0.01)}),
)
ROUNDED = ComparedAnswer("c", [1, 2, 3], [1, 2, 4], 0.002, {2: Rounding(0.002, 0.01)})


def test_runs_of_all_seeds_are_added_up_and_every_figure_of_rounding_is_shown() -> None:
    runs = [
        Run("demo", "one process", "ar", 0, 1.0, [EQUAL, ROUNDED]),
        Run("demo", "one process", "ngram", 0, 1.0, [DIFFERING]),
        Run("demo", "one process", "ar", 1, 1.0, [EQUAL, EQUAL, ROUNDED]),
        Run("demo", "one process", "ngram", 1, 1.0, error="StageLost: gone"),
    ]
    assert summarise(runs) == [
        ("demo", "one process", "ar", "2", "10", "3", "2", "0", "0", "0.002 <= 0.01, 0.002 <= 0.01"),
        ("demo", "one process", "ngram", "2", "1", "0", "0", "1", "1", ""),
    ]


@pytest.mark.parametrize("before", [None, "0,1"])
def test_a_process_that_does_not_start_leaves_the_gpus_visible(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with pytest.raises(OSError), _visible("1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        raise OSError("no such program")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
