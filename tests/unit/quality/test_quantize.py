"""Unfinished weight files of a quantised copy."""

from pathlib import Path

import mlx.core as mx
import pytest

from coordinator.quality.quantize import WeightFile


@pytest.mark.parametrize(
    ("num_bytes", "num_whole"), [(0, 0), (39, 0), (40, 1), (41, 1), (63, 1), (64, 2), (191, 2), (192, 3)]
)
def test_a_tensor_counts_as_written_once_its_last_byte_is_there(tmp_path: Path, num_bytes: int, num_whole: int) -> None:
    tensors = {"a": mx.zeros((10,)), "b": mx.zeros((2, 6), mx.bfloat16), "c": mx.zeros((32,), mx.uint32)}
    file = WeightFile(tensors)
    path = tmp_path / "model.safetensors.part"
    path.write_bytes(file.header + bytes(num_bytes))
    assert file.whole_tensors(path) == num_whole and file.nbytes == len(file.header) + 192
    path.write_bytes(file.header[:-1])
    assert file.whole_tensors(path) == 0
