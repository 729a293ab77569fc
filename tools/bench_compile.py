"""What `mx.compile` would save of a decode step: mlx-lm's model with its own caches, and with caches of fixed capacity,
as they are and compiled.

python -m tools.bench_compile MODEL [--tokens 128] [--context 200] [--capacity 512]

Prints milliseconds per step, of which those to build the graph, medians of interleaved turns, for 1, 8 and 16 requests
side by side, and whether all three ways gave the same tokens.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import mlx.core as mx
import typer
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from worker.errors import InputError
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_TURNS = 5


class FixedCache:
    """Keys and values of one layer for B slots, in buffers whose shape never changes; the offset is an array."""

    def __init__(self, offset: mx.array, buffers: list[mx.array]) -> None:
        self.offset, self.buffers = offset, buffers

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        self.buffers = [
            mx.slice_update(buffer, new, self.offset[None], axes=(2,))
            for buffer, new in zip(self.buffers, (keys, values), strict=True)
        ]
        return tuple(self.buffers)

    def make_mask(self, num_rows: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return (mx.arange(self.buffers[0].shape[2]) <= self.offset)[None, None, None]


Step = Callable[[mx.array, mx.array, list[mx.array]], tuple[mx.array, mx.array, list[mx.array]]]


_Turn = tuple[list[Any], float, float]  # tokens, milliseconds per step, and those to build its graph


def main(
    model: Annotated[Path, typer.Argument()],
    tokens: Annotated[int, typer.Option(min=8)] = 128,
    context: Annotated[int, typer.Option(min=1)] = 200,
    capacity: Annotated[int, typer.Option(min=1)] = 512,
) -> None:
    if context + tokens > capacity:
        raise InputError("capacity", f"expected at least {context + tokens}, --context + --tokens, got {capacity}")
    net, _ = load_model(model)
    print(f"{machine_name()}; mlx {version('mlx')}, mlx_lm {version('mlx-lm')}; context {context}, capacity {capacity}")

    def step(ids: mx.array, offset: mx.array, buffers: list[mx.array]) -> tuple[mx.array, mx.array, list[mx.array]]:
        caches = [FixedCache(offset, buffers[i : i + 2]) for i in range(0, len(buffers), 2)]
        logits = net(ids, cache=caches)
        held = [buffer for cache in caches for buffer in cache.buffers]
        return mx.argmax(logits[:, -1], axis=-1, keepdims=True), offset + 1, held

    compiled = mx.compile(step)
    for B in (1, 8, 16):
        prompt = mx.random.randint(0, net.args.vocab_size, (B, context), key=mx.random.key(B))
        ways: dict[str, Callable[[], _Turn]] = {
            "mlx-lm's caches": partial(_own, net, prompt, tokens),
            "fixed": partial(_fixed, net, step, prompt, tokens, capacity),
            "fixed, compiled": partial(_fixed, net, compiled, prompt, tokens, capacity),
        }
        found: dict[str, list[Any]] = {way: [] for way in ways}
        for _ in range(_TURNS + 1):
            for way, run in ways.items():
                found[way].append(run())
        same = len({str(turns[0][0]) for turns in found.values()}) == 1
        for way, turns in found.items():
            total, build = (median(turn[i] for turn in turns[1:]) for i in (1, 2))
            print(f"{B:3} requests  {way:20} {total:7.3f} ms per step, {build:6.3f} of them build", flush=True)
        print(f"    tokens are {'equal' if same else 'DIFFERENT'}", flush=True)


def _own(net: Any, prompt: mx.array, num_tokens: int) -> _Turn:
    caches = make_prompt_cache(net)
    ids = mx.argmax(net(prompt, cache=caches)[:, -1], axis=-1, keepdims=True)
    mx.eval(ids)

    def following(ids: mx.array) -> mx.array:
        return mx.argmax(net(ids, cache=caches)[:, -1], axis=-1, keepdims=True)

    return _timed(ids, following, num_tokens)


def _fixed(net: Any, step: Step, prompt: mx.array, num_tokens: int, capacity: int) -> _Turn:
    caches = make_prompt_cache(net)
    ids = mx.argmax(net(prompt, cache=caches)[:, -1], axis=-1, keepdims=True)
    state: list[Any] = [mx.array(prompt.shape[1], mx.int32), []]
    for cache in caches:
        for rows in (cache.keys, cache.values):
            B, H, _, K = rows.shape
            rows = rows[:, :, : prompt.shape[1]]
            state[1].append(mx.concatenate([rows, mx.zeros((B, H, capacity - rows.shape[2], K), rows.dtype)], axis=2))
    mx.eval(ids, *state)
    del caches, rows

    def following(ids: mx.array) -> mx.array:
        ids, state[0], state[1] = step(ids, state[0], state[1])
        return ids

    return _timed(ids, following, num_tokens)


def _timed(ids: mx.array, following: Callable[[mx.array], mx.array], num_tokens: int) -> _Turn:
    """Decode one step ahead, as mlx-lm does; return the tokens, and milliseconds per step, of which to build it."""
    found, build = list[Any](), 0.0
    begun = time.perf_counter()
    for _ in range(num_tokens):
        at = time.perf_counter()
        after = following(ids)
        build += time.perf_counter() - at
        mx.async_eval(after)
        found.append(ids.tolist())
        ids = after
    mx.eval(ids)
    return found, (time.perf_counter() - begun) * 1e3 / num_tokens, build * 1e3 / num_tokens


if __name__ == "__main__":
    run_command(main)
