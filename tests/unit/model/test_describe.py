"""What a plan reads of a checkpoint, and which tensors a shard needs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protos.brigade_pb2 import DTYPE_BFLOAT16
from tests.tiny import make_model
from tests.unit.model.test_checkpoint import LAYER, synthetic
from tools.model_types.make import make_type
from worker.model.cache_spec import Memory
from worker.model.checkpoint import open_folder
from worker.model.describe import describe, layout_of, shard_tensors
from worker.model.model_spec import DraftHead, HeadKind, LayerSpec
from worker.model.module_tree import layer_in_checkpoint

LAYER_BYTES = 2 * sum(map(math.prod, LAYER.values()))


@pytest.mark.parametrize(
    ("start", "end", "embedding", "norm"), [(0, 1, 1, 0), (1, 2, 0, 0), (2, 3, 0, 1), (0, 3, 1, 1)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_shard_needs_its_layers_and_its_ends(tied: bool, start: int, end: int, embedding: bool, norm: bool) -> None:
    names = shard_tensors(synthetic(tied=tied), start, end)
    besides = {
        "model.embed_tokens.weight": embedding or (tied and norm),  # which is its head, too
        "model.norm.weight": norm,
        "lm_head.weight": norm and not tied,
    }
    assert {name for name in names if layer_in_checkpoint(name) is None} == {name for name in besides if besides[name]}
    assert {layer_in_checkpoint(name) for name in names} - {None} == set(range(start, end))
    assert len(names) == sum(map(bool, besides.values())) + len(LAYER) * (end - start)


@pytest.mark.parametrize("tied", [False, True])
def test_a_description_counts_bytes(tied: bool) -> None:
    spec = describe(synthetic(tied=tied))
    num_products = sum(math.prod(shape) for shape in LAYER.values() if len(shape) > 1)
    assert spec.layers == (LayerSpec(LAYER_BYTES, (Memory(None, 2, 2, 2, 2),), 0, num_products, 4 * (2 + 2)),) * 3
    assert (spec.embed_bytes, spec.head_bytes, spec.tied) == (160, 16 if tied else 16 + 160, tied)
    assert spec.shard_bytes(0, 3) == 3 * LAYER_BYTES + 16 + (160 if tied else 2 * 160)
    assert (spec.name, spec.family, spec.hidden_size, spec.vocab_size) == ("synthetic", "qwen3", 8, 10)
    assert (spec.context, spec.dtype) == (64, DTYPE_BFLOAT16)
    assert [spec.shard_bytes(i, i + 1) for i in range(3)] == [LAYER_BYTES + 160, LAYER_BYTES, LAYER_BYTES + 176]
    # of an embedding that is no head a token reads one row, also where a draft head needs one on the last stage
    assert [spec.token_bytes(i, i + 1) for i in range(3)] == [LAYER_BYTES, LAYER_BYTES, spec.shard_bytes(2, 3)]
    drafter = replace(spec, head=DraftHead(HeadKind.MTP, {}, 1, 8, 8, 1, 8))
    drafted = replace(spec, drafter=drafter)
    assert drafted.token_bytes(2, 3) == spec.token_bytes(2, 3) + drafter.shard_bytes(0, 3)
    row_bytes = [each.segment_row_bytes(*part) for each in (spec, drafted) for part in ((0, 2), (1, 3))]
    assert row_bytes == [2 * 16, 2 * 16, 2 * 16, 3 * 16], "a draft head on another node gets rows, too"
    assert spec.reserved_bytes(0, 2, 5) == 2 * 16 * 256


@pytest.mark.parametrize("quantize", [None, {"group_size": 32, "bits": 4}], ids=["as it is", "4 bits"])
def test_experts_that_a_token_is_not_sent_to_are_idle(tmp_path: Path, quantize: dict[str, Any] | None) -> None:
    """Two of four experts, of three matrices of 64 x 32; layer 1 has none, and a dense model reads all."""
    spec = describe(open_folder(make_model(tmp_path / "experts", "qwen3_moe", quantize=quantize), "tiny"))
    numbers = 4 * 3 * 64 * 32
    nbytes = 4 * numbers if quantize is None else numbers // 2 + 2 * 4 * numbers // 32  # scales and biases are float32
    assert [layer.idle_bytes for layer in spec.layers] == [nbytes // 2, 0, nbytes // 2, nbytes // 2]
    assert all(layer.read_bytes == layer.weight_bytes - layer.idle_bytes for layer in spec.layers)
    dense = describe(open_folder(make_model(tmp_path / "dense", quantize=quantize), "tiny"))
    attention, router = 2 * 64 * 64 + 2 * 64 * 32, 4 * 64
    assert spec.layers[0].num_products == attention + router + numbers // 2
    assert dense.layers[0].num_products == attention + 3 * 64 * 96
    assert all(layer.read_bytes == layer.weight_bytes > 0 for layer in dense.layers)


def test_what_a_configuration_has_by_layer_is_read_by_layer(tmp_path: Path) -> None:
    """A token is sent to so many of four experts, of three matrices of 64 x 64 float32."""
    experts = describe(
        open_folder(make_type(tmp_path / "experts", "hunyuan", changes={"moe_topk": [1, 2, 3, 4, 1, 2]}))
    )
    assert [layer.idle_bytes for layer in experts.layers] == [idle * 3 * 64 * 64 * 4 for idle in (3, 2, 1, 0, 3, 2)]
    heads = describe(open_folder(make_type(tmp_path / "heads", "openelm", changes={"num_query_heads": [2, 4] * 3})))
    assert [layer.num_attended for layer in heads.layers] == [2 * 32, 4 * 32] * 3


def test_heads_are_counted_by_dbrx_s_name_for_them(tmp_path: Path) -> None:
    spec = describe(open_folder(make_type(tmp_path / "model", "dbrx")))
    assert {layer.num_attended for layer in spec.layers} == {4 * 32}


def test_a_model_that_is_opened_again_is_described_once_and_another_one_anew(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    first = open_folder(folder)
    assert layout_of(open_folder(folder)) is layout_of(first)
    make_model(folder, config={"max_position_embeddings": 99})
    assert describe(open_folder(folder)).context == 99 and describe(first).context == 512
    make_model(folder, num_files=2, config={"vocab_size": 98})
    assert describe(open_folder(folder)).vocab_size == 98
