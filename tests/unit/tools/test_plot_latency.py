"""Tokens per second against latency, and figures of GPUs: the fastest answers count, and numbers survive their JSON."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.quality.report import ComparedAnswer, Rounding
from coordinator.sessions.output import Answer, Token, Usage
from tools.bench_hops import Taken
from tools.figures import load, save
from tools.plot_latency import DECODES, Curves, Point, write_plot
from tools.verify_gpus import Run, summarise
from worker.errors import InputError


def test_each_prompt_counts_when_it_was_fastest() -> None:
    taken = Taken(2)
    for number, seconds in ((0, 3), (1, 2), (0, 1), (1, 9)):
        usage = Usage(1, 0, 0, num_steps=4, num_rows=6)
        taken.add(number, Answer(samples=[Token(7)] * 6, token_times=[5 * 10**8, seconds * 10**9], usage=usage))
    assert taken.tokens_per_s == pytest.approx(12 / 3.0) and taken.num_tokens / taken.num_steps == 1.5


def test_numbers_survive_their_json_and_are_drawn(tmp_path: Path) -> None:
    points = [Point(name, delay, delay + 0.1, 100 - delay, 2.0, True) for name in DECODES for delay in (5.0, 0.0)]
    curves = Curves("a machine", "demo", [4, 4], points)
    save(curves, tmp_path / "latency.json")
    assert load(Curves, tmp_path / "latency.json") == curves
    assert [point.delay_ms for point in curves.of("ar")] == [0.0, 5.0]
    write_plot(curves, tmp_path / "latency.svg")
    assert "ar" in (tmp_path / "latency.svg").read_text(encoding="utf-8")
    one, two = (  # of two runs the faster points count
        Curves("here", "demo", [4, 4], [Point("ar", delay, delay, rate, 1.0, True) for delay, rate in rates])
        for rates in (((0.0, 9.0), (1.0, 5.0)), ((0.0, 7.0), (1.0, 6.0), (2.0, 4.0)))
    )
    assert [point.tokens_per_s for point in one.faster(two).of("ar")] == [9.0, 6.0, 4.0]
    with pytest.raises(InputError, match=r"expected demo \[5, 3\] on here"):
        one.faster(replace(two, layers=[5, 3]))


def test_runs_of_all_seeds_are_added_up_and_every_figure_of_rounding_is_shown() -> None:
    equal = ComparedAnswer("a", [1, 2], [1, 2])
    differing = ComparedAnswer("b", [1, 2], [1, 3], 0.5, {1: Rounding(0.5, 0.01)})
    rounded = ComparedAnswer("c", [1, 2, 3], [1, 2, 4], 0.002, {2: Rounding(0.002, 0.01)})
    assert summarise([
        Run("demo", "one process", "ar", 0, 1.0, [equal, rounded]),
        Run("demo", "one process", "ngram", 0, 1.0, [differing]),
        Run("demo", "one process", "ar", 1, 1.0, [equal, equal, rounded]),
        Run("demo", "one process", "ngram", 1, 1.0, error="StageLost: gone"),
    ]) == [
        ("demo", "one process", "ar", "2", "10", "3", "2", "0", "0", "0.002 <= 0.01, 0.002 <= 0.01"),
        ("demo", "one process", "ngram", "2", "1", "0", "0", "1", "1", ""),
    ]  # fmt: skip
