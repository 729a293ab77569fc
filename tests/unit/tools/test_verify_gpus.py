"""The table of many runs of `verify`."""

import os

import pytest

from coordinator.quality.report import ComparedAnswer, Rounding
from tools.verify_gpus import Run, _visible, summarise

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
