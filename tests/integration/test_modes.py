"""Quantised checkpoints: the logits of mlx-lm's own model, layer by layer, or a refusal. Tokens: test_equality.py."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.integration.conftest import Models, running
from tests.integration.one_layer import assert_mlx_lms_logits, one_layer_shards
from tests.integration.test_equality import GREEDY, MODES, WIDE, assert_equal
from tests.tiny import make_model, write_folder
from worker.compute.shard import Shard
from worker.errors import ModelError
from worker.model.build import build, tensors_of_module
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

AFFINE: dict[str, dict[str, Any]] = {
    **{f"{bits} bit": {"group_size": 64, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "groups of 32": {"group_size": 32, "bits": 4},
    "groups of 128": {"group_size": 128, "bits": 4},
}
FAMILIES = ("qwen3_moe", "qwen3_5")
BROAD = {  # widths that groups of 128 fit into
    "hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 128,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
matrix = pytest.mark.matrix
LAYERS = (1, 2, 1)


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        pytest.param(family, kind, marks=() if (at + number) % 2 == 0 else matrix)
        for at, family in enumerate(FAMILIES)
        for number, kind in enumerate([*AFFINE, *MODES])
    ],
)
def test_one_layer_shards_of_any_quantisation_give_mlx_lms_logits(tmp_path: Path, family: str, quantize: str) -> None:
    # of qwen3_moe a layer of each kind; every fourth layer of qwen3_5 is one with attention
    config = BROAD | {"num_hidden_layers": 2 if family == "qwen3_moe" else 4}
    folder = make_model(tmp_path / "model", family, quantize=(AFFINE | MODES)[quantize], config=config)
    assert_mlx_lms_logits(folder, one_layer_shards(folder, tmp_path))


async def test_an_embedding_of_own_bits_is_passed_over_where_it_is_not_held(models: Models, tmp_path: Path) -> None:
    """As mlx_lm.convert writes a mixed recipe: every exception has its path, the embedding and the head too."""
    whole = models("qwen3", dtype=mx.bfloat16, quantize=MODES["mxfp8"], config=WIDE)
    named = {path: MODES["mxfp8"] for path in ("model.embed_tokens", "lm_head")}
    mixed = copy_with(whole.folder, tmp_path, quantization=MODES["mxfp8"] | named)
    async with running(mixed, LAYERS) as chain:
        await assert_equal(chain, whole, GREEDY)


def copy_with(origin: Path, folder: Path, **changes: Any) -> Path:
    """The same weights under another configuration; None drops a key."""
    config = json.loads((origin / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (folder / "model.safetensors").symlink_to(origin / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "exception",
    [{"group_size": 48, "bits": 4}, {"group_size": 64, "bits": 99}, {"group_size": 64, "bitts": 4}, 3],
    ids=str,
)
def test_exceptions_that_no_layer_can_have_are_refused(models: Models, tmp_path: Path, exception: Any) -> None:
    whole = models("qwen3", dtype=mx.bfloat16, quantize=MODES["mxfp8"], config=WIDE)
    changed = MODES["mxfp8"] | {"model.layers.1.mlp.up_proj": exception}
    folder = copy_with(whole.folder, tmp_path, quantization=changed)
    with pytest.raises(
        ModelError, match=r"is not quantised as its config\.json says: .|quantization: \w+: expected one of"
    ):
        Shard(open_folder(folder), 1, 4)


def test_scales_of_a_group_without_numbers_are_refused(models: Models, tmp_path: Path) -> None:
    """MLX divides by the size of groups, which ends the process."""
    whole = models("qwen3", quantize=AFFINE["groups of 32"], config=WIDE)
    tensors = dict(mx.load(str(whole.folder / "model.safetensors")))
    tensors["model.layers.1.mlp.up_proj.scales"] = tensors["model.layers.1.mlp.up_proj.scales"].reshape(-1)
    write_folder(tmp_path / "odd", json.loads((whole.folder / "config.json").read_text()), tensors)
    with pytest.raises(ModelError, match=r"says: model\.layers\.1\.mlp\.up_proj has groups of 0 numbers"):
        build(open_folder(tmp_path / "odd"))


def test_scales_of_no_mode_are_refused(models: Models, tmp_path: Path) -> None:
    whole = models("qwen3", dtype=mx.bfloat16, quantize=MODES["mxfp8"], config=WIDE)
    tensors = dict(mx.load(str(whole.folder / "model.safetensors")))
    tensors["model.layers.1.mlp.up_proj.scales"] = mx.zeros((128, 3), mx.uint8)
    write_folder(tmp_path / "odd", json.loads((whole.folder / "config.json").read_text()), tensors)
    with pytest.raises(ModelError, match=r"is not quantised as .*model\.layers\.1\.mlp\.up_proj"):
        Shard(open_folder(tmp_path / "odd"), 1, 4)


def test_experts_with_a_scale_of_their_own_are_bound_with_it(models: Models, tmp_path: Path) -> None:
    """Such experts run on a GPU only, so this is as far as it can be tried elsewhere."""
    whole = models("qwen3_moe", quantize=MODES["nvfp4"], config=WIDE)
    tensors = dict(mx.load(str(whole.folder / "model.safetensors")))
    stacks = [name for name in tensors if ".switch_mlp." in name and name.endswith(".scales")]
    scaled = {name.replace(".scales", ".global_scale") for name in stacks}
    tensors |= dict.fromkeys(scaled, mx.ones((4,)))
    write_folder(tmp_path / "scaled", json.loads((whole.folder / "config.json").read_text()), tensors)
    model = build(open_folder(tmp_path / "scaled"))
    assert scaled and scaled <= {name for name, _ in tensors_of_module(model)}


def test_a_configuration_stays_as_it_was_read(models: Models, tmp_path: Path) -> None:
    """Or the copies of two nodes would seem to differ."""
    whole = models("qwen3", dtype=mx.bfloat16, quantize=MODES["mxfp8"], config=WIDE)
    changed = MODES["mxfp8"] | {"lm_head": MODES["mxfp8"] | {"quantize_input": False}}
    checkpoint = open_folder(copy_with(whole.folder, tmp_path, quantization=changed))
    describe(checkpoint)
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())
