"""Prompts on two nodes and answers on the first one, beside one process that does both.

python -m tools.bench_prompts [--model demo] [--prompt 1900] [--tokens 32] [--rounds 7] [--config cluster.yaml]

Two servers take turns with the same prompts, each a new one; ratios are of medians of one run. Exits with 1 if an
answer differs.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
import uvloop

from tools.serve_client import Outcome, Server, brigade, stream
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_WORDS = ("read", "the", "file", "before", "you", "change", "it", "and", "say", "why", "in", "one", "line")
_TOKENS_PER_WORD = 4.5  # by the bundled tokenizer, about


def main(
    model: Annotated[str, typer.Option(help="A model that one node holds.")] = "demo",
    prompt: Annotated[int, typer.Option(min=64, help="Tokens, about.")] = 1900,
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    layers: Annotated[str | None, typer.Option(help="Layers of each node that compute prompts.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A cluster.yaml with the other nodes, instead of one here.")
    ] = None,
) -> None:
    """Compare times to the first token and between tokens."""
    others = ("--config", config) if config else ("--local", "1")
    flags = (*others, "--objective", "prompt", *(("--layers", layers) if layers else ()))
    raise typer.Exit(0 if uvloop.run(_compare(model, prompt, tokens, rounds, flags)) else 1)


async def _compare(model: str, prompt: int, tokens: int, rounds: int, flags: Sequence[str | Path]) -> bool:
    with brigade("--model", model, "--local", "0") as one, brigade("--model", model, *flags) as two:
        outcomes: list[list[Outcome]] = [[], []]
        for number in range(rounds + 1):  # the first is not counted: it compiles
            for server, found in zip((one, two), outcomes, strict=True):
                found.append(await _ask(server, _prompt(number, prompt), tokens))
    alone, apart = (found[1:] for found in outcomes)
    is_equal = [each.text for each in alone] == [each.text for each in apart]
    first, between = (_first_s(alone) / _first_s(apart), _token_s(alone) / _token_s(apart))
    print(
        f"{machine_name()}, {model}, prompts of about {prompt} tokens, medians of {rounds}: first token "
        f"{_first_s(alone):.3f} s alone, {_first_s(apart):.3f} s with two nodes ({first:.2f} x); a token "
        f"{1e3 * _token_s(alone):.1f} ms, {1e3 * _token_s(apart):.1f} ms ({between:.2f} x); "
        f"answers {'equal' if is_equal else 'DIFFER'}"
    )
    return is_equal


async def _ask(server: Server, prompt: str, tokens: int) -> Outcome:
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "decode": "ar",
    }
    async with server.client() as client:
        return await stream(client, body)


def _prompt(number: int, tokens: int) -> str:
    words = itertools.islice(itertools.cycle(_WORDS), int(tokens / _TOKENS_PER_WORD))
    return " ".join(f"{word}{number}{place % 90}" for place, word in enumerate(words))


def _first_s(outcomes: Sequence[Outcome]) -> float:
    return median(each.first_s for each in outcomes)


def _token_s(outcomes: Sequence[Outcome]) -> float:
    return median((each.took_s - each.first_s) / (each.num_tokens - 1) for each in outcomes)


if __name__ == "__main__":
    run_command(main)
