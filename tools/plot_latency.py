"""Tokens per second against the latency of a hop, measured: `ar`, and windows of the bundled model.

python -m tools.plot_latency --json docs/latency.json --plot docs/latency.png

Two nodes on this machine, a proxy between them that holds each piece back for so long, either way (tools/bench_hops.py
says what of it a step waits for: twice that). As timers are coarse, what a hop takes then is measured. Whatever else
runs on the machine only makes it slower: the fastest answer to each prompt counts, and with `--from FILE` each point of
an earlier run that was faster. `--rounds 0` only draws that. Needs matplotlib (the extra `plot`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from coordinator.bench.report import check_plot
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.engine.inputs import InputProcessor
from tools.bench_hops import measure as measure_hops
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
    """Return the points of all decoders, each latency on another chain."""
    inputs = await InputProcessor.read(options)
    curves = Curves(machine_name(), inputs.spec.name)
    for delay_ms in delays_ms:
        found = await measure_hops(options, inputs, DECODES, delay_ms, rounds=rounds)
        curves.layers, ar = found.layers, found.taken["ar"]
        curves.points += [
            Point(
                name, delay_ms, found.hop_ms, taken.tokens_per_s, taken.num_tokens / taken.num_steps,
                taken.answers == ar.answers,
            )
            for name, taken in found.taken.items()
        ]  # fmt: skip
    return curves


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
