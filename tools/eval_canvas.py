"""Measure block diffusion on three processes: the bundled model's answers and speed, and what a wide canvas sends.

python -m tools.eval_canvas --json docs/canvas.json --markdown docs/canvas.md

Answers come from `coordinator.engine.engine` over a delaying TCP proxy per worker, as in `tools.bench_hops`. `--from
FILE` lays out an earlier run's numbers again.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
import uvloop

from coordinator.bench.bench import OnChain
from coordinator.bench.results import BenchTrial, passage_ms
from coordinator.bench.simulate import Hop, Pipeline, SimulatedLoad, simulate
from coordinator.cluster.chain import Chain
from coordinator.cluster.open import open_chain, read_model
from coordinator.cluster.options import cluster_options
from coordinator.cluster.peer import Peer
from coordinator.decoding.decode_options import Decode, suit
from coordinator.engine.inputs import InputProcessor
from coordinator.planning.speeds import LinkSpeed
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Cache, Sampling
from tools.bench_hops import open_slow_chain
from tools.demo_data import mix
from tools.eval_windows import ask
from tools.figures import load, save, table
from tools.random_model import write_diffusion_gemma
from tools.windows_data import Score, Speed
from worker.errors import InputError
from worker.model.model_spec import ModelSpec
from worker.platform.machine import machine_name
from worker.platform.run import run_command

PARTS = ("answers", "wide")
DELAYS_MS = (0.0, 2.0, 20.0)
WINDOW = 16  # of `diffusion`
CANVAS, STEPS, PROMPT = 256, 4, 5  # of the wide row
_PROBES = 4  # of each link before each of its answers
TEXT: dict[str, Any] = {  # of the 26B model only the hidden size, by which rows are as long; all else is small
    "model_type": "diffusion_gemma_text", "vocab_size": 512, "hidden_size": 2816, "intermediate_size": 64,
    "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_global_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64, "sliding_window": 1024, "num_experts": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "top_k_experts": 1,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0,
}  # fmt: skip
ENDLESS = {"diffusion_stopping_config": {"stability_threshold": 1000}}  # every canvas takes all of its steps


@dataclass
class HopRow:
    """A hop of the wide row or the way back: bytes and milliseconds of a step's 256 rows, and as predicted."""

    name: str
    num_bytes: float
    ms: float
    predicted_bytes: int
    predicted_ms: float


@dataclass
class Wide:
    """What a canvas of the wide row takes, and what the simulation says from the same run's speeds."""

    hops: list[HopRow]
    canvas_ms: float
    predicted_ms: float


@dataclass
class Measured:
    """A whole run."""

    machine: str
    model: str
    length: int = 0  # of the canvases that the model was trained on
    num_timed: int = 0  # questions, of all kinds together, that were asked with every delay
    scores: list[Score] = field(default_factory=list)  # a row per decoder, over all kinds
    speeds: list[Speed] = field(default_factory=list)
    wide: Wide | None = None


async def measure_answers(measured: Measured, limit: int, timed: int) -> None:
    """Answer held-out questions by every decoder, greedily, and the first `timed` of each kind with every delay."""
    options = cluster_options(None, measured.model, 2)
    inputs = await InputProcessor.read(options)
    if inputs.spec.canvas is None:
        raise InputError("model", f"expected one that was trained on canvases, got {measured.model}")
    measured.length = inputs.spec.canvas.length
    decodes = {
        "ar": Decode("ar"), "diffusion": Decode("diffusion", WINDOW),
        "canvas, confidence": Decode("canvas", canvas_sampler="confidence"),
        "canvas, entropy": Decode("canvas", canvas_sampler="entropy"),
        "canvas of 16, confidence": Decode("canvas", canvas=16, canvas_sampler="confidence"),
    }  # fmt: skip
    scores = {name: Score("all", name, None, None) for name in decodes}
    speeds: list[Speed] = []
    for delay_ms in DELAYS_MS:
        now = {name: Speed("all", name, None, delay_ms) for name in decodes}
        async with open_slow_chain(options, inputs.checkpoint, delay_ms / 1e3) as chain:
            for kind in mix.MEASURED:
                for number, turn in enumerate(mix.held_out(kind, limit if not delay_ms else timed)):
                    expected: list[int] = []
                    for name, decode in decodes.items():
                        answer, has_it_right = await ask(chain, inputs, turn, decode)
                        expected = expected or answer.tokens
                        if number < timed:
                            now[name].add(len(answer.tokens), answer.ttft_s + answer.decode_s)
                        if not delay_ms:
                            scores[name].add(answer, expected, is_right=has_it_right)
                print(f"{delay_ms:g} ms: {kind}", file=sys.stderr, flush=True)
        speeds += now.values()
    measured.scores, measured.speeds = list(scores.values()), speeds
    measured.num_timed = timed * len(mix.MEASURED)


async def measure_wide(rounds: int) -> Wide:
    """Run canvases of wide rows over loopback, and measure the links before each of them."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        config = {"model_type": "diffusion_gemma", "text_config": TEXT, "canvas_length": CANVAS}
        write_diffusion_gemma(model, config, is_dense_quantised=False)
        (model / "generation_config.json").write_text(json.dumps(ENDLESS))
        options = cluster_options(None, str(model), 2, (1, 1, 1))
        checkpoint, spec = await read_model(options.model)
        decode = suit(Decode("canvas", canvas_steps=STEPS), Cache(), spec)
        request = Request(tuple(range(PROMPT)), 2 * CANVAS, Sampling(seed=1, temperature=0.8), decode)
        async with open_chain(replace(options, context=spec.context), checkpoint) as chain:
            system = OnChain("wide", chain)
            await system.run([replace(request, max_tokens=1)])  # compiles, and pages weights in
            links, trials = [], []
            for number in range(rounds):
                links += [await _links(chain.peers) for _ in range(_PROBES)]
                trials.append(await system.run([request]))
                print(f"wide rows: round {number + 1}/{rounds}", file=sys.stderr, flush=True)
            return _compared(spec, chain, [_fastest(column) for column in zip(*links, strict=True)], trials)


async def _links(peers: Sequence[Peer]) -> list[LinkSpeed]:
    """Measure the links to worker 1, from it to worker 2, and from there back."""
    first, last = peers
    replies = [await first.measure_link(), await first.measure_link(last), await last.measure_link()]
    return [LinkSpeed(reply.rtt_ms, reply.bytes_per_s) for reply in replies]


def _fastest(found: Sequence[LinkSpeed]) -> LinkSpeed:
    """Return the least round trip and the highest bandwidth."""
    return LinkSpeed(min(link.rtt_ms for link in found), max(link.bytes_per_s for link in found))


def _compared(spec: ModelSpec, chain: Chain, links: Sequence[LinkSpeed], trials: Sequence[BenchTrial]) -> Wide:
    """Compare with a simulation by the links, and by what each stage took on average for frames of as many rows."""
    sizes = [spec.row_bytes, spec.row_bytes, spec.soft_row_bytes]
    frames = sorted(_frames(trials).items())
    stages = tuple(
        tuple((rows, fmean(ms for ms, _ in taken[stage]) / 1e3) for rows, taken in frames)
        for stage in range(chain.num_stages)
    )
    hops = tuple(Hop(link.rtt_ms / 2e3, link.bytes_per_s, size) for link, size in zip(links, sizes, strict=True))
    load = SimulatedLoad((0.0,), PROMPT, 2 * CANVAS, canvas=(CANVAS, STEPS))
    [predicted] = simulate(Pipeline(stages, hops), load).token_times
    passages = [passage for trial in trials for passage in trial.passages]
    num_rows = sum(passage.num_rows for passage in passages)
    num_soft = len(trials) * 2 * (STEPS - 1) * CANVAS  # the last step of a canvas is followed by no other
    sent = [sum(trial.sent_bytes[stage] or 0 for trial in trials) for stage in range(chain.num_stages)]
    per_row = [sent[0] / num_rows, sent[1] / num_rows, sent[2] / num_soft]
    names = ("coordinator to worker 1", "worker 1 to worker 2", "back")
    hops_ms = zip(*(_hops_ms(trial) for trial in trials), strict=True)
    rows = [
        HopRow(name, CANVAS * each, min(ms for own in taken for ms in own), CANVAS * size, link.ms(CANVAS * size))
        for name, each, taken, size, link in zip(names, per_row, hops_ms, sizes, links, strict=True)
    ]
    return Wide(rows, 1e3 * fmean(_canvas_s(trial.token_times[0]) for trial in trials), 1e3 * _canvas_s(predicted))


def _frames(trials: Sequence[BenchTrial]) -> dict[int, list[list[tuple[float, float]]]]:
    """Return by rows of a frame and by stage the milliseconds of the stage, and of the hop after it, in each frame."""
    found: dict[int, list[list[tuple[float, float]]]] = {}
    for trial in trials:
        for passage in trial.passages:
            stages = found.setdefault(passage.num_rows, [[] for _ in passage.timings])
            for stage, taken in zip(stages, passage_ms(passage, trial.offsets), strict=True):
                stage.append(taken)
    return found


def _hops_ms(trial: BenchTrial) -> list[list[float]]:
    """Return by hop the milliseconds of each step but a canvas's first and last."""
    passages = [each for number, each in enumerate(trial.passages, 1) if each.num_rows == CANVAS and number % STEPS]
    each_ms = ([ms for _, ms in passage_ms(passage, trial.offsets)] for passage in passages)
    return [list(hop) for hop in zip(*each_ms, strict=True)]


def _canvas_s(token_times: Sequence[float]) -> float:
    """Return the seconds from the end of the first canvas to that of the second."""
    return token_times[-1] - token_times[0]


_PAGE = """\
# Block diffusion on three processes

Output of `{command}`

on {machine}.

## Answers

{model} answered {count} questions that training never saw, a quarter of each kind (arithmetic, code, facts, stories),
greedily, on a coordinator and two workers.
It was trained on canvases of {length} places, the default; shorter ones make fewer mistakes that no later step fixes.
Speeds are of {timed} questions, prompts included, with these ms added to each of a step's three hops.

{answers}
`diffusion` gives the tokens of `ar`; a canvas may not: its places are decided together, and stay.

## Wide rows

A random DiffusionGemma of hidden size 2,816, its experts in 4 bits and all else small, one layer per process; a canvas
of {places} takes {steps} steps. *Predicted*: by the simulation of `plan --simulate --canvas`, from the links as nodes
measure them and the stages' mean times in the same run. Of hops and links the fastest counts, since the machine was
busy; an error of the clocks moves time from one hop to the next.

{wide}"""
_COMMAND = "python -m tools.eval_canvas --json docs/canvas.json --markdown docs/canvas.md"


def to_markdown(measured: Measured) -> str:
    """Return the whole page."""
    speeds = {(each.decoder, each.delay_ms): each.tokens_per_s for each in measured.speeds}
    delays = " / ".join(f"{delay_ms:g}" for delay_ms in DELAYS_MS)
    header = (
        "decoder",
        "right",
        "tokens per step",
        "rows per token",
        "round trips per 100 tokens",
        f"tok/s, {delays} ms",
    )
    lines = [
        (
            f"`{score.decoder}`", f"{score.num_right}", f"{score.tokens_per_step:.2f}",
            f"{score.rows_per_token:.2f}", f"{score.round_trips:.1f}",
            " / ".join(f"{speeds[score.decoder, delay_ms]:.1f}" for delay_ms in DELAYS_MS),
        )
        for score in measured.scores
    ]  # fmt: skip
    assert measured.wide
    hops = measured.wide.hops
    rows = [(hop.name, f"{hop.num_bytes / 1e6:.2f}", *_with_error(hop.ms, hop.predicted_ms)) for hop in hops]
    sums = sum(hop.ms for hop in hops), sum(hop.predicted_ms for hop in hops)
    rows.append(("the three together", "", *_with_error(*sums)))
    rows.append(("a canvas", "", *_with_error(measured.wide.canvas_ms, measured.wide.predicted_ms)))
    return _PAGE.format(
        command=_COMMAND,
        machine=measured.machine,
        model="The bundled model" if measured.model == "demo" else measured.model,
        count=measured.scores[0].num_answers,
        timed=measured.num_timed,
        length=measured.length,
        answers=table(header, lines),
        places=CANVAS,
        steps=STEPS,
        wide=table(("", "MB per step", "ms", "predicted", "off by"), rows),
    )


def _with_error(ms: float, predicted_ms: float) -> tuple[str, str, str]:
    return f"{ms:.1f}", f"{predicted_ms:.1f}", f"{100 * (predicted_ms / ms - 1):+.1f} %"


def main(
    model: Annotated[str, typer.Option(help="As for `brigade generate`; the questions suit `demo`.")] = "demo",
    limit: Annotated[int, typer.Option(min=1, help="Questions per kind.")] = 12,
    timed: Annotated[int, typer.Option(min=1, help="Those of them that are asked with every delay, for speeds.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Of the wide rows.")] = 3,
    earlier: Annotated[Path | None, typer.Option("--from", help="Begin with the numbers of this JSON file.")] = None,
    part: Annotated[list[str] | None, typer.Option(help=f"With --from: measure only {', '.join(PARTS)}.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
) -> None:
    """Right answers, rows, round trips and speed of block diffusion, and the bytes and times of a wide canvas."""
    if unknown := set(part or ()) - set(PARTS):
        raise InputError("part", f"expected one of {', '.join(PARTS)}, got {unknown.pop()!r}")
    measured = load(Measured, earlier) if earlier is not None else Measured(machine_name(), model)
    parts = PARTS if earlier is None else part or ()
    if "wide" in parts:
        measured.wide = uvloop.run(measure_wide(rounds))
    if "answers" in parts:
        uvloop.run(measure_answers(measured, limit, min(limit, timed)))
    if json_file is not None:
        save(measured, json_file)
    if markdown is not None and measured.wide and measured.scores:
        markdown.write_text(to_markdown(measured), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
