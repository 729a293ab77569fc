"""From a checkpoint's headers to mlx-lm's whole model, and what is said of a checkpoint that makes none."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.unit.model.test_checkpoint import synthetic
from tools.model_types.make import build_type
from worker.errors import ModelError
from worker.model.build import MLX_DTYPES, absent, build
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe, shard_tensors
from worker.model.headers import TensorInfo

UP = "model.layers.1.mlp.up_proj.weight"
FILE = "model.safetensors"
MISFIT = "does not fit its config.json"
UNTIED = "its config.json does not tie the head to the embedding"
ADVICE = "download it again, or choose an MLX conversion of it"
SHAPES = "Expected shape (16, 8) but received shape (8, 16) for parameter "


def headers_of(name: str) -> Checkpoint:
    """A tiny checkpoint of this type, of which there are headers only."""
    config, model = build_type(name)
    tensors = {key: TensorInfo("F32", array.shape, FILE) for key, array in tree_flatten(model.parameters())}
    return Checkpoint(name, Path(), config, tensors)


def with_tensors(checkpoint: Checkpoint, more: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    return replace(
        checkpoint, tensors={**checkpoint.tensors, **{n: TensorInfo("BF16", s, FILE) for n, s in more.items()}}
    )


def without(checkpoint: Checkpoint, *names: str) -> Checkpoint:
    return replace(checkpoint, tensors={key: info for key, info in checkpoint.tensors.items() if key not in names})


def refusal(checkpoint: Checkpoint) -> str:
    with pytest.raises(ModelError) as caught:
        describe(checkpoint)
    return caught.value.message


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (without(synthetic(tied=True), UP), f"lacks tensor {UP} (1 missing); download it again"),
        (
            without(synthetic(tied=True), "model.norm.weight"),
            "lacks tensor model.norm.weight (1 missing); download it again",
        ),
        (
            without(synthetic(tied=False), "lm_head.weight"),
            f"lacks tensor lm_head.weight, and {UNTIED}; download it again",
        ),
        (with_tensors(synthetic(tied=True), {UP: (8, 16)}), f"{MISFIT}: {SHAPES}{UP}; {ADVICE}"),
        (
            with_tensors(synthetic(tied=True), {UP.replace("weight", "bias"): (16,)}),
            f"{MISFIT}: Received 1 parameters not in model: {UP.replace('weight', 'bias')}; {ADVICE}",
        ),
        (
            with_tensors(synthetic(tied=True), {"model.extra.weight": (16,)}),
            f"{MISFIT}: Received 1 parameters not in model: model.extra.weight; {ADVICE}",
        ),
    ],
    ids=["lacks a matrix", "lacks the norm", "lacks the head", "another shape", "left over", "left over outside"],
)
def test_what_does_not_fit_is_named(checkpoint: Checkpoint, said: str) -> None:
    assert refusal(checkpoint) == f"synthetic {said}"


def test_towers_and_prediction_layers_are_left_out() -> None:
    plain = synthetic(tied=True)
    more = {
        "vision_tower.blocks.0.attn.qkv.weight": (8, 8),
        "multi_modal_projector.linear.weight": (8, 8),
        "model.mtp.layers.0.mlp.up_proj.weight": (16, 8),
        "model.layers.3.eh_proj.weight": (8, 16),
        "model.layers.3.mlp.up_proj.weight": (16, 8),
    }
    found = with_tensors(plain, more)
    assert describe(found) == describe(plain)
    assert shard_tensors(found, 0, 3) == shard_tensors(plain, 0, 3)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": "8"}, "config.json: hidden_size: expected a whole number above 0, found '8'"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads: expected a whole number above 0, found 0"),
        ({"head_dim": 2.5}, "config.json: head_dim: expected a whole number above 0, found 2.5"),
        ({"vocab_size": -1}, "config.json: vocab_size: expected a whole number above 0, found -1"),
        ({"text_config": {"n_layer": {}}}, "config.json: n_layer: expected a whole number above 0, found {}"),
        ({"num_hidden_layers": 10**9}, "synthetic: config.json has 1000000000 layers, more than there are tensors"),
        (
            {"intermediate_size": "16"},
            "synthetic: config.json does not describe a qwen3 model: uniform(): incompatible function arguments",
        ),
        (
            {"architectures": 5, "num_hidden_layers": 0},
            "config.json: num_hidden_layers: expected a whole number above 0",
        ),
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_is_refused_with_the_key_or_the_reason(config: dict[str, Any], said: str) -> None:
    assert refusal(synthetic(tied=True, **config)).startswith(said)


def test_architectures_that_are_no_names_change_nothing() -> None:
    for architectures in (5, "Qwen3ForCausalLM", [{}], [["x"]], None):
        assert describe(synthetic(tied=True, architectures=architectures)) == describe(synthetic(tied=True))


def test_what_is_no_model_type_or_would_end_the_process_is_refused() -> None:
    for model_type in ("cache", "base", "os", "../x", "mlx_lm.utils", "", "mamba9"):
        said = refusal(synthetic(tied=True, model_type=model_type))
        assert "installed here, has no code for it; a later one may" in said
    said = refusal(synthetic(tied=True, model_type="olmo"))
    assert said.startswith("model_type 'olmo' is not supported: mlx-lm's own")
    checkpoint = synthetic(tied=True)
    config = {key: value for key, value in checkpoint.config.items() if key != "intermediate_size"}
    assert "intermediate_size" in refusal(replace(checkpoint, config=config))


def test_infinities_are_numbers() -> None:
    """As transformers writes them: JSON knows none."""
    checkpoint = headers_of("mamba2")
    config = checkpoint.config | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    model = build(replace(checkpoint, config=config))
    assert list(model.args.time_step_limit) == [0.0, math.inf]


def test_what_another_node_reads_is_stood_in_for_by_what_would_be_noticed() -> None:
    for dtype in MLX_DTYPES:
        array = absent("x", TensorInfo(dtype, (2, 3), FILE))
        assert array.shape == (2, 3) and array.dtype == MLX_DTYPES[dtype]
        is_real = mx.issubdtype(array.dtype, mx.floating)
        assert bool(np.isnan(np.array(array.astype(mx.float32))).all()) == is_real


def test_a_model_is_built_in_no_memory() -> None:
    """Of 27 billion parameters, with nothing of it read."""
    wide = {"hidden_size": 65536, "intermediate_size": 131072, "vocab_size": 1000, "head_dim": 16384}
    sizes = {8: 65536, 16: 131072, 10: 1000, 4: 32768, 2: 16384}
    small = synthetic(tied=True, **wide)
    tensors = {key: replace(info, shape=tuple(sizes[n] for n in info.shape)) for key, info in small.tensors.items()}
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    spec = describe(replace(small, tensors=tensors))
    assert spec.shard_bytes(0, 3) > 2 * 10**11 and mx.get_peak_memory() - before < 2**20
