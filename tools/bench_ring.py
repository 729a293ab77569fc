"""mlx_lm's own pipeline over MLX's ring backend: a qwen3 model on two processes of this machine, to compare with.

python -m tools.bench_ring FOLDER [--tokens 128] [--prompt 64] [--gpus 0,1]

Each process runs mlx_lm's `generate_step` on its half of the layers; hidden states go from rank 1 to rank 0, and what
rank 0 makes is gathered by both, as mlx_lm's models with a pipeline do it. Prints tokens per second by rank 0's clock.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer
from mlx_lm.generate import generate_step
from mlx_lm.models.base import create_attention_mask
from mlx_lm.utils import load_model

from worker.errors import BrigadeError, InputError
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_NUM_RANKS = 2
_LIMIT_S = 300


def main(
    folder: Annotated[Path, typer.Argument(help="A qwen3 model.")],
    tokens: Annotated[int, typer.Option(min=8, help="Tokens to decode.")] = 128,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    gpus: Annotated[str, typer.Option(help="CUDA devices of the two ranks; empty for the CPU.")] = "",
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Measure one request."""
    if rank >= 0:
        _generate(folder, tokens, prompt, rank)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as hosts:
        json.dump([[f"127.0.0.1:{port}"] for port in _free_ports()], hosts)
        hosts.flush()
        devices = gpus.split(",") if gpus else [None] * _NUM_RANKS
        if len(devices) != _NUM_RANKS:
            raise InputError("gpus", f"expected {_NUM_RANKS} devices, found {len(devices)}")
        ranks = [_start(number, device, hosts.name) for number, device in enumerate(devices)]
        try:
            found = ranks[0].communicate(timeout=_LIMIT_S)[0]
            if ranks[0].returncode:
                raise BrigadeError(f"a rank ended with {ranks[0].returncode}, for the reason above")
        finally:
            for process in ranks:
                process.kill()  # a rank that has lost the other one waits for ever
    print(json.dumps({"machine": machine_name(), **json.loads(found)}))


def _free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(_NUM_RANKS)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _start(rank: int, device: str | None, hosts: str) -> subprocess.Popen[str]:
    variables = os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts}
    if device is not None:
        variables["CUDA_VISIBLE_DEVICES"] = device
    again = [sys.executable, "-m", "tools.bench_ring", *sys.argv[1:], "--rank", str(rank)]
    return subprocess.Popen(again, env=variables, stdout=subprocess.PIPE, text=True)


def _generate(folder: Path, num_tokens: int, num_prompt: int, rank: int) -> None:
    group = mx.distributed.init(strict=True, backend="ring")
    model, _ = load_model(folder, lazy=True)
    inner = model.model
    half = len(inner.layers) // _NUM_RANKS
    inner.layers = inner.layers[half:] if rank == 0 else inner.layers[:half]
    type(inner).__call__ = _pipelined(group, rank)
    mx.eval(model.parameters())
    ids = mx.array([5 + number % 64 for number in range(num_prompt)])
    times = [time.perf_counter() for _ in generate_step(ids, model, max_tokens=num_tokens)]
    steps = [after - before for before, after in pairwise(times)]
    if rank == 0:
        print(json.dumps({"ms_per_token": 1e3 * statistics.median(steps), "tokens_per_s": len(steps) / sum(steps)}))


def _pipelined(group: mx.distributed.Group, rank: int) -> Any:
    """The forward of mlx_lm's models with a pipeline (its qwen2), for one without."""

    def forward(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        h = self.embed_tokens(inputs)
        mask = create_attention_mask(h, cache[0])
        if rank == 0:
            h = mx.distributed.recv_like(h, 1, group=group)
        for layer, own in zip(self.layers, cache, strict=True):
            h = layer(h, mask, own)
        if rank == 1:
            h = mx.distributed.send(h, 0, group=group)
            cache[-1].keys = mx.depends(cache[-1].keys, h)
        return self.norm(mx.distributed.all_gather(h, group=group)[: h.shape[0]])

    return forward


if __name__ == "__main__":
    run_command(main)
