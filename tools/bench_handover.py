"""The pause of a running answer while a worker ends: tokens fed again, and with `cache_disk` caches that go along.

python -m tools.bench_handover [--prompt 6000] [--rounds 3] [--layers 4] [--hidden 64]

A random model on three processes with disks of their own; the last of them gets SIGTERM in the middle of an answer.
Both ways take turns; pauses are medians of one run. Exits with 1 if tokens differ.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
import uvloop

from coordinator.cluster.open import open_cluster, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.engine.engine import Engine
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tools.random_model import main as make_model
from tools.worker_process import WorkerProcess
from worker.config import ClusterConfig, CoordinatorConfig, WorkerConfig
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_DISK = 16 << 30
_MEMORY = 4 << 30
_TOKENS = 60  # of the answer; the signal comes after a third of them


def main(
    prompt: Annotated[int, typer.Option(min=600, help="Tokens.")] = 6000,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    layers: Annotated[int, typer.Option(min=3)] = 4,
    hidden: Annotated[int, typer.Option(min=64)] = 64,
) -> int:
    """Compare pauses."""
    return int(not uvloop.run(_compare(prompt, rounds, layers, hidden)))


async def _compare(prompt: int, rounds: int, layers: int, hidden: int) -> bool:
    with TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_model(model, hidden=hidden, layers=layers, context=2 * prompt)
        pauses: dict[int | None, list[float]] = {None: [], _DISK: []}
        answers = []
        for _ in range(rounds):
            for cache_disk, found in pauses.items():
                with TemporaryDirectory(dir=folder) as disks:
                    os.environ["XDG_CACHE_HOME"] = f"{disks}/coordinator"
                    pause_s, tokens = await _pause(model, prompt, cache_disk, Path(disks))
                found.append(pause_s)
                answers.append(tokens)
    fed_s, moved_s = (median(found) for found in pauses.values())
    is_equal = all(tokens == answers[0] for tokens in answers)
    print(
        f"{machine_name()}, {layers} layers of {hidden}, 3 nodes, {prompt} tokens before the answer, medians of "
        f"{rounds}: pause {fed_s:.2f} s with tokens fed again, {moved_s:.2f} s with caches that go along "
        f"({moved_s / fed_s:.2f} x); tokens {'equal' if is_equal else 'DIFFER'}"
    )
    return is_equal


async def _pause(model: Path, prompt: int, cache_disk: int | None, disks: Path) -> tuple[float, list[int]]:
    """Return the longest time between two tokens, and the tokens."""
    nodes = [
        WorkerProcess(name, ("--model", str(model)), disks / f"{name}.log", {"XDG_CACHE_HOME": str(disks / name)})
        for name in ("first", "last")
    ]
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            await node.wait_listening()
        workers = tuple(WorkerConfig(name=node.name, address=(node.address,), memory=_MEMORY) for node in nodes)
        config = ClusterConfig(coordinator=CoordinatorConfig(memory=_MEMORY), workers=workers, cache_disk=cache_disk)
        options = ClusterOptions(config, str(model), None, prompt + 200, by_speed=False)
        async with (
            open_cluster(options, (await read_model(str(model)))[0]) as cluster,
            Engine(cluster.chain, when_lost=cluster.reopen) as engine,
        ):
            return await _answer(engine, prompt, lambda: nodes[-1].signal(signal.SIGTERM))
    finally:
        for node in nodes:
            node.kill()
            await node.wait_ended(10.0)


async def _answer(engine: Engine, prompt: int, end_worker: Callable[[], None]) -> tuple[float, list[int]]:
    asked = Request(tuple(7 * number % 1999 for number in range(prompt)), _TOKENS, Sampling())
    tokens: list[int] = []
    longest_s, before = 0.0, 0.0
    async with aclosing(engine.generate(asked)) as outputs:
        async for output in outputs:
            now = time.monotonic()
            longest_s, before = max(longest_s, now - before) if before else 0.0, now
            if len(tokens) < _TOKENS // 3 <= len(tokens) + len(output.tokens):
                end_worker()
            tokens += [token.token for token in output.tokens]
    return longest_s, tokens


if __name__ == "__main__":
    run_command(main)
