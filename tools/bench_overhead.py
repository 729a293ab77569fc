"""What the chain costs: a two-node chain against one process with the same model.

python -m tools.bench_overhead [--model demo] [--tokens 128] [--rounds 5]

Runs in turn, in one go: the whole model in this process, and the same model on this process and one worker process.
Prints medians and their ratios.

A second table has the steps of a token on both nodes, from the timing records of every frame, beside the founding
measurement. That one (two Macs, 64 layers, hidden size 5120, over Thunderbolt) listed eight steps, A to H, of 46.7 ms
in all, and 161 ms that a token took.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Annotated

import typer
import uvloop

from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.engine.engine import generate_once
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from coordinator.sessions.waterfall import spans
from tools.figures import table
from worker.model.model_spec import ModelSpec
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.threads import MlxThread

_WIRE, _RETURN = ("wire", 1), ("return", 0)
Spent = dict[tuple[str, int], list[float]]  # microseconds of every token, by part and stage
# the founding measurement's letter, what it is, its milliseconds, and which of our parts it is, by stage
_STEPS: Sequence[tuple[str, str, str, Sequence[tuple[str, int]]]] = (
    ("A, H", "choose the token: there on the coordinator, here on the last stage", "0.2", [("head + sampling", 1)]),
    ("B", "the coordinator's layers", "26.5", [("coordinator compute", 0)]),
    ("C", "hidden state to bytes, and sent", "1.5", [("encode", 0), _WIRE]),
    ("D", "received, and bytes to hidden state", "1.5", [("queue", 1), ("decode", 1)]),
    ("E", "the worker's layers", "6.5", [("worker compute", 1)]),
    ("F, G", "the result sent and received: there 970 KB of logits, here a token id", "11.0", [("encode", 1), _RETURN]),
    ("", "all else: there not accounted for, here scheduling and waiting for a turn", "114",
     [("scheduling", 0), ("queue", 0), ("decode", 0)]),
)  # fmt: skip


def main(
    model: Annotated[str, typer.Option(help="As for `brigade generate`.")] = "demo",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode per round.")] = 128,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Measure the overhead of a two-node chain per token, and its prefill against one process."""
    uvloop.run(_measure(cluster_options(None, model, 0), tokens, prompt, rounds))


async def _measure(options: ClusterOptions, num_tokens: int, num_prompt: int, rounds: int) -> None:
    checkpoint, spec = await read_model(options.model)
    options = replace(options, context=num_prompt + num_tokens)
    short = Request((5, 6, 7, 8), num_tokens)
    long = Request(tuple(5 + i % 64 for i in range(min(num_prompt, spec.context - 1))), 1)
    one_ms, two_ms, one_s, two_s = [], [], [], []
    spent: Spent = defaultdict(list)
    with closing(MlxThread()) as thread:
        async with (
            open_chain(options, checkpoint, thread) as one,
            open_chain(replace(options, local=1), checkpoint, thread) as two,
        ):
            for _ in range(rounds):
                one_ms += _token_ms(await generate_once(one, short))
                answer = await generate_once(two, short, traced=True)
                two_ms += _token_ms(answer)
                _add(spent, answer)
            for _ in range(rounds):
                one_s.append((await generate_once(one, long)).ttft_s)
                two_s.append((await generate_once(two, long)).ttft_s)
            layers = two.plan.layers
    _print(spec, layers, len(long.prompt), one_ms, two_ms, one_s, two_s)
    _print_steps(spent, statistics.median(two_ms), spec.hidden_size)


def _token_ms(answer: Answer) -> list[float]:
    return [(after - before) / 1e6 for before, after in itertools.pairwise(answer.token_times)]


def _add(spent: Spent, answer: Answer) -> None:
    (leg,) = answer.usage.legs
    before = None
    for passage in leg.passages[1:]:  # the first is the prompt's
        for part, stage, begin, end in spans(passage, leg.route.offsets):
            spent[part, stage].append((end - begin) / 1e3)
        if before is not None:
            spent["scheduling", 0].append((passage.timings[0].received - before) / 1e3)
        before = passage.returned


def _print(
    spec: ModelSpec, layers: list[int], num_prompt: int,
    one_ms: list[float], two_ms: list[float], one_s: list[float], two_s: list[float],
) -> None:  # fmt: skip
    one, two, single, pair = map(statistics.median, (one_ms, two_ms, one_s, two_s))
    lines = [
        ("one process, per token", f"{one:.3f} ms"),
        (f"two nodes {layers}, per token", f"{two:.3f} ms"),
        ("overhead per token", f"{two - one:+.3f} ms"),
        (f"prompt of {num_prompt} tokens, one process", f"{single:.3f} s"),
        (f"prompt of {num_prompt} tokens, two nodes", f"{pair:.3f} s"),
        ("prefill, two nodes against one process", f"{single / pair:.2f}x"),
    ]
    print(f"{spec.name} on {machine_name()}\n", table(("what", "median"), lines, 1), sep="\n", end="")


def _print_steps(spent: Spent, token_ms: float, hidden_size: int) -> None:
    lines = []
    for letter, what, theirs, parts in _STEPS:
        ours = sum(statistics.median(spent[part]) for part in parts if spent.get(part))
        lines.append((letter, what, theirs, f"{ours / 1e3:.3f}"))
    lines.append(("", "a token", "161", f"{token_ms:.3f}"))
    print(f"\nstep by step on two nodes, hidden size {hidden_size}\n")
    print(table(("step", "what", "there, ms", "here, ms"), lines, 2), end="")


if __name__ == "__main__":
    run_command(main)
