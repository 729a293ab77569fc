"""A server under load: streams while workers are killed, then more requests than it can answer.

python -m tools.load_serve [--seconds 120] [--streams 64] [--kills 3]

First 64 streams at once for as long as `--seconds`, while workers are killed: every stream has to be whole and to say
what the same request said alone, and the server's memory must not grow. Then requests come three times as often as the
server, which has memory for few of them, can answer: those that are taken keep their latency, the others get 429 at
once. Exits with 1 where any of this does not hold.
"""

import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx2
import psutil
import typer
import uvloop

from coordinator.cluster.open import read_model
from tools.serve_client import Outcome, Server, brigade, p95, print_failures, stream
from worker.platform.run import run_command

T = TypeVar("T")

_NUM_BODIES = 16
_MOST_GROWTH = 1.2  # of the server's memory between the first quarter and the end
_REJECTED_S = 0.05
_SLOWER = 2.0  # than at capacity, for what is taken beyond it
_WATCHED_S = 0.5
_FEW = 8  # requests that the overloaded server has memory for


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Of streams with kills; the overload takes a third.")] = 120,
    streams: Annotated[int, typer.Option(min=1)] = 64,
    kills: Annotated[int, typer.Option(min=0)] = 3,
    model: Annotated[str, typer.Option(help="As for `brigade serve`.")] = "demo",
    local: Annotated[int, typer.Option(min=1, help="Workers.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2)] = 64,
) -> int:
    """Load a server until it breaks its word, or does not."""
    bodies = [story(number, max_tokens) for number in range(_NUM_BODIES)]
    return print_failures(uvloop.run(_check(bodies, seconds, streams, kills, model, local)))


async def _check(
    bodies: list[dict[str, Any]], seconds: float, streams: int, kills: int, model: str, local: int
) -> list[str]:
    flags = ("--model", model, "--local", local, "--rejoin-timeout", 50)
    with brigade(*map(str, flags)) as server:
        async with server.client() as client:
            failures = await _streams(server, client, bodies, seconds, streams, kills)
    with tempfile.TemporaryDirectory() as folder:
        more = await _little_memory(Path(folder), model, local, bodies[0])
        with brigade("--model", model, "--local", str(local), "--max-waiting", str(_FEW), *more) as server:
            async with server.client() as client:
                return failures + await overload(client, bodies, seconds / 3)


async def _streams(
    server: Server, client: httpx2.AsyncClient, bodies: list[dict[str, Any]], seconds: float, streams: int, kills: int
) -> list[str]:
    alone = [(await stream(client, body)).text for body in bodies]
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    until = time.monotonic() + seconds

    async def ask(rng: random.Random) -> None:
        while time.monotonic() < until:
            number = rng.randrange(len(bodies))
            found = await stream(client, bodies[number])
            statuses[found.status] += 1
            if found.status == 200 and not (found.is_whole and found.text == alone[number]):
                failures.append(f"request {number}: {found.text!r} instead of {alone[number]!r}, {found.is_whole=}")

    asking = asyncio.gather(*(ask(random.Random(number)) for number in range(streams)))
    _, memory = await disturbed(server, asking, kills, seconds / (kills + 1))
    quarter, end = max(memory[: len(memory) // 4 + 1]), memory[-1]
    print(
        f"{streams} streams, {kills} kills, {seconds:g} s: {dict(statuses)}, memory {quarter >> 20} to {end >> 20} MiB"
    )
    if not statuses[200] or statuses.keys() - {200, 429, 503}:
        failures.append(f"statuses {dict(statuses)}")
    if end > _MOST_GROWTH * quarter:
        failures.append(f"memory grew from {quarter} to {end} bytes")
    return failures


async def disturbed(server: Server, work: Awaitable[T], kills: int, every_s: float) -> tuple[T, list[int]]:
    """Return what `work` returns, and the server's bytes of memory meanwhile, in which workers are killed.

    Raises:
        RuntimeError: the work ended before the last kill.
    """
    process, memory = psutil.Process(server.process.pid), list[int]()

    async def watch() -> None:
        while True:
            memory.append(process.memory_info().rss)
            await asyncio.sleep(_WATCHED_S)

    watching, killing = asyncio.create_task(watch()), asyncio.create_task(_kill(process, kills, every_s))
    try:
        found = await work
        if not killing.done():
            raise RuntimeError(f"expected {kills} kills before the work ended")
        await killing
    finally:
        watching.cancel()
        killing.cancel()
    return found, memory


async def _kill(server: psutil.Process, kills: int, every_s: float) -> None:
    rng, pause_s = random.Random(0), every_s
    while kills:
        await asyncio.sleep(pause_s)
        pause_s = _WATCHED_S  # until the one that was killed is started again
        if workers := [each for each in server.children(recursive=True) if "worker" in each.cmdline()]:
            rng.choice(workers).kill()
            kills, pause_s = kills - 1, every_s


async def overload(client: httpx2.AsyncClient, bodies: list[dict[str, Any]], seconds: float) -> list[str]:
    """Ask three times as often as the server can answer; return what went wrong."""
    began = time.monotonic()
    if not (at_capacity := await _closed_loop(client, bodies, seconds / 3)):
        return [f"no answer at capacity within {seconds / 3:g} s"]
    rate = 3 * len(at_capacity) / (time.monotonic() - began)  # the last answers end later than that
    tasks: list[asyncio.Task[Outcome]] = []
    until, endless = time.monotonic() + seconds, itertools.cycle(bodies)
    while time.monotonic() < until:
        tasks.append(asyncio.create_task(stream(client, next(endless))))
        await asyncio.sleep(1 / rate)
    found = await asyncio.gather(*tasks)
    taken = [each.took_s for each in found if each.status == 200]
    rejected = [each.took_s for each in found if each.status == 429]
    usual_s, slow_s, rejected_s = p95([each.took_s for each in at_capacity]), p95(taken), p95(rejected)
    print(
        f"3 x capacity ({rate:.1f} requests/s) for {seconds:g} s: {dict(Counter(each.status for each in found))}; p95 "
        f"{slow_s:.2f} s of those taken, {usual_s:.2f} s at capacity; 429 within {1000 * rejected_s:.0f} ms (p95)"
    )
    failures = [f"status {each.status}" for each in found if each.status not in (200, 429, 503)]
    if not rejected or rejected_s > _REJECTED_S:
        failures.append(f"429 within {rejected_s:.3f} s, expected {_REJECTED_S:g} s")
    if not taken or slow_s > _SLOWER * usual_s:
        failures.append(f"p95 of what was taken is {slow_s:.2f} s, at capacity {usual_s:.2f} s")
    return failures


async def _closed_loop(client: httpx2.AsyncClient, bodies: list[dict[str, Any]], seconds: float) -> list[Outcome]:
    """As many at once as there is memory for and as may wait, each as soon as another one has ended."""
    found: list[Outcome] = []
    until = time.monotonic() + seconds

    async def ask(number: int) -> None:
        while time.monotonic() < until:
            found.append(await stream(client, bodies[number]))

    await asyncio.gather(*(ask(number) for number in range(2 * _FEW)))
    return [each for each in found if each.status == 200]


async def _little_memory(folder: Path, model: str, local: int, body: dict[str, Any]) -> list[str]:
    """Flags by which the coordinator has memory for few requests."""
    _, spec = await read_model(model)
    num_layers = -(-spec.num_layers // (local + 1))
    rows = body["max_tokens"] + 64
    memory = spec.shard_bytes(0, num_layers) + _FEW * spec.reserved_bytes(0, num_layers, rows)
    each, more = divmod(spec.num_layers - num_layers, local)
    layers = [num_layers, *(each + (number < more) for number in range(local))]
    path = folder / "cluster.yaml"
    path.write_text(f"coordinator: {{memory: {memory}}}\n")
    return ["--config", str(path), "--context", str(rows), "--layers", ",".join(map(str, layers))]


def story(number: int, max_tokens: int) -> dict[str, Any]:
    prompt = f"Tell me story number {number} about a fox."
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": number, "ignore_eos": True}


if __name__ == "__main__":
    run_command(main)
