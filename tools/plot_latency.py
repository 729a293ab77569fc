"""Tokens per second against the latency of a hop, measured: `ar`, and windows of the bundled model.

python -m tools.plot_latency --json docs/latency.json --plot docs/latency.png

Two nodes on this machine, a proxy between them that holds each piece back for so long, either way (tools/bench_hops.py
says what of it a step waits for: twice that). As timers are coarse, what a hop takes then is measured. Whatever else
runs on the machine only makes it slower: the fastest answer to each prompt counts, and with `--from FILE` each point of
an earlier run that was faster. `--rounds 0` only draws that. Needs matplotlib (the extra `plot`).
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from coordinator.bench.report import check_plot
from coordinator.cluster.chain import Chain
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import generate_once
from coordinator.engine.inputs import InputProcessor
from coordinator.planning.costs import ChainCosts
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Conversation, Request, check_request
from tools.bench_hops import PROMPTS, open_slow_chain
from tools.figures import load, save
from worker.errors import InputError
from worker.platform.machine import machine_name
from worker.platform.run import run_command

DELAYS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
DECODES = {
    "ar": Decode("ar"),
    "diffusion, W = 16": Decode("diffusion", 16),
    "diffusion, W = 32": Decode("diffusion", 32),
}
_WARM_UP_TOKENS = 12
_MOST_TOKENS = 256
_COLORS = ("black", "tab:blue", "tab:cyan")


@dataclass(frozen=True)
class Point:
    """What one decoder made of all prompts where the proxy adds `delay_ms` one way, and 64 bytes took `hop_ms`."""

    decoder: str
    delay_ms: float
    hop_ms: float
    tokens_per_s: float
    tokens_per_step: float
    is_equal: bool  # to the tokens of `ar`


@dataclass
class Curves:
    """All points of one run."""

    machine: str
    model: str
    layers: list[int] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    def of(self, decoder: str) -> list[Point]:
        """By rising latency."""
        return sorted((each for each in self.points if each.decoder == decoder), key=lambda each: each.hop_ms)

    def faster(self, other: "Curves") -> "Curves":
        """Each point from the run in which it was faster. Raises InputError for a run of something else."""
        if self.points and (self.machine, self.model, self.layers) != (other.machine, other.model, other.layers):
            found = f"{self.model} {self.layers} on {self.machine}"
            raise InputError("from", f"expected {other.model} {other.layers} on {other.machine}, found {found}")
        both = {(each.decoder, each.delay_ms): each for each in self.points}
        for each in other.points:
            both[each.decoder, each.delay_ms] = max(
                both.get((each.decoder, each.delay_ms), each), each, key=lambda point: point.tokens_per_s
            )
        return replace(other, points=list(both.values()))


async def measure(options: ClusterOptions, delays_ms: Sequence[float], rounds: int) -> Curves:
    """All decoders take turns at each prompt; another chain for each latency."""
    inputs = await InputProcessor.read(options)
    spec = inputs.spec
    prompts = [await inputs.prompt_ids(Conversation.of(prompt)) for prompt in PROMPTS]
    curves = Curves(machine_name(), spec.name)
    for delay_ms in delays_ms:
        taken = {name: Taken(len(prompts)) for name in DECODES}
        async with open_slow_chain(options, inputs.checkpoint, delay_ms / 1e3) as chain:
            curves.layers, hops_ms = chain.plan.layers, [await _hop_ms(chain)]
            for number, (at, ids) in product(range(rounds + 1), enumerate(prompts)):
                for name, decode in DECODES.items():
                    request = Request(ids, _MOST_TOKENS if number else _WARM_UP_TOKENS, decode=decode, eos=inputs.eos)
                    check_request(request, spec)
                    chain.costs = ChainCosts(chain.num_stages)
                    answer = await generate_once(chain, request)
                    if number:
                        taken[name].add(at, answer)
            hops_ms.append(await _hop_ms(chain))
        ar = taken["ar"].answers
        curves.points += [
            Point(
                name, delay_ms, min(hops_ms), found.tokens_per_s, found.num_tokens / found.num_steps,
                found.answers == ar,
            )
            for name, found in taken.items()
        ]  # fmt: skip
        rates = ", ".join(f"{found.tokens_per_s:.1f}" for found in taken.values())
        print(f"{delay_ms:g} ({min(hops_ms):.2f}) ms: {rates} tok/s", file=sys.stderr, flush=True)
    return curves


async def _hop_ms(chain: Chain) -> float:
    return (await chain.peers[0].measure_link()).rtt_ms / 2


class Taken:
    """What one decoder made of each prompt at one latency, when it was fastest: whatever comes between adds to that."""

    def __init__(self, num_prompts: int) -> None:
        self._seconds = [math.inf] * num_prompts
        self._steps = [0] * num_prompts
        self.answers: list[list[int]] = [[] for _ in range(num_prompts)]

    def add(self, number: int, answer: Answer) -> None:
        self._seconds[number] = min(self._seconds[number], answer.ttft_s + answer.decode_s)
        self._steps[number] = answer.usage.num_steps
        self.answers[number] = answer.tokens

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def num_steps(self) -> int:
        return sum(self._steps)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / sum(self._seconds)


def write_plot(curves: Curves, path: Path) -> None:
    """A line per decoder."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, color in zip(DECODES, _COLORS, strict=True):
        points = curves.of(name)
        label = name if name == "ar" else f"{name}: {points[0].tokens_per_step:.1f} tokens per step"
        axes.plot(
            [each.hop_ms for each in points], [each.tokens_per_s for each in points], "o-", color=color, label=label
        )
    axes.set(
        xlabel="latency of a hop, one way, as measured, ms; a step waits for two",
        ylabel="tokens per second",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.suptitle(f"{curves.model}, templated text, two nodes {curves.layers} on {curves.machine}", fontsize=9)
    figure.savefig(path, dpi=120)


def main(
    model: Annotated[str, typer.Option(help="As for `brigade generate`; it needs mask-trained weights.")] = "demo",
    rounds: Annotated[int, typer.Option(min=0, help="How often each prompt is answered; the fastest counts.")] = 3,
    earlier: Annotated[Path | None, typer.Option("--from", help="Begin with the numbers of this JSON file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture to this file.")] = None,
) -> None:
    """Measure, or read what was measured, and draw it."""
    if not rounds and earlier is None:
        raise InputError("rounds", "expected at least 1, or --from with what was measured")
    if plot is not None:
        check_plot(plot)
    known = load(Curves, earlier) if earlier is not None else Curves("", model)
    if rounds:
        options = cluster_options(None, model, 1)
        curves = known.faster(uvloop.run(measure(options, DELAYS_MS, rounds)))
    else:
        curves = known
    if json_file is not None:
        save(curves, json_file)
    if plot is not None:
        write_plot(curves, plot)


if __name__ == "__main__":
    run_command(main)
