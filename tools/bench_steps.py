"""Where a token of one request spends its time on two nodes, step by step, beside the founding measurement.

python -m tools.bench_steps [--model demo] [--tokens 256] [--rounds 5]

That one (two Macs, 64 layers, hidden size 5120, over Thunderbolt) listed eight steps, A to H, of 46.7 ms in all, and
161 ms that a token took. Here the same steps are read from the timing records of every frame; medians.
"""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from statistics import median
from typing import Annotated

import typer
import uvloop

from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import cluster_options
from coordinator.engine.engine import generate_once
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from coordinator.sessions.waterfall import spans
from tools.figures import table
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.threads import MlxThread

_PROMPT = (5, 6, 7, 8)
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
    tokens: Annotated[int, typer.Option(min=16, help="Tokens to decode per round.")] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Measure the steps of a token on this process and one worker process."""
    uvloop.run(_measure(model, tokens, rounds))


async def _measure(model: str, num_tokens: int, rounds: int) -> None:
    options = cluster_options(None, model, 1, context=num_tokens + len(_PROMPT))
    checkpoint, spec = await read_model(options.model)
    spent: Spent = defaultdict(list)
    token_ms: list[float] = []
    with closing(MlxThread()) as thread:
        async with open_chain(options, checkpoint, thread) as chain:
            for _ in range(rounds):
                answer = await generate_once(chain, Request(_PROMPT, num_tokens), traced=True)
                token_ms += [(after - before) / 1e6 for before, after in pairwise(answer.token_times)]
                _add(spent, answer)
    _print(spent, median(token_ms), spec.hidden_size)


def _add(spent: Spent, answer: Answer) -> None:
    (leg,) = answer.usage.legs
    before = None
    for passage in leg.passages[1:]:  # the first is the prompt's
        for part, stage, begin, end in spans(passage, leg.route.offsets):
            spent[part, stage].append((end - begin) / 1e3)
        if before is not None:
            spent["scheduling", 0].append((passage.timings[0].received - before) / 1e3)
        before = passage.returned


def _print(spent: Spent, token_ms: float, hidden_size: int) -> None:
    lines = []
    for letter, what, theirs, parts in _STEPS:
        ours = sum(median(spent[part]) for part in parts if spent.get(part))
        lines.append((letter, what, theirs, f"{ours / 1e3:.3f}"))
    lines.append(("", "a token", "161", f"{token_ms:.3f}"))
    print(f"{machine_name()}; hidden size {hidden_size}\n")
    print(table(("step", "what", "there, ms", "here, ms"), lines, 2), end="")


if __name__ == "__main__":
    run_command(main)
