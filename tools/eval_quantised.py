"""What quantising costs in quality and saves in bytes: copies of a model with other bits, by one table.

python -m tools.eval_quantised [--model demo] [--calibration FILE] [--work FOLDER]

Bytes, tokens per second of one request, right answers to the built-in questions with Wilson's interval, tokens per
step of `diffusion`, loss on a text, and how many drafts of a window of 8 hold there.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS

from coordinator.quality.accuracy import wilson
from coordinator.quality.questions import BUILT_IN
from coordinator.quality.sensitivity import MeasuredModel, read_text
from tools.figures import table
from worker.model.describe import describe
from worker.node.loading import open_checkpoint
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.text import format_bytes

_HEADS = ("weights", "bytes", "tok/s", "right", "of", "95 %", "tokens per step", "loss", "drafts held")
_PROMPT = ("generate", "Write a Python function that adds 9 to a number.", "--ignore-eos", "--decode", "ar")


def main(
    model: Annotated[str, typer.Option(help="As for `brigade generate`.")] = "demo",
    calibration: Annotated[Path | None, typer.Option(help="The text; default: the one of `quantize`.")] = None,
    target: Annotated[float, typer.Option(help="Bits per weight of the copy with mixed bits.")] = 5.5,
    limit: Annotated[int, typer.Option(min=1, help="Questions of each set.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Of the speed.")] = 3,
    work: Annotated[Path | None, typer.Option(help="Keep the copies in this folder.")] = None,
) -> None:
    """Quantise a model in several ways and compare the copies."""
    text = ("--calibration", str(calibration)) if calibration else ()
    ways: dict[str, tuple[str, ...]] = {
        "8 bits": ("--q-bits", "8"),
        "4 bits, 8 where it suffers": ("--recipe", "sensitivity", "--target-bpw", str(target), *text),
        "4 bits, embedding kept": ("--keep", "embed_tokens,lm_head"),
        "4 bits": (),
        "4 bits, gptq": ("--method", "gptq", *text),
        "4 bits, 8 where gradients say so": ("--method", "dynamic", "--target-bpw", str(target), *text),
    }
    if open_checkpoint(model).config["model_type"] in AWQ_MODEL_CONFIGS:
        ways["4 bits, awq"] = ("--method", "awq", *text)
    with tempfile.TemporaryDirectory() as place:
        folder = work or Path(place)
        models = {"as published": model} | {name: str(folder / f"copy-{n}") for n, name in enumerate(ways)}
        for name, flags in ways.items():
            _brigade("quantize", model, models[name], *flags)
        speeds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds):  # in turns, since the machine's speed changes
            for name, each in models.items():
                found = json.loads(_brigade(*_PROMPT, "-m", "64", "--local", "0", "--model", each, "--json"))
                speeds[name].append(found["stats"]["tokens_per_s"])
        print(f"{model} on {machine_name()}\n")
        medians = {name: statistics.median(each) for name, each in speeds.items()}
        lines = [(name, *_row(each, calibration, limit, medians[name])) for name, each in models.items()]
        print(table(_HEADS, lines, 1), end="")


def _row(model: str, calibration: Path | None, limit: int, speed: float) -> list[str]:
    checkpoint = open_checkpoint(model)
    sets = [flag for name in BUILT_IN for flag in ("--questions", name)]
    kinds = "ar" if describe(checkpoint).mask_token is None else "ar,diffusion"
    flags = ("--decode", kinds, "--limit", str(limit), "-m", "200", "--local", "0", "--model", model, "--json")
    rows: list[dict[str, Any]] = json.loads(_brigade("eval", *sets, *flags))["rows"]
    by_ar = [row for row in rows if row["decoder"] == "ar"]
    num_right, num = (sum(row[name] for row in by_ar) for name in ("num_right", "num"))
    per_step = [row["tokens_per_step"] for row in rows if row["decoder"] == "diffusion"]
    low, high = wilson(num_right, num)
    nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    measured = MeasuredModel(checkpoint, read_text(calibration)).measure()
    return [
        format_bytes(nbytes), f"{speed:.1f}", str(num_right), str(num),
        f"{low:.0%} to {high:.0%}", f"{statistics.mean(per_step):.2f}" if per_step else "-", f"{measured.loss:.4f}",
        "-" if measured.drafts is None else f"{measured.drafts:.2f}",
    ]  # fmt: skip


def _brigade(*arguments: str) -> str:
    command = [sys.executable, "-m", "coordinator", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    run_command(main)
