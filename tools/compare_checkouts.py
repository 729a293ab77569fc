"""Two checkouts of this code in one run, on one machine, in turns: is the new one slower than the old one?

python -m tools.compare_checkouts OLD NEW [--rounds 5] [--minutes 10] [-- -m coordinator bench --json ...]

Each runs `python` with the arguments after `--` in its own folder and prints one JSON object at the end. Prints the
median of every figure that has to do with speed, and new against old: of the medians, and over the rounds.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from tools.figures import table
from worker.errors import BrigadeError, InputError
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_DEFAULT = "-m coordinator bench --local 1 --concurrency 1,8 -p 64 -g 48 -n 1 --json"
_FIGURES = r"(^|\.)(tokens_per_s(_per_request)?|prompt_tokens_per_s|ttft_p50_s|gap_p50_ms|overhead_\w+|\w*ratio\w*)$"
_SHOWN = 5  # lines of what a command that failed said

Figures = dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """One figure: its median by checkout, and new against old over the rounds."""

    name: str
    old: float
    new: float
    ratios: list[float]  # by round; none where the old one is 0

    @property
    def ratio(self) -> float | None:
        return self.new / self.old if self.old else None


def main(
    old: Annotated[Path, typer.Argument(help="The checkout to compare with.")],
    new: Annotated[Path, typer.Argument(help="The checkout to judge.")],
    command: Annotated[list[str] | None, typer.Argument(help=f"After `--`. (default: {_DEFAULT})")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, in turns; medians count.")] = 5,
    minutes: Annotated[float, typer.Option(min=0.01, help="For all of it; then what is there is printed.")] = 10.0,
    figures: Annotated[str, typer.Option(help="Which figures to show: a regular expression.")] = _FIGURES,
) -> None:
    """Medians and ratios of two checkouts, measured in turns."""
    for folder in (old, new):
        if not folder.is_dir():
            raise InputError("", f"expected a checkout's folder, found none at {folder}")
    arguments = command or _DEFAULT.split()
    taken = list(in_turns(old, new, arguments, rounds, time.monotonic() + 60 * minutes))
    if not taken:
        raise InputError("minutes", f"expected enough for a run of each checkout, {minutes:g} were too few")
    found = compare(taken, figures)
    if not found:
        raise InputError("figures", f"expected to find some in what python {' '.join(arguments)} prints, found none")
    _print(found, len(taken), arguments)


def in_turns(
    old: Path, new: Path, arguments: Sequence[str], rounds: int, deadline: float
) -> Iterator[tuple[Figures, Figures]]:
    """The figures of old and new, round by round, until the time is up. Who begins changes with every round."""
    for number in range(rounds):
        found: dict[int, Figures] = {}  # of the old one, 0, and the new one, 1: both may be the same folder
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            folder = (old, new)[place]
            print(f"round {number + 1} of {rounds}: {folder}", file=sys.stderr, flush=True)
            figures = run_in(folder, arguments, deadline - time.monotonic())
            if figures is None:
                return
            found[place] = figures
        yield found[0], found[1]


def run_in(folder: Path, arguments: Sequence[str], seconds: float) -> Figures | None:
    """What the command prints there; None if it is not done in time, when it and all that it started are ended.

    Raises:
        BrigadeError: it failed, or printed no JSON object.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else the command stays
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,  # python -m imports from here first
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its workers notice, and end too
            process.communicate()
        signal.signal(signal.SIGTERM, before)
    if process.returncode:
        said = "\n".join(err.splitlines()[-_SHOWN:])
        raise BrigadeError(f"{folder}: python {' '.join(arguments)} ended with {process.returncode}:\n{said}")
    try:
        return dict(flat(json.loads(out.strip().rpartition("\n")[2])))
    except json.JSONDecodeError:
        raise BrigadeError(f"{folder}: expected a JSON object as the last line, found {out[-80:]!r}") from None


def flat(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number in the object by its path; rows of a bench by what they are of rather than by their place."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from flat(part, _name(part) or f"{path}[{number}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def compare(rounds: Sequence[tuple[Figures, Figures]], figures: str) -> list[Comparison]:
    """Those figures that both checkouts printed in every round, in the order of the new one."""
    names = [name for name in rounds[0][1] if all(name in old and name in new for old, new in rounds)]
    return [
        Comparison(
            name,
            median(old[name] for old, _ in rounds),
            median(new[name] for _, new in rounds),
            [new[name] / old[name] for old, new in rounds if old[name]],
        )
        for name in names
        if re.search(figures, name)
    ]


def _name(part: Any) -> str:
    if not isinstance(part, dict) or not {"system", "decode", "concurrency"} <= part.keys():
        return ""
    layers = ",".join(map(str, part["layers"])) if part.get("layers") and part["system"] == "cluster" else ""
    return " ".join(filter(None, [part["system"], layers, part["decode"], f"{part['concurrency']} at once"]))


def _print(found: Sequence[Comparison], num_rounds: int, arguments: Sequence[str]) -> None:
    lines = []
    for each in found:
        ratios = [each.ratio, *([min(each.ratios), max(each.ratios)] if each.ratios else [None, None])]
        cells = ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        lines.append((each.name, f"{each.old:.4g}", f"{each.new:.4g}", *cells))
    print(f"python {' '.join(arguments)}, rounds: {num_rounds}, on {machine_name()}\n")
    print(table(("figure", "old", "new", "new / old", "least", "most"), lines, 1), end="")


if __name__ == "__main__":
    run_command(main)
