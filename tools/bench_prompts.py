"""Prompts on two nodes and answers on the first one, beside one process that does both.

python -m tools.bench_prompts [--model demo] [--prompt 1900] [--tokens 32] [--rounds 7] [--config cluster.yaml]

Two servers take turns with the same prompts, each a new one; ratios are of medians of one run. No prompt can be faster
than the slower side computes its layers, or than the link carries what the other side's layers remember: this bound is
printed with its parts, as if both nodes were equally fast. Measured costs decide which prompts go to both nodes; their
number is printed. Exits with 1 if an answer differs.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
import uvloop

from coordinator.cluster.open import open_peers, read_model
from coordinator.cluster.options import ClusterOptions, cluster_options
from tools.serve_client import BRIGADE, Outcome, Server, brigade, long_text, whole_stream
from worker.errors import InputError
from worker.model.model_spec import ModelSpec
from worker.platform.machine import machine_name
from worker.platform.run import run_command


def main(
    model: Annotated[str, typer.Option(help="A model that one node holds.")] = "demo",
    prompt: Annotated[int, typer.Option(min=64, help="Tokens, about.")] = 1900,
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    layers: Annotated[str | None, typer.Option(help="Layers of each node that compute prompts.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A cluster.yaml with the other nodes, instead of one here.")
    ] = None,
) -> int:
    """Compare times to the first token and between tokens."""
    others = ("--config", config) if config else ("--local", "1")
    flags = ("--model", model, *others, *(("--layers", layers) if layers else ()))
    options = cluster_options(config, model, None if config else 1)
    alone = ("--model", model, "--local", "0")
    return int(not uvloop.run(compare(options, alone, flags, prompt, tokens, rounds)))


async def compare(
    options: ClusterOptions,
    alone_flags: Sequence[str | Path],
    apart_flags: Sequence[str | Path],
    prompt: int,
    tokens: int,
    rounds: int,
    program: Sequence[str] = BRIGADE,
) -> bool:
    """Print what a server with each of these flags takes, and the bound; return whether their answers are equal."""
    _, spec = await read_model(options.model)
    async with open_peers(options, spec) as peers:
        if len(peers) != 1:
            raise InputError("config", f"expected one worker, found {len(peers)}")
        link = await peers[0].measure_link()
    apart_flags = (*apart_flags, "--objective", "prompt")
    with brigade(*alone_flags, program=program) as one, brigade(*apart_flags, program=program) as two:
        outcomes: list[list[Outcome]] = [[], []]
        num_frames = list[float]()  # that went to both nodes, before each round
        for number in range(rounds + 1):  # the first is not counted: it compiles
            num_frames.append(await _num_frames(two))
            for server, found in zip((one, two), outcomes, strict=True):
                found.append(await _ask(server, long_text(prompt, number), tokens))
        num_frames.append(await _num_frames(two))
        async with two.client() as client:
            starts = [node["start"] for node in (await client.get("/cluster")).json()["nodes"]]
            counted = await client.post("/tokenize", json={"prompt": long_text(prompt, 0)})
            num_tokens = counted.json()["count"]
    alone, apart = (found[1:] for found in outcomes)
    is_equal = [each.text for each in alone] == [each.text for each in apart]
    first, between = (_first_s(alone) / _first_s(apart), _token_s(alone) / _token_s(apart))
    print(
        f"{machine_name()}, {options.model}, prompts of about {prompt} tokens, medians of {rounds}: first token "
        f"{_first_s(alone):.3f} s alone, {_first_s(apart):.3f} s with two nodes ({first:.2f} x); a token "
        f"{1e3 * _token_s(alone):.1f} ms, {1e3 * _token_s(apart):.1f} ms ({between:.2f} x); "
        f"answers {'equal' if is_equal else 'DIFFER'}"
    )
    if len(starts) > 1 and None not in starts:  # else the plan has left the other node out
        num_shared = sum(after > before + 1 for before, after in pairwise(num_frames[1:]))  # one only opens a slot
        print(f"{num_shared} of {rounds} prompts of {num_tokens} tokens went to both nodes; ", end="")
        _print_bound(spec, starts[1], num_tokens, link.bytes_per_s, _first_s(alone), _first_s(apart))
    return is_equal


def _print_bound(
    spec: ModelSpec, start: int, num_tokens: int, bytes_per_s: float, alone_s: float, apart_s: float
) -> None:
    """Print the least that a prompt takes whose layers from `start` on another node computes as fast as this one."""
    sides = start, spec.num_layers - start
    first_s, other_s = (alone_s * num / spec.num_layers for num in sides)
    link_s = num_tokens * spec.segment_row_bytes(start, spec.num_layers) / bytes_per_s
    bound_s = max(first_s, other_s, link_s)
    print(
        f"bound: {bound_s:.3f} s, of the first node's {sides[0]} layers {first_s:.3f} s, of the other's {sides[1]} "
        f"{other_s:.3f} s, of the link at {bytes_per_s / 1e9:.2f} GB/s {link_s:.3f} s; reached: "
        f"{bound_s / apart_s:.2f} of it"
    )


async def _num_frames(server: Server) -> float:
    """Return how many frames the node behind the first one has computed."""
    async with server.client() as client:
        text = (await client.get("/metrics")).text
    return sum(map(float, re.findall(r'brigade_stage_frames_total{.*stage="1".*} (.*)', text)))


async def _ask(server: Server, prompt: str, tokens: int) -> Outcome:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "decode": "ar"}
    async with server.client() as client:
        return await whole_stream(client, body)


def _first_s(outcomes: Sequence[Outcome]) -> float:
    return median(each.first_s for each in outcomes)


def _token_s(outcomes: Sequence[Outcome]) -> float:
    return median((each.took_s - each.first_s) / (each.num_tokens - 1) for each in outcomes)


if __name__ == "__main__":
    run_command(main)
