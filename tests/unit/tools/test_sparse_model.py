"""Sparse checkpoints hold the tensors of real conversions, and next to nothing on the disk."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from tests.tiny import make_model
from tools.sparse_model import PUBLISHED, tensors_of, write_sparse
from worker.model.checkpoint import open_folder

FEW = ("Llama-3.3-70B", "Nemotron-3-Super-120B-A12B", "Qwen3-235B-A22B")
COUNTED = sorted(path.stem for path in PUBLISHED.glob("*.json") if re.search(r"-\d+B", path.stem))


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    return config


def test_the_sizes_are_those_of_conversions_that_others_published(tmp_path: Path) -> None:
    # exo-explore/exo, resources/inference_model_cards, of mlx-community/GLM-4.7-4bit; openai/gpt-oss-120b's own index
    assert write_sparse(tmp_path / "glm", published("GLM-4.7")) == 198_556_925_568
    assert write_sparse(tmp_path / "gpt-oss", published("gpt-oss-120b"), bits=None) == 65_248_815_744


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.matrix) for name in COUNTED]
)
def test_a_configuration_has_as_many_parameters_as_its_name_says(name: str) -> None:
    tensors, _ = tensors_of(published(name) | {"quantization_config": {}}, None)
    found = sum(mx.zeros(shape).size for _, shape in tensors.values())
    assert found / 1e9 == pytest.approx(float(re.findall(r"-(\d+)B", name)[0]), rel=0.04)


def test_a_quantised_checkpoint_of_holes_has_the_layout_of_one_with_weights(tmp_path: Path) -> None:
    quantize = {"group_size": 64, "bits": 4}
    sizes = {"intermediate_size": 128}
    real = make_model(tmp_path / "real", "qwen3", dtype=mx.bfloat16, quantize=quantize, config=sizes)
    config = json.loads((real / "config.json").read_text())
    del config["quantization"]
    write_sparse(tmp_path / "sparse", config, bits=4, file_bytes=10_000)
    sparse, whole = open_folder(tmp_path / "sparse"), open_folder(real)
    assert sparse.fingerprint.tensors == whole.fingerprint.tensors
    assert len({info.file for info in sparse.tensors.values()}) > 3


@pytest.mark.parametrize("name", ["gpt-oss-120b", "Kimi-K2.5"])
def test_mlx_lm_finds_every_tensor_and_none_too_many_in_a_few_megabytes_of_the_disk(tmp_path: Path, name: str) -> None:
    nbytes = write_sparse(tmp_path / "model", published(name), None if name == "gpt-oss-120b" else 4)
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "model").iterdir()) < 4e6 < nbytes / 10_000
    load_model(tmp_path / "model", lazy=True, strict=True)
