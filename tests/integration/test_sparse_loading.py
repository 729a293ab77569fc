"""Loading a shard reads and allocates its own part of the checkpoint, in a process that holds nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.load_sparse import Loaded
from tools.sparse_model import write_sparse

MB = 10**6
DENSE = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 5120, "vocab_size": 512,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 320,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
}  # fmt: skip
LAYER = 40 * MB

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads")


def load(folder: Path) -> Loaded:
    """Two of the eight layers, in a process of its own."""
    command = [sys.executable, "-m", "tools.load_sparse", str(folder), "--layers", "2:4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return Loaded(**json.loads(done.stdout))


@pytest.mark.parametrize(
    "file_bytes", [1000 * MB, pytest.param(30 * MB, marks=pytest.mark.matrix)], ids=["one file", "several"]
)
def test_a_shard_reads_and_allocates_no_more_than_its_part(tmp_path: Path, file_bytes: int) -> None:
    write_sparse(tmp_path / "model", DENSE, None, file_bytes=file_bytes)
    loaded = load(tmp_path / "model")
    assert loaded.checkpoint > 8 * LAYER * 0.98
    assert loaded.shard == pytest.approx(2 * LAYER, rel=0.02)
    assert loaded.shard <= loaded.read <= 1.1 * loaded.shard
    assert loaded.peak_rss <= 1.35 * loaded.shard
    assert loaded.peak_mlx <= 1.01 * loaded.shard


def test_experts_that_are_stacked_take_one_tensor_more_while_they_are(tmp_path: Path) -> None:
    write_sparse(tmp_path / "model", EXPERTS, None, unstacked=True)
    loaded = load(tmp_path / "model")
    assert loaded.shard <= loaded.read <= 1.1 * loaded.shard
    assert loaded.peak_mlx <= loaded.shard + LAYER / 3
    assert loaded.peak_rss <= 1.35 * loaded.shard
