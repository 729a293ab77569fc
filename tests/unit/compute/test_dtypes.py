"""The dtypes of safetensors: those that are accepted are those that MLX opens."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from worker.errors import ModelError
from worker.model.build import MLX_DTYPES
from worker.model.headers import read_tensors

OTHERS = {"F64": 64, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F6_E2M3": 6, "F4": 4}


def write(folder: Path, dtype: str, bits: int) -> Path:
    file = folder / "model.safetensors"
    header = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(bits))
    return file


@pytest.mark.parametrize("dtype", MLX_DTYPES)
def test_what_is_accepted_mlx_opens_as_what_stands_in_for_it(tmp_path: Path, dtype: str) -> None:
    bits = 8 * MLX_DTYPES[dtype].size
    file = write(tmp_path, dtype, bits)
    assert read_tensors(tmp_path, file.name)["a"].nbytes == bits
    found = mx.load(str(file))["a"]
    assert (found.dtype, found.shape) == (MLX_DTYPES[dtype], (8,))


@pytest.mark.parametrize("dtype", OTHERS)
def test_what_mlx_does_not_open_is_refused_by_name_before_it_is_downloaded(tmp_path: Path, dtype: str) -> None:
    file = write(tmp_path, dtype, OTHERS[dtype])
    with pytest.raises(ModelError, match=f"tensor a has dtype {dtype}, which is not supported; choose another"):
        read_tensors(tmp_path, file.name)
    with pytest.raises(RuntimeError, match="unsupported dtype"):  # or it could be accepted by now
        mx.load(str(file))
