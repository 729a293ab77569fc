"""Prompts on two simulated Macs, over links of several speeds, beside one of these Macs alone. The bytes are real.

python -m tools.simulate_prompts [--model gpt-oss-120b] [--tokens 4000] [--links none,1,0.1] [--gbps 546] [--tflops 16]

The model has the shapes of Qwen3-32B in 4 bit, or of a file of tools/published; no weights. Each Mac is a process here
(tools.simulated_mac), and a proxy between them passes so many Gbit/s each way; with `none` there is only loopback, as a
proxy of 10 Gbit/s would take a core that these processes need. The plan decides by these speeds whether prompts go to
both, and then measured costs do; `bench_prompts` explains what is printed.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import typer
import uvloop
import yaml

from coordinator.cluster.options import cluster_options
from tools.bench_prompts import compare
from tools.proxy import proxy_to
from tools.random_model import TEMPLATE, add_tokenizer
from tools.sparse_model import PUBLISHED, write_sparse
from tools.worker_process import WorkerProcess
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.platform.run import run_command

_CONTEXT = 131072
_QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 2048,
    "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip


def main(
    model: Annotated[str | None, typer.Option(help="A file of tools/published, without .json; else Qwen3-32B.")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Of each prompt, about.")] = 4000,
    links: Annotated[str, typer.Option(metavar="GBIT,...", help="Speeds of the link, Gbit/s; or none.")] = "none,1,0.1",
    gbps: Annotated[float, typer.Option(min=1, help="GB/s at which each Mac reads weights.")] = 546,
    tflops: Annotated[float, typer.Option(min=1, help="10^12 operations per second of each Mac.")] = 16,
) -> int:
    """Print what a prompt takes on one of the Macs and on both."""
    # nothing stays that these Macs measured of themselves
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        shapes = json.loads((PUBLISHED / f"{model}.json").read_bytes())["config"] if model else _QWEN3_32B
        checkpoint = Path(folder) / (model or "Qwen3-32B")
        bits = None if "quantization_config" in shapes else 4  # else its maker has quantised it
        write_sparse(checkpoint, shapes | {"max_position_embeddings": _CONTEXT, "eos_token_id": 1}, bits)
        add_tokenizer(checkpoint, TEMPLATE, _CONTEXT)
        mac = ("tools.simulated_mac", str(gbps), str(tflops), str(_most_rows(tokens)))
        are_equal = [_simulate(Path(folder), checkpoint, link, tokens, mac) for link in links.split(",")]
    return int(not all(are_equal))


def _most_rows(tokens: int) -> int:
    return tokens + tokens // 8


def _simulate(folder: Path, model: Path, gbit: str, tokens: int, mac: Sequence[str]) -> bool:
    print("loopback:" if gbit == "none" else f"{gbit} Gbit/s:", flush=True)
    other = WorkerProcess("other", ("--model", str(model), "--follow-parent"), program=(*mac, "worker"))
    with proxy_to(other.address, latency_s=0.0002) as proxy:
        if gbit != "none":
            proxy.there.bytes_per_s = proxy.back.bytes_per_s = float(gbit) * 1e9 / 8
        address = other.address if gbit == "none" else proxy.address
        context = _most_rows(tokens)
        spec = describe(open_folder(model))
        held = spec.shard_bytes(0, spec.num_layers) + spec.reserved_bytes(0, spec.num_layers, context)
        memory = f"{(held >> 20) + 512}MiB"  # for one session: this machine really holds it
        alone = {"model": str(model), "context": context, "coordinator": {"name": "mac", "memory": memory}}
        apart = alone | {"workers": [{"name": "other", "address": address, "memory": memory}]}
        files = [folder / "alone.yaml", folder / "apart.yaml"]
        for file, cluster in zip(files, (alone, apart), strict=True):
            file.write_text(yaml.safe_dump(cluster), encoding="utf-8")
        one, two = (("--config", file) for file in files)
        options = cluster_options(files[1])

        async def run() -> bool:
            await other.wait_listening()
            return await compare(options, one, two, tokens, 16, 1, (*mac, "coordinator"))

        other.start()
        try:
            return uvloop.run(run())
        finally:
            other.kill()


if __name__ == "__main__":
    run_command(main)
