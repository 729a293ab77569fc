"""A shard without an engine around it."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tools.model_types.make import make_type
from worker.compute.cut import CutModel
from worker.compute.shard import Shard
from worker.model.checkpoint import open_folder


def test_norm_and_head_find_empty_caches_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding that remembers token ids runs before them, and each step's ids would wait for those before."""
    seen: list[list[mx.array]] = []
    logits = CutModel.logits

    def watched(self: CutModel, h: mx.array, caches: Any) -> mx.array:
        seen.append([array for cache in caches for array in cache.arrays()])
        return logits(self, h, caches)

    monkeypatch.setattr(CutModel, "logits", watched)
    shard = Shard(open_folder(make_type(tmp_path, "longcat_flash_ngram")), 0, 6)
    for _ in range(2):
        shard.logits(mx.zeros((1, 1, shard.anatomy.hidden_size)))
    assert seen == [[], []]
