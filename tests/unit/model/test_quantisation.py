"""What a config.json may say of quantisation, and what is said to what is not read here."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model.test_checkpoint import CONFIG, synthetic
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.model.quantisation import quantisation_of

AFFINE = {"group_size": 64, "bits": 4}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quantization": None, "quantization_config": None}, None),
        ({"quantization": AFFINE, "quantization_config": AFFINE}, AFFINE),
        ({"quantization": MXFP4, "quantization_config": {"quant_method": "fp8"}}, MXFP4),
        ({"quantization": AFFINE | {"lm_head": False, "a": MXFP4}}, AFFINE | {"lm_head": False, "a": MXFP4}),
        ({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}, MXFP4),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, MXFP4),
    ],
    ids=str,
)
def test_what_mlx_lm_reads_is_read_alike(config: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert quantisation_of(Checkpoint("m", Path("nowhere"), CONFIG | config, {})) == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised as 'fp8'"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantised as 'compressed-tensors'"),
        ({"text_config": {"quantization_config": {"quant_method": "modelopt"}}}, "quantised as 'modelopt'"),
        ({"quantization_config": {"bits": 4}}, "quantised as 'unnamed'"),
        ({"quantization_config": "int3"}, "quantised as 'int3'"),
        ({"quantization": MXFP4 | {"mode": "mxfp5"}}, "mode 'mxfp5'"),
        ({"quantization": AFFINE | {"lm_head": {"mode": "q6"}}}, "mode 'q6'"),
        ({"quantization": AFFINE | {"mode": ["affine"]}}, "mode ['affine']"),
        ({"quantization": {"bits": 4}}, "expected an object with group_size and bits"),
        ({"quantization": "mxfp4"}, "expected an object with group_size and bits, got 'mxfp4'"),
    ],
    ids=str,
)
def test_what_is_not_read_is_named_with_advice_before_anything_is_loaded(config: dict[str, Any], said: str) -> None:
    if "text_config" in config:
        config = {"text_config": CONFIG | config["text_config"]}
    with pytest.raises(ModelError) as caught:
        describe(synthetic(tied=True, **config))
    assert said in str(caught.value) and "mlx_lm.convert" in str(caught.value)


def test_modelopt_may_say_so_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ModelError, match="quantised as 'modelopt'"):
        quantisation_of(Checkpoint("m", tmp_path, CONFIG, {}))
    assert quantisation_of(Checkpoint("m", tmp_path, CONFIG | {"quantization": AFFINE}, {})) == AFFINE
