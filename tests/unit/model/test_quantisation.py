"""What a config.json may say of quantisation, and what is said to what is not read here."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_model
from tests.unit.model.test_checkpoint import CONFIG, synthetic
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.describe import describe
from worker.model.quantisation import quantisation_of

AFFINE = {"group_size": 64, "bits": 4}
MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
INT4 = {"group_size": 32, "bits": 4, "mode": "affine"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}


def packed(**weights: Any) -> dict[str, Any]:
    """As compressed-tensors tells of integers."""
    groups = {"group_0": {"weights": {"num_bits": 4, "symmetric": True} | weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("config", "parameters", "method"),
    [
        ({}, None, ""),
        ({"quantization": None, "quantization_config": None}, None, ""),
        ({"quantization": AFFINE, "quantization_config": AFFINE}, AFFINE, ""),
        ({"quantization": MXFP4, "quantization_config": {"quant_method": "fp8"}}, MXFP4, ""),
        ({"quantization": AFFINE | {"lm_head": False, "a": MXFP4}}, AFFINE | {"lm_head": False, "a": MXFP4}, ""),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, MXFP4, "mxfp4"),
        *(
            ({"quantization_config": config}, parameters, config["quant_method"])
            for config, parameters in (
                ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, MXFP4),
                ({"quant_method": "mxfp8"}, MXFP8),
                (BLOCKS, None),
                (BLOCKS | {"weight_block_size": [32, 32]}, MXFP8),
                (packed(), INT4),
                (packed() | {"format": "nvfp4-pack-quantized"}, NVFP4),
                (packed() | {"format": "mxfp4-pack-quantized"}, MXFP4),
                ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
                ({"quant_method": "awq", "bits": 4}, INT4),
            )
        ),
    ],
    ids=str,
)
def test_what_mlx_lm_reads_is_read(config: dict[str, Any], parameters: dict[str, Any] | None, method: str) -> None:
    found = quantisation_of(Checkpoint("m", Path("nowhere"), CONFIG | config, {}))
    assert (found.parameters, found.method) == (parameters, method)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        *(
            ({"quantization_config": config}, named)
            for config, named in (
                ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
                (packed(num_bits=8), "pack-quantized"),
                (packed(symmetric=False), "pack-quantized"),
                (packed() | {"format": "float-quantized"}, "float-quantized"),
                ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt', which is not read here: FP8"),
                ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
                ({"quant_method": "awq", "bits": 8}, "'awq', which is not read here: 8"),
                ({"quant_method": "awq", "bits": 4}, "'awq'"),
                ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
                ({"bits": 4}, "'unnamed'"),
                ("int3", "'int3'"),
            )
        ),
        ({"text_config": CONFIG | {"quantization_config": {"quant_method": "modelopt"}}}, "'modelopt'"),
        ({"quantization": MXFP8, "quantize_activations": True}, "'quantize_activations'"),
        ({"quantization": MXFP4 | {"mode": "mxfp5"}}, "mode 'mxfp5'"),
        ({"quantization": AFFINE | {"lm_head": {"mode": "q6"}}}, "mode 'q6'"),
        ({"quantization": AFFINE | {"mode": ["affine"]}}, "mode ['affine']"),
        ({"quantization": {"bits": 4}}, "expected an object with group_size and bits"),
        ({"quantization": "mxfp4"}, "expected an object with group_size and bits, got 'mxfp4'"),
    ],
    ids=str,
)
def test_what_is_not_read_is_named_with_advice_before_anything_is_loaded(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        describe(synthetic(tied=True, **config))
    assert named in str(caught.value) and "brigade quantize" in str(caught.value)


def test_a_model_that_was_converted_back_may_still_tell_of_fp8(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", config={"quantization_config": BLOCKS})
    assert describe(open_folder(folder)).num_layers == 4


def test_modelopt_may_say_so_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert quantisation_of(Checkpoint("m", tmp_path, CONFIG, {})).parameters == NVFP4
    assert quantisation_of(Checkpoint("m", tmp_path, CONFIG | {"quantization": AFFINE}, {})).parameters == AFFINE
    for damaged in ('{"quantization": {"quant_algo": "FP8"}}', "[]", "{"):
        path.write_text(damaged)
        with pytest.raises(ModelError, match="quantised as 'modelopt'"):
            quantisation_of(Checkpoint("m", tmp_path, CONFIG, {}))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is not a file"):  # to read a pipe may never end
        quantisation_of(Checkpoint("m", tmp_path, CONFIG, {}))
