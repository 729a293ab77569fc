"""What one token reads of a layer of experts: those that it is sent to, and all that is no expert."""

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_model
from worker.model.checkpoint import open_folder
from worker.model.describe import describe


@pytest.mark.parametrize("quantize", [None, {"group_size": 32, "bits": 4}], ids=["as it is", "4 bits"])
def test_experts_that_a_token_is_not_sent_to_are_idle(tmp_path: Path, quantize: dict[str, Any] | None) -> None:
    """Two of four experts, of three matrices of 64 x 32; layer 1 has none, and a dense model reads all."""
    spec = describe(open_folder(make_model(tmp_path / "experts", "qwen3_moe", quantize=quantize), "tiny"))
    numbers = 4 * 3 * 64 * 32
    nbytes = 4 * numbers if quantize is None else numbers // 2 + 2 * 4 * numbers // 32  # scales and biases are float32
    assert [layer.idle_bytes for layer in spec.layers] == [nbytes // 2, 0, nbytes // 2, nbytes // 2]
    assert spec.layers[0].read_bytes == spec.layers[0].weight_bytes - nbytes // 2
    assert spec.layers[1].read_bytes == spec.layers[1].weight_bytes
    dense = describe(open_folder(make_model(tmp_path / "dense", quantize=quantize), "tiny"))
    assert all(layer.read_bytes == layer.weight_bytes > 0 for layer in dense.layers)
