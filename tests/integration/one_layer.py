"""A model as a chain of shards of one layer each, compared with mlx-lm's own in the same process."""

import gc
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from protos.brigade_pb2 import Cache
from tests.tiny import VOCAB
from worker.compute.batching import LaneWindow
from worker.compute.shard import Shard
from worker.model.checkpoint import open_folder
from worker.model.describe import describe, shard_tensors

SMALL = 20_000  # bytes that a model makes for itself: frequencies, masks
WINDOWS = ([(7 * i + i * i) % VOCAB for i in range(9)], [5], [42], [7])


def one_layer_shards(folder: Path, copies: Path) -> list[Shard]:
    """Each from a copy of the folder that lacks all other shards' files, in the memory that was planned."""
    checkpoint, shards = open_folder(folder), list[Shard]()
    spec = describe(checkpoint)
    for i in range(spec.num_layers):
        files = checkpoint.files_of(shard_tensors(checkpoint, i, i + 1))
        own = open_folder(copy_files(folder, copies / f"{i}", files), known=checkpoint.tensors)
        gc.collect()
        mx.clear_cache()  # what is left over of it may be larger than what it is used for
        before = mx.get_active_memory()
        shards.append(shard := Shard(own, i, i + 1))
        shard.materialise(lambda num_bytes: None)
        held = mx.get_active_memory() - before
        assert shard.nbytes == spec.shard_bytes(i, i + 1)
        assert shard.nbytes <= held <= shard.nbytes + SMALL
    return shards


def assert_mlx_lms_logits(folder: Path, shards: Sequence[Shard]) -> None:
    """To the last bit, after a prompt and after single tokens."""
    whole, _ = load_model(folder)
    cache = make_prompt_cache(whole)
    caches = [shard.make_caches(Cache()) for shard in shards]
    base = 0
    for window in WINDOWS:
        h = mx.array([window])
        expected = np.array(whole(h, cache=cache)[0].astype(mx.float32))
        for shard, own in zip(shards, caches, strict=True):
            h = shard(h, [LaneWindow(own, base, len(window))])
        base += len(window)
        assert np.array_equal(np.array(shards[-1].logits(h)), expected)  # and so nothing is NaN
        assert expected.std() > 0.2


def copy_files(origin: Path, folder: Path, files: set[str]) -> Path:
    """What a worker has of a checkpoint: its small files, and some of the weight files."""
    folder.mkdir()
    for path in origin.iterdir():
        if path.suffix == ".json" or path.name in files:
            (folder / path.name).symlink_to(path)
    return folder
