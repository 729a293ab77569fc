"""What a plan reads of a checkpoint, which tensors a shard needs, and what does not fit its config.json."""

import math
from dataclasses import replace

import pytest

from protos.brigade_pb2 import DTYPE_BFLOAT16
from tests.unit.model.test_checkpoint import LAYER, synthetic
from worker.errors import ModelError
from worker.model.cache_spec import Memory
from worker.model.describe import describe, shard_tensors
from worker.model.model_spec import DraftHead, HeadKind, LayerSpec
from worker.model.module_tree import layer_in_checkpoint

LAYER_BYTES = 2 * sum(map(math.prod, LAYER.values()))
EMBED, NORM, HEAD = {"model.embed_tokens.weight"}, {"model.norm.weight"}, {"lm_head.weight"}


@pytest.mark.parametrize(
    ("tied", "start", "end", "besides"),
    [
        (False, 0, 1, EMBED),
        (False, 1, 2, set()),
        (False, 2, 3, NORM | HEAD),
        (False, 0, 3, EMBED | NORM | HEAD),
        (True, 0, 1, EMBED),
        (True, 1, 2, set()),
        (True, 2, 3, EMBED | NORM),
        (True, 0, 3, EMBED | NORM),
    ],
)
def test_a_shard_needs_its_layers_and_what_lies_at_its_end(tied: bool, start: int, end: int, besides: set[str]) -> None:
    checkpoint = synthetic(tied=tied)
    assert describe(checkpoint).tied == tied
    names = shard_tensors(checkpoint, start, end)
    assert {name for name in names if layer_in_checkpoint(name) is None} == besides
    assert {layer_in_checkpoint(name) for name in names} - {None} == set(range(start, end))
    assert len(names) == len(besides) + len(LAYER) * (end - start)


@pytest.mark.parametrize("tied", [False, True])
def test_a_description_counts_bytes(tied: bool) -> None:
    spec = describe(synthetic(tied=tied))
    layer = LayerSpec(LAYER_BYTES, (Memory(None, 2, 2, 2, 2),))
    assert spec.layers == (layer, layer, layer)
    assert (spec.embed_bytes, spec.head_bytes, spec.tied) == (160, 16 if tied else 16 + 160, tied)
    assert spec.shard_bytes(0, 3) == 3 * LAYER_BYTES + 16 + (160 if tied else 2 * 160)
    assert (spec.name, spec.family, spec.hidden_size, spec.vocab_size) == ("synthetic", "qwen3", 8, 10)
    assert (spec.context, spec.dtype) == (64, DTYPE_BFLOAT16)
    assert [spec.shard_bytes(i, i + 1) for i in range(3)] == [LAYER_BYTES + 160, LAYER_BYTES, LAYER_BYTES + 176]
    # of an embedding that is no head a token reads one row, also where a draft head needs one on the last stage
    assert [spec.token_bytes(i, i + 1) for i in range(3)] == [LAYER_BYTES, LAYER_BYTES, spec.shard_bytes(2, 3)]
    serving = replace(spec, drafter=replace(spec, head=DraftHead(HeadKind.MTP, {}, 1, 8, 8, 1, 8)))
    own = serving.drafter.shard_bytes(0, 3) if serving.drafter else 0
    assert serving.token_bytes(2, 3) == spec.token_bytes(2, 3) + own
    assert spec.reserved_bytes(0, 2, 5) == 2 * 16 * 256


@pytest.mark.parametrize(
    ("num_layers", "said"),
    [
        (4, rf"^synthetic lacks tensor model\.layers\.3\..*\({len(LAYER)} missing\); download"),
        (2, r"2 layers but there is a tensor model\.layers\.2\..*; download it again"),  # it would answer nonsense
    ],
)
def test_layers_that_do_not_agree_with_the_tensors_are_refused(num_layers: int, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        describe(synthetic(tied=True, num_hidden_layers=num_layers))
