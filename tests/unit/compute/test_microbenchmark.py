"""Measuring a model's layers on random numbers: every kind of layer and the head, more rows never for less."""

from itertools import cycle
from pathlib import Path

import mlx.core as mx
import pytest

from tests.tiny import FAMILIES, make_model
from worker.compute import microbenchmark as module
from worker.compute.microbenchmark import ROWS, measure_speed
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.mark.parametrize(
    ("family", "quantize"), [*zip(FAMILIES, cycle([None, {"group_size": 32, "bits": 4}]), strict=False)]
)
def test_every_kind_of_layer_and_the_head_are_measured(tmp_path: Path, family: str, quantize: dict[str, int]) -> None:
    checkpoint = open_folder(make_model(tmp_path, family, tied=quantize is not None, quantize=quantize), "tiny")
    (tmp_path / "model.safetensors").unlink()  # nothing of it is read
    found = measure_speed(checkpoint, within_s=0)
    assert len(found.kinds) == len(describe(checkpoint).kinds) and found.gbps > 0
    for times in (*found.kinds, found.head):
        assert times.rows[0] == 1 and min(times.ms) > 0


def test_with_time_enough_all_sizes_are_tried_and_more_rows_never_take_less(tmp_path: Path) -> None:
    checkpoint = open_folder(make_model(tmp_path), "tiny")
    measure_speed(checkpoint, within_s=0)
    before = mx.get_active_memory()
    found = measure_speed(checkpoint, within_s=60)
    assert mx.get_active_memory() <= before and mx.get_cache_memory() == 0, "something stays in memory"
    for times in (*found.kinds, found.head):
        assert list(times.rows) == sorted(ROWS) and list(times.ms) == sorted(times.ms)


def test_rare_kinds_of_layers_are_reckoned_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of two kinds of layers, of which one is tried."""
    monkeypatch.setattr(module, "MOST_KINDS", 1)
    checkpoint = open_folder(make_model(tmp_path, "qwen3_moe"), "tiny")
    first, second = describe(checkpoint).kinds
    times = measure_speed(checkpoint, within_s=0).kinds
    assert times[1].ms[0] / times[0].ms[0] == pytest.approx(second.read_bytes / first.read_bytes)
