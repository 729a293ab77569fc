"""The least program that runs a qwen3 model on two processes over gRPC, and Brigade beside it, in turns.

python -m tools.bench_floor FOLDER [--turns 7] [--tokens 128] [--gpus 0,1]

Each of two processes owns half of the layers, and one thread does everything: it reads a message of the stream, fills
the input of a graph that was built before the message came, evaluates, writes, and builds the next graph. Nothing of
Brigade is imported: its own `bench` measures it in one process, and on a coordinator and a worker, with that folder.
Prints the median milliseconds per token of the three, what a second process costs, and floor against Brigade.
"""

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import mlx.core as mx
import numpy as np
import typer
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

_METHOD = "floor", "Relay"
_LIMIT_S = 300


def main(
    folder: Annotated[Path, typer.Argument(help="A qwen3 model.")],
    turns: Annotated[int, typer.Option(min=1, help="Runs of each, in turns; medians count.")] = 7,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of an answer.")] = 128,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    gpus: Annotated[str, typer.Option(help="CUDA devices of the two processes; empty for the CPU, or one GPU.")] = "",
    rank: Annotated[int, typer.Option(hidden=True)] = -1,
    port: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Milliseconds per token of the floor and of Brigade on two processes of this machine."""
    if rank >= 0:
        asyncio.run(_serve(folder) if rank else _ask(folder, port, prompt, tokens))
        return
    found: dict[str, list[float]] = {"floor": [], "brigade": [], "one process": []}
    envs = [os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}) for gpu in (gpus or ",").split(",")]
    for _ in range(turns):
        found["floor"].append(_run_floor(folder, prompt, tokens, envs))
        gaps = _run_product(folder, prompt, tokens, envs)
        found["brigade"].append(gaps["cluster"])
        found["one process"].append(gaps["one process"])
    medians = {name: statistics.median(all_ms) for name, all_ms in found.items()}
    for name, all_ms in found.items():
        shown = ", ".join(f"{ms:.2f}" for ms in sorted(all_ms))
        print(f"{name}: {medians[name]:.2f} ms per token (median of {turns}: {shown})")
    for name in ("floor", "brigade"):
        costs = [two - one for two, one in zip(found[name], found["one process"], strict=True)]
        print(f"{name}: a second process costs {statistics.median(costs):.2f} ms per token")
    ratio = medians["floor"] / medians["brigade"]
    print(f"floor / brigade: {ratio:.2f} ({turns} turns, {tokens} tokens, {platform.platform()})")


class Half:
    """Half of the model's layers, with what stands before or behind them."""

    def __init__(self, folder: Path, *, is_first: bool) -> None:
        model: Any = load_model(folder, lazy=True)[0]
        inner, cache = model.model, make_prompt_cache(model)
        middle = len(inner.layers) // 2
        own = slice(0, middle) if is_first else slice(middle, None)
        self._layers, self._cache = inner.layers[own], cache[own]
        self._embed, self._norm, self._is_first = inner.embed_tokens, inner.norm, is_first
        self._head = inner.embed_tokens.as_linear if model.args.tie_word_embeddings else model.lm_head
        self.hidden_size, self.dtype = model.args.hidden_size, inner.norm.weight.dtype
        mx.eval([layer.parameters() for layer in self._layers], self._embed.parameters(), self._norm.parameters())
        if not (is_first or model.args.tie_word_embeddings):
            mx.eval(model.lm_head.parameters())

    def __call__(self, x: mx.array) -> mx.array:
        """Hidden states [1, L, D] of token ids [1, L], or the next token [1] of hidden states."""
        h = self._embed(x) if self._is_first else x
        mask = "causal" if x.shape[1] > 1 else None
        for layer, cache in zip(self._layers, self._cache, strict=True):
            h = layer(h, mask, cache)
        return h if self._is_first else self._head(self._norm(h[:, -1:])).argmax(-1)[0].astype(mx.int32)


class Input:
    """An array whose bytes are written after a graph was built on it."""

    def __init__(self, shape: list[int], dtype: mx.Dtype) -> None:
        raw = mx.array(np.empty(prod(shape) * dtype.size, np.uint8))
        self._memory = memoryview(raw)  # type: ignore[arg-type]
        self.array = raw.view(dtype).reshape(shape)

    def fill(self, data: bytes) -> mx.array:
        self._memory[:] = data
        return self.array


def _bytes(array: mx.array) -> bytes:
    return bytes(memoryview(array).cast("B"))  # type: ignore[arg-type]


async def _serve(folder: Path) -> None:
    """The second half: hidden states in, tokens out."""
    half = Half(folder, is_first=False)

    async def relay(_: object, context: grpc.aio.ServicerContext) -> None:
        length = int.from_bytes(await context.read(), "little")
        prompt = Input([1, length, half.hidden_size], half.dtype)
        await context.write(_bytes(half(prompt.fill(await context.read()))))
        while True:
            x = Input([1, 1, half.hidden_size], half.dtype)
            token = half(x.array)
            message: Any = await context.read()
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                return
            x.fill(message)
            mx.eval(token)
            await context.write(_bytes(token))

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.stream_stream_rpc_method_handler(relay)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_METHOD[0], {_METHOD[1]: handler}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def _ask(folder: Path, port: int, num_prompt: int, num_tokens: int) -> None:
    """The first half: tokens in, hidden states out. Prints the median milliseconds between two tokens."""
    half = Half(folder, is_first=True)
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        call: Any = channel.stream_stream("/" + "/".join(_METHOD), None, None)()  # type: ignore[call-arg]
        await call.write(num_prompt.to_bytes(4, "little"))
        await call.write(_bytes(half(mx.array([[1 + k % 7 for k in range(num_prompt)]]))))
        token, times = await call.read(), []
        for _ in range(num_tokens):
            ids = Input([1, 1], mx.int32)
            h = half(ids.array)
            times.append(time.perf_counter())
            ids.fill(token)
            mx.eval(h)
            await call.write(_bytes(h))
            token = await call.read()
        await call.done_writing()
    print(1e3 * statistics.median(after - before for before, after in pairwise(times)))


def _run_floor(folder: Path, num_prompt: int, num_tokens: int, envs: list[dict[str, str]]) -> float:
    """Milliseconds per token of the floor."""
    command = [sys.executable, "-m", "tools.bench_floor", str(folder)]
    with subprocess.Popen([*command, "--rank", "1"], env=envs[-1], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            sizes = ["--rank", "0", "--port", port, "--prompt", str(num_prompt), "--tokens", str(num_tokens)]
            out = subprocess.run(
                [*command, *sizes], env=envs[0], stdout=subprocess.PIPE, text=True, check=True, timeout=_LIMIT_S
            )
            return float(out.stdout)
        finally:
            server.kill()


def _run_product(folder: Path, num_prompt: int, num_tokens: int, envs: list[dict[str, str]]) -> dict[str, float]:
    """Milliseconds per token of one request in one process of Brigade, and on its coordinator and one worker."""
    worker = [sys.executable, "-m", "worker", "--name", "w", "--model", str(folder), "--bind", "127.0.0.1:0"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([*worker, "--follow-parent"], env=envs[-1], stdin=pipe, stdout=pipe, text=True) as process,
        tempfile.NamedTemporaryFile("w", suffix=".yaml") as config,
    ):
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            json.dump({"model": str(folder), "workers": [{"name": "w", "address": address}]}, config)
            config.flush()
            sizes = ["-p", str(num_prompt), "-g", str(num_tokens), "-n", "1", "--concurrency", "1"]
            command = [sys.executable, "-m", "coordinator", "bench", "--config", config.name, *sizes, "--json"]
            out = subprocess.run(command, env=envs[0], stdout=pipe, text=True, check=True, timeout=_LIMIT_S)
        finally:
            process.terminate()
    return {row["system"]: row["gap_p50_ms"] for row in json.loads(out.stdout)["rows"]}


if __name__ == "__main__":
    typer.run(main)
