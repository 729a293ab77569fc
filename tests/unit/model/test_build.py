"""From a checkpoint's headers to mlx-lm's whole model, and what is said of a checkpoint that makes none."""

import io
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.unit.model.test_checkpoint import FILE, synthetic
from tools.model_types.make import build_type
from worker.errors import ModelError
from worker.model.build import MLX_DTYPES, absent, build
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe, shard_tensors
from worker.model.headers import TensorInfo

UP = "model.layers.1.mlp.up_proj.weight"


def with_tensors(checkpoint: Checkpoint, more: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    added = {name: TensorInfo("BF16", shape, FILE) for name, shape in more.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **added})


def without(checkpoint: Checkpoint, name: str) -> Checkpoint:
    return replace(checkpoint, tensors={key: info for key, info in checkpoint.tensors.items() if key != name})


def refusal(checkpoint: Checkpoint) -> str:
    with pytest.raises(ModelError) as caught:
        describe(checkpoint)
    return caught.value.message


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        (without(synthetic(tied=True), UP), f" lacks tensor {UP} (1 missing); download it again"),
        (without(synthetic(tied=True), "model.norm.weight"), " lacks tensor model.norm.weight (1 missing)"),
        (without(synthetic(tied=False), "lm_head.weight"), " lacks tensor lm_head.weight, and its config.json does"),
        (synthetic(tied=True, num_hidden_layers=4), " lacks tensor model.layers.3."),
        (synthetic(tied=True, num_hidden_layers=2), ": config.json has 2 layers but there is a tensor model.layers.2."),
        (
            with_tensors(synthetic(tied=True), {UP: (8, 16)}),
            f" does not fit its config.json: Expected shape (16, 8) but received shape (8, 16) for parameter {UP}",
        ),
        (
            with_tensors(synthetic(tied=True), {"model.layers.1.mlp.up_proj.bias": (16,)}),
            " does not fit its config.json: Received 1 parameters not in model: model.layers.1.mlp.up_proj.bias",
        ),
        (
            with_tensors(synthetic(tied=True), {"model.extra.weight": (16,)}),
            " does not fit its config.json: Received 1 parameters not in model: model.extra.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint: Checkpoint, said: str) -> None:
    assert refusal(checkpoint).startswith(f"synthetic{said}")


def test_towers_and_prediction_layers_are_left_out() -> None:
    plain = synthetic(tied=True)
    found = with_tensors(plain, {
        "vision_tower.blocks.0.attn.qkv.weight": (8, 8),
        "multi_modal_projector.linear.weight": (8, 8),
        "model.mtp.layers.0.mlp.up_proj.weight": (16, 8),
        "model.layers.3.eh_proj.weight": (8, 16),
        "model.layers.3.mlp.up_proj.weight": (16, 8),
    })  # fmt: skip
    assert describe(found) == describe(plain)
    assert shard_tensors(found, 0, 3) == shard_tensors(plain, 0, 3)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": "8"}, "config.json: hidden_size: expected a whole number above 0, found '8'"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads: "),
        ({"head_dim": 2.5}, "config.json: head_dim: "),
        ({"vocab_size": -1}, "config.json: vocab_size: "),
        ({"text_config": {"n_layer": {}}}, "config.json: n_layer: "),
        ({"architectures": 5, "num_hidden_layers": 0}, "config.json: num_hidden_layers: "),
        ({"num_hidden_layers": 10**9}, "synthetic: config.json has 1000000000 layers, more than there are tensors"),
        ({"intermediate_size": "16"}, "synthetic: config.json does not describe a qwen3 model: uniform(): "),
        ({"model_type": "olmo"}, "model_type 'olmo' is not supported: mlx-lm's own"),  # it would end the process
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_is_refused_with_the_key_or_the_reason(config: dict[str, Any], said: str) -> None:
    assert refusal(synthetic(tied=True, **config)).startswith(said)


def test_a_key_that_is_missing_is_named() -> None:
    checkpoint = synthetic(tied=True)
    config = {key: value for key, value in checkpoint.config.items() if key != "intermediate_size"}
    assert "intermediate_size" in refusal(replace(checkpoint, config=config))


@pytest.mark.parametrize("model_type", ["cache", "base", "os", "../x", "mlx_lm.utils", "", "mamba9"])
def test_a_model_type_without_code_is_refused(model_type: str) -> None:
    assert "installed here, has no code for it; a later one may" in refusal(synthetic(tied=True, model_type=model_type))


def test_architectures_that_are_no_names_change_nothing() -> None:
    for architectures in (5, "Qwen3ForCausalLM", [{}], [["x"]], None):
        assert describe(synthetic(tied=True, architectures=architectures)) == describe(synthetic(tied=True))


def test_infinities_are_numbers() -> None:
    """As transformers writes them: JSON knows none."""
    config, model = build_type("mamba2")
    tensors = {key: TensorInfo("F32", array.shape, FILE) for key, array in tree_flatten(model.parameters())}
    config |= {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert list(build(Checkpoint("mamba2", Path(), config, tensors)).args.time_step_limit) == [0.0, math.inf]


@pytest.mark.parametrize("dtype", MLX_DTYPES)
def test_a_tensor_of_another_node_is_an_array_of_nans_if_its_dtype_has_them(dtype: str) -> None:
    array = absent("x", TensorInfo(dtype, (2, 3), FILE))
    assert array.shape == (2, 3) and array.dtype == MLX_DTYPES[dtype]
    is_real = mx.issubdtype(array.dtype, mx.floating)
    assert bool(np.isnan(np.array(array.astype(mx.float32))).all()) == is_real


def test_a_model_is_built_in_no_memory() -> None:
    """Of 27 billion parameters, with nothing of it read or computed."""
    wide = {"hidden_size": 65536, "intermediate_size": 131072, "vocab_size": 1000, "head_dim": 16384}
    sizes = {8: 65536, 16: 131072, 10: 1000, 4: 32768, 2: 16384}
    small = synthetic(tied=True, **wide)
    tensors = {key: replace(info, shape=tuple(sizes[n] for n in info.shape)) for key, info in small.tensors.items()}
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    spec = describe(replace(small, tensors=tensors))
    assert spec.shard_bytes(0, 3) > 2 * 10**11 and mx.get_peak_memory() - before < 2**20


def test_what_a_model_draws_when_it_is_built_stays_in_no_graph() -> None:
    """A worker that is given one model after another would grow by it."""
    graphs = io.StringIO(), io.StringIO()
    for graph in graphs:
        mx.export_to_dot(graph, mx.random.uniform())  # type: ignore[arg-type]
        build(synthetic(tied=True))
    before, after = (graph.getvalue().count("label") for graph in graphs)  # operations
    assert 0 < after <= before
