"""Checkpoints quantised in MLX's other modes than affine: the tokens of mlx-lm's own model, or a refusal by name."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.integration.conftest import Models, Whole, running
from tests.integration.test_equality import SAMPLINGS, WIDE, assert_equal
from tests.tiny import write_folder
from worker.compute.shard import Shard
from worker.errors import ModelError
from worker.model.checkpoint import open_folder

MODES: dict[str, dict[str, Any]] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
by_mode = pytest.mark.parametrize("mode", MODES)
LAYERS = (1, 2, 1)


@by_mode
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
async def test_a_checkpoint_of_another_mode_gives_the_tokens_of_the_whole_model(
    models: Models, mode: str, tied: bool
) -> None:
    whole = models("qwen3", dtype=mx.bfloat16, quantize=MODES[mode], tied=tied, config=WIDE)
    async with running(whole.folder, LAYERS) as chain:
        await assert_equal(chain, whole, {name: SAMPLINGS[name] for name in ("greedy", "all filters")})


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("quantize_embedding", [False, True], ids=["plain embedding", "quantised embedding"])
async def test_what_is_left_in_another_dtype_makes_hidden_states_of_the_dtype_that_mlx_lm_makes(
    models: Models, dtype: mx.Dtype, quantize_embedding: bool
) -> None:
    """A quantised embedding of these modes yields bfloat16, whatever the norms are in."""
    whole = models("qwen3", dtype=dtype, quantize=MODES["mxfp4"], quantize_embedding=quantize_embedding, config=WIDE)
    async with running(whole.folder, LAYERS) as chain:
        await assert_equal(chain, whole, {"greedy": SAMPLINGS["greedy"]})


@pytest.mark.parametrize("method", ["mxfp4", "mxfp8"])
async def test_the_hub_s_own_name_of_a_mode_will_do(models: Models, tmp_path: Path, method: str) -> None:
    """As gpt-oss has it: no `quantization`, only a `quantization_config` with its method."""
    whole = models("qwen3", dtype=mx.bfloat16, quantize=MODES[method], config=WIDE)
    renamed = with_config(whole, tmp_path, quantization=None, quantization_config={"quant_method": method})
    async with running(renamed.folder, LAYERS) as chain:
        await assert_equal(chain, whole, {"greedy": SAMPLINGS["greedy"]})


async def test_an_embedding_with_parameters_of_its_own_is_passed_over_where_it_is_not_held(
    models: Models, tmp_path: Path
) -> None:
    """As mlx_lm.convert writes a mixed recipe: every exception has its path, the embedding and the head too."""
    whole = models("qwen3", dtype=mx.bfloat16, quantize=MODES["mxfp8"], config=WIDE)
    named = {path: MODES["mxfp8"] for path in ("model.embed_tokens", "lm_head")}
    mixed = with_config(whole, tmp_path, quantization=MODES["mxfp8"] | named)
    async with running(mixed.folder, LAYERS) as chain:
        await assert_equal(chain, whole, {"greedy": SAMPLINGS["greedy"]})


def with_config(whole: Whole, folder: Path, **changes: Any) -> Whole:
    """The same weights under another configuration; None drops a key."""
    return Whole(copy_with(whole.folder, folder, **changes))


def copy_with(origin: Path, folder: Path, **changes: Any) -> Path:
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
    with pytest.raises(ModelError, match=r"is not quantised as its config\.json says: ."):
        Shard(open_folder(folder), 1, 4)


def test_scales_of_no_mode_are_refused(models: Models, tmp_path: Path) -> None:
    whole = models("qwen3", dtype=mx.bfloat16, quantize=MODES["mxfp8"], config=WIDE)
    tensors = dict(mx.load(str(whole.folder / "model.safetensors")))
    tensors["model.layers.1.mlp.up_proj.scales"] = mx.zeros((128, 3), mx.uint8)
    write_folder(tmp_path / "odd", json.loads((whole.folder / "config.json").read_text()), tensors)
    with pytest.raises(ModelError, match=r"is not quantised as .*model\.layers\.1\.mlp\.up_proj"):
        Shard(open_folder(tmp_path / "odd"), 1, 4)
