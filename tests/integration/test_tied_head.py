"""Whether the head is the embedding: configuration and checkpoint may disagree, and mlx-lm is right."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from tests.integration.conftest import Models, Whole, running
from tests.integration.test_equality import GREEDY, LONG, NUM_TOKENS, assert_equal, split_name
from tests.tiny import write_folder
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

both_ends = pytest.mark.parametrize("layers", [(1, 3), pytest.param((3, 1), marks=pytest.mark.matrix)], ids=split_name)


def rewritten(whole: Whole, folder: Path, *, drop: str = "", **tensors: mx.array) -> Whole:
    """The model without the configuration's key `drop` and with more tensors, whose names have `__` for a dot."""
    config = json.loads((whole.folder / "config.json").read_text())
    config.pop(drop, None)
    stored = dict(mx.load(str(whole.folder / "model.safetensors")))
    stored |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_folder(folder, config, stored)
    return Whole(folder)


@pytest.fixture(scope="session")
def both(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Tied by configuration, with an lm_head that would say something else."""
    tied = models("qwen3", tied=True)
    shape = tied.reference.model.model.embed_tokens.weight.shape
    mx.random.seed(9)
    return rewritten(tied, tmp_path_factory.mktemp("both"), lm_head__weight=mx.random.normal(shape))


@both_ends
async def test_a_stored_lm_head_is_ignored_where_the_configuration_ties(
    models: Models, both: Whole, layers: tuple[int, ...]
) -> None:
    assert both.tokens(LONG, NUM_TOKENS) == models("qwen3", tied=True).tokens(LONG, NUM_TOKENS)
    async with running(both.folder, layers) as chain:
        await assert_equal(chain, both, GREEDY)


def test_a_plan_counts_the_embedding_at_both_ends_and_no_stored_lm_head(models: Models, both: Whole) -> None:
    spec, tied = (describe(open_folder(whole.folder)) for whole in (both, models("qwen3", tied=True)))
    assert spec.tied and (spec.head_bytes, spec.embed_bytes) == (tied.head_bytes, tied.embed_bytes)
    assert spec.shard_bytes(2, 4) == tied.shard_bytes(2, 4) > spec.embed_bytes


@both_ends
@pytest.mark.parametrize("is_tied", [True, False])
async def test_gemma3_without_a_word_on_tying_has_the_head_of_its_files_or_the_embedding(
    models: Models, tmp_path: Path, is_tied: bool, layers: tuple[int, ...]
) -> None:
    silent = rewritten(models("gemma3_text", tied=is_tied), tmp_path / "model", drop="tie_word_embeddings")
    assert "tie_word_embeddings" not in json.loads((silent.folder / "config.json").read_text())
    assert any("lm_head" in name for name in open_folder(silent.folder).tensors) != is_tied
    tied = models("gemma3_text", tied=True)
    assert (silent.tokens(LONG, NUM_TOKENS) == tied.tokens(LONG, NUM_TOKENS)) == is_tied
    async with running(silent.folder, layers) as chain:
        await assert_equal(chain, silent, GREEDY)
