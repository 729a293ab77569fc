"""What a drafter reads of layers: the sum over the tapped layers travels with the rows, however the model is cut."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from protos.brigade_pb2 import Cache
from tests.tiny import make_model
from tools.model_types.make import make_type
from worker.compute.batching import LaneWindow
from worker.compute.shard import Shard
from worker.model.checkpoint import open_folder

pytestmark = pytest.mark.usefixtures("uncompiled")

NUM_LAYERS, D, C = 6, 64, 24
TAPS = (0, 2, 5)
SPLITS = ((6,), (3, 3), (1, 2, 3), (2, 1, 1, 2), (1, 1, 1, 1, 2), (1, 1, 1, 1, 1, 1))
LENGTHS = {"one window": (5,), "equal windows": (4, 4, 4), "windows of all lengths": (1, 6, 3)}


# lanes of rows, with windows and states; of a batch of equal windows; of one slot after another; positions embedded
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5", "phi", "gemma2", "gpt2"])
def test_the_sum_is_the_same_on_every_split_and_that_of_the_whole_product(family: str, tmp_path: Path) -> None:
    checkpoint = open_folder(make_type(tmp_path / family, family))
    weights = {layer: mx.random.normal((C, D)) * 0.1 for layer in TAPS}
    for lengths in LENGTHS.values():
        ids = mx.arange(sum(lengths))[None] % 90
        found = []
        for split in SPLITS:
            rows = ids
            outputs, start = {}, 0
            for num_layers in split:
                shard = Shard(checkpoint, start, start + num_layers)
                shard.tap({layer: w for layer, w in weights.items() if start <= layer < start + num_layers}, C)
                rows = shard(rows, [LaneWindow(shard.make_caches(Cache()), 0, length) for length in lengths], ids)
                start += num_layers
                outputs[start - 1] = rows[..., :D]
            assert rows.shape == (1, sum(lengths), D + C) and shard.logits(rows).shape[0] == sum(lengths)
            found.append(rows)
        assert all(mx.abs(rows - found[0]).max().item() == 0.0 for rows in found), lengths
        # the last split has the output of every layer
        tapped = mx.concatenate([outputs[layer] for layer in TAPS], axis=-1)
        whole = tapped @ mx.concatenate([weights[layer] for layer in TAPS], axis=1).T
        assert mx.abs(whole - found[0][..., D:]).max().item() < 1e-5 * mx.abs(whole).max().item()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])  # gemma scales its embedding
def test_embedding_norm_and_head_run_one_by_one(family: str, tied: bool, tmp_path: Path) -> None:
    checkpoint = replace(open_folder(make_model(tmp_path / family, family, tied=tied)), embeds_last=True)
    whole, last = Shard(checkpoint, 0, 4), Shard(checkpoint, 3, 4)
    rows = mx.random.normal((1, 5, D))
    for shard in (whole, last):
        normed = shard.normed(rows)
        assert mx.array_equal(shard.head(normed), shard.logits(rows))
        norm = dict(shard.tensors)["model.norm.weight"]
        weight = 1 + norm if family == "gemma3_text" else norm
        assert mx.allclose(normed, mx.fast.rms_norm(rows, weight, 1e-6), atol=1e-5)
    ids = mx.array([[3, 50, 7]])
    table = whole.tensors["model.embed_tokens.weight"][ids]
    assert mx.allclose(last.embed(ids), table * (8.0 if family == "gemma3_text" else 1.0))
