"""Checkpoints as makers publish them: shards of one layer, each from its own files alone, do what mlx-lm does."""

import asyncio
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import pytest

from protos.brigade_pb2 import LoadProgress
from tests.integration.layouts import write_layout
from tests.integration.one_layer import assert_mlx_lms_logits, copy_files, one_layer_shards
from tests.integration.published import PUBLISHED, UNREAD
from worker.compute import shard as shard_module
from worker.errors import ModelError
from worker.model.checkpoint import open_folder
from worker.model.describe import describe, shard_tensors
from worker.node.loading import load_shard
from worker.platform.threads import MlxThread

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.mark.parametrize("name", PUBLISHED)
def test_shards_of_published_layouts_are_mlx_lms(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's CPU backend multiplies gathered experts in fp32 only: so both sides do here, whatever their dtype."""
    multiply = mx.gather_mm

    def in_fp32(a: mx.array, b: mx.array, **kwargs: object) -> mx.array:
        return multiply(a.astype(mx.float32), b.astype(mx.float32), **kwargs).astype(a.dtype)  # type: ignore[arg-type]

    monkeypatch.setattr(mx, "gather_mm", in_fp32)
    monkeypatch.setattr(shard_module, "multiplies_experts", lambda dtype: True)
    layout = PUBLISHED[name]
    folder = write_layout(tmp_path / "model", layout)
    assert_every_tensor_has_one_place(folder, layout.others)
    assert_mlx_lms_logits(folder, one_layer_shards(folder, tmp_path))


def assert_every_tensor_has_one_place(folder: Path, others: tuple[str, ...]) -> None:
    """But for the embedding of a tied head, which is needed twice, and for what is not of the text model."""
    checkpoint = open_folder(folder)
    spec = describe(checkpoint)
    needed = [set(shard_tensors(checkpoint, i, i + 1)) for i in range(spec.num_layers)]
    every, twice = set().union(*needed), needed[0] & needed[-1]
    assert every == checkpoint.tensors.keys() - set(others)
    assert sum(map(len, needed)) == len(every) + len(twice)
    assert bool(twice) == spec.tied


async def test_fp8_that_becomes_bfloat16_counts_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "multiplies_experts", lambda dtype: True)
    checkpoint = open_folder(write_layout(tmp_path / "model", PUBLISHED["DeepSeek-V3, fp8"]))
    spec = describe(checkpoint)
    in_files = sum(checkpoint.tensors[name].nbytes for name in shard_tensors(checkpoint, 1, 2))
    assert 1.9 * in_files < spec.shard_bytes(1, 2) < 2 * in_files
    reports: list[LoadProgress] = []
    with closing(MlxThread()) as thread:
        shard = await load_shard(checkpoint, 1, 2, thread, reports.append)
        await asyncio.sleep(0)  # the last report is on its way
        assert reports[-1].done == reports[-1].total == shard.nbytes > 1.9 * in_files


@pytest.mark.parametrize("name", UNREAD)
def test_what_mlx_lm_does_not_read_is_refused_by_name_before_a_weight_file_is_here(name: str, tmp_path: Path) -> None:
    layout, said = UNREAD[name]
    checkpoint = open_folder(write_layout(tmp_path / "model", layout))
    here = copy_files(tmp_path / "model", tmp_path / "here", set())
    with pytest.raises(ModelError, match=rf"{said}.*choose an MLX conversion of it"):
        describe(open_folder(here, known=checkpoint.tensors))
