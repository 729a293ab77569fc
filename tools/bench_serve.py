"""The server beside mlx_lm.server: same machine, model, requests and client, in one run.

python -m tools.bench_serve [--model demo] [--tokens 128] [--streams 1,8,32] [--rounds 3]

Prints tokens per second and the time to the first token (p50, p95) of so many streams at once, with `brigade serve` on
one process and on two nodes; how long four streams stand still at most, alone and while a long prompt arrives; and what
HTTP adds to each token and to the first, against the same requests in this process.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any

import httpx2
import typer
import uvloop

from coordinator.cli.flags import parse_counts
from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine, open_engine
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.request import RequestSpec
from tools.figures import table
from tools.serve_client import Outcome, Server, brigade, mlx_lm_server, p95, stream, whole_stream
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_WAIT_S = 600.0
_AGAIN_S = 0.02
_BESIDE = 4  # streams that run while a long prompt arrives
_GAP_TOKENS = 256
_PAIRS = 15  # of a request in this process and one by HTTP
_SETTLED_S = 1.0  # by then all of them decode


def main(
    model: Annotated[str, typer.Option(help="As for `brigade serve`.")] = "demo",
    tokens: Annotated[int, typer.Option(min=2, help="The most tokens of each answer.")] = 128,
    streams: Annotated[str, typer.Option(metavar="1,8,32", help="How many at once, in turn.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="Of each; the median is shown.")] = 3,
    words: Annotated[int, typer.Option(min=1, help="Of the long prompt.")] = 700,
) -> None:
    """Measure the server beside mlx_lm.server."""
    uvloop.run(_measure(model, tokens, parse_counts("streams", streams), rounds, words))


async def _measure(model: str, num_tokens: int, counts: Sequence[int], rounds: int, num_words: int) -> None:
    frontend = await InputProcessor.read(cluster_options(None, model))
    servers: dict[str, AbstractContextManager[Server]] = {
        "mlx_lm.server": mlx_lm_server(frontend.checkpoint.folder),
        "brigade serve, one process": brigade("--model", model, "--local", "0"),
        "brigade serve, two nodes": brigade("--model", model, "--local", "1"),
    }
    speeds, longest = [], []
    for name, opening in servers.items():
        with opening as server:
            async with server.client() as client:
                for count in counts:
                    figures = await _at_once(client, count, num_tokens, rounds)
                    speeds.append((name, str(count), *(f"{figure:.1f}" for figure in figures)))
                gaps = [await _gaps_ms(client, num_words, turn) for turn in range(rounds)]
                longest.append((name, *(f"{statistics.median(each):.1f}" for each in zip(*gaps, strict=True))))
    print(f"{frontend.checkpoint.name} on {machine_name()}\n")
    print(table(("server", "streams", "tok/s", "first token p50, ms", "p95, ms"), speeds, 1))
    print(f"the longest gap in {_BESIDE} streams, ms\n")
    print(table(("server", "alone", "beside a long prompt", "its first token after, ms"), longest, 1))
    here, there = await _here_and_there(frontend, model, num_tokens, _PAIRS)
    for what, which in (("per token", 0), ("until the first one", 1)):
        pairs = [(pair[0][which], pair[1][which]) for pair in zip(here, there, strict=True)]
        in_process, by_http = (statistics.median(each) for each in zip(*pairs, strict=True))
        more = statistics.median(http - process for process, http in pairs)
        print(
            f"one stream, {what}: {in_process:.2f} ms in process, {by_http:.2f} by HTTP, {more:+.2f} (median of pairs)"
        )


async def _at_once(client: httpx2.AsyncClient, count: int, num_tokens: int, rounds: int) -> tuple[float, float, float]:
    """Tokens per second of so many streams, and p50 and p95 until the first text, ms: of the median round.

    One round before does not count.
    """
    found = []
    for turn in range(rounds + 1):
        bodies = [_body(turn * count + number, num_tokens) for number in range(count)]
        began = time.monotonic()
        outcomes = await asyncio.gather(*(_persistent(client, body) for body in bodies))
        tokens_per_s = sum(outcome.num_tokens for outcome in outcomes) / (time.monotonic() - began)
        first_ms = [1000 * outcome.first_s for outcome in outcomes]
        found.append((tokens_per_s, statistics.median(first_ms), p95(first_ms)))
    return statistics.median_low(found[1:])


async def _gaps_ms(client: httpx2.AsyncClient, num_words: int, turn: int) -> tuple[float, float, float]:
    """The longest gap of some streams alone, and while a long prompt arrives; and when that one's first token came."""
    gaps: list[float] = []
    long = _body(10_000 + turn, 1) | {"prompt": f"{turn} " + "apples and more " * (num_words // 3)}
    first_s = 0.0
    for bodies in ([], [long]):
        streams = [
            asyncio.create_task(_persistent(client, _body(20_000 + turn * _BESIDE + number, _GAP_TOKENS)))
            for number in range(_BESIDE)
        ]
        await asyncio.sleep(_SETTLED_S)
        for body in bodies:
            first_s = (await _persistent(client, body)).first_s
        gaps.append(max(found.longest_gap_s for found in await asyncio.gather(*streams)))
    return 1000 * gaps[0], 1000 * gaps[1], 1000 * first_s


async def _persistent(client: httpx2.AsyncClient, body: dict[str, Any]) -> Outcome:
    """A whole stream, asked for again if the connection is reset: mlx_lm.server lets five wait to be accepted."""
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        try:
            found = await whole_stream(client, body)
        except httpx2.NetworkError:
            if time.monotonic() - began > _WAIT_S:
                raise
            await asyncio.sleep(_AGAIN_S)
        else:
            return replace(found, first_s=found.first_s + asked - began, took_s=found.took_s + asked - began)


Pair = tuple[float, float]  # milliseconds per token, prompt included, and until the first text


async def _here_and_there(
    frontend: InputProcessor, model: str, num_tokens: int, count: int
) -> tuple[list[Pair], list[Pair]]:
    """The same requests in this process and by HTTP, in turns, a token per step and as many tokens each."""
    options = cluster_options(None, model, 0)
    here: list[Pair] = []
    there: list[Pair] = []
    async with open_engine(frontend, options, max_waiting=1, max_wait_s=_WAIT_S) as resident:
        with brigade("--model", model, "--local", "0") as server:
            async with server.client() as client:
                for turn in range(count + 1):
                    body = _body(30_000 + turn, num_tokens) | {"decode": "ar", "ignore_eos": True}
                    greedy = {"temperature": 0.0}
                    ask = RequestSpec(body["prompt"], num_tokens, greedy, decode=Decode("ar"), ignore_eos=True)
                    here.append(await _in_process(resident, ask))
                    found = await stream(client, body)
                    there.append((1000 * found.took_s / found.num_tokens, 1000 * found.first_s))
    return here[1:], there[1:]


async def _in_process(resident: Engine, ask: RequestSpec) -> Pair:
    began, num_said, first_s = time.monotonic(), 0, 0.0
    async for delta in resident.generate(await resident.prepare(ask)):
        num_said += len(delta.tokens)
        first_s = first_s or (time.monotonic() - began if delta.content else 0.0)
    return 1000 * (time.monotonic() - began) / num_said, 1000 * first_s


def _body(number: int, num_tokens: int) -> dict[str, Any]:
    """Prompts that differ at once: none is helped by what another one fed."""
    return {"prompt": f"{number} foxes tell a long story:", "max_tokens": num_tokens, "temperature": 0.0}


if __name__ == "__main__":
    run_command(main)
