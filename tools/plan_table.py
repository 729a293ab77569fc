"""What fits where: the planner's answer for large models on sets of Macs, as the table of docs/fits.md.

python -m tools.plan_table [MODEL ...] [--context 16384]

Each model is a file of tools/published: its maker's configuration, and where that was found. Its tensors are those that
mlx_lm.convert would write in 4 bits (tools/sparse_model.py); files of holes stand for them, so nothing is downloaded.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from coordinator.planning.plan import Node, Objective, Plan
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from tools.figures import table
from tools.sparse_model import PUBLISHED, write_sparse
from worker.errors import BrigadeError, InputError
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.model.model_spec import ModelSpec
from worker.platform.machine import budget_from
from worker.platform.run import run_command
from worker.platform.text import format_bytes

_RECOMMENDED = 0.75  # of a Mac's memory: what Metal says at least; newer systems say up to 0.93
_SETS = {  # GiB of memory per Mac; the first is the coordinator
    "two MacBook Pro 64 GB": (64, 64),
    "Mac Studio 256 GB, MacBook Pro 128 GB": (256, 128),
    "four Mac Studio 512 GB": (512, 512, 512, 512),
}


def main(
    models: Annotated[list[str] | None, typer.Argument(help="Files of tools/published, without .json; all.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of one session that memory is kept for.")] = 16384,
) -> None:
    """Print the table as Markdown."""
    known = sorted(path.stem for path in PUBLISHED.glob("*.json"))
    for name in set(models or ()) - set(known):
        raise InputError("models", f"expected one of {', '.join(known)}, got {name!r}")
    specs = [spec for spec in map(_read, models or known) if spec]
    lines = [_line(spec, context) for spec in sorted(specs, key=_nbytes)]
    print(table(("model", "GB", "layers", *_SETS), lines, 1), end="")


def nodes_of(gigabytes: tuple[int, ...]) -> list[Node]:
    """Macs with so much memory each, and the budgets that a worker on each would report at least."""
    return [
        Node(f"mac{number}", budget_from({"max_recommended_working_set_size": int(_RECOMMENDED * size * 2**30)}, 0))
        for number, size in enumerate(gigabytes, 1)
    ]


def cell(found: Plan) -> str:
    """The split by layers, or what is missing."""
    if found.fits:
        return "+".join(map(str, found.layers))
    return f"lacks {format_bytes(sum(assignment.missing_bytes for assignment in found.assignments))}"


def _read(name: str) -> ModelSpec | None:
    """None, and a line on standard error, for a model that Brigade refuses."""
    published = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    config = published["config"]
    bits = None if "quantization_config" in config else 4  # else its maker has done it
    with TemporaryDirectory() as parent:
        folder = Path(parent, name)
        write_sparse(folder, config, bits)
        try:
            return describe(open_folder(folder, name))
        except BrigadeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return None


def _nbytes(spec: ModelSpec) -> int:
    return spec.shard_bytes(0, spec.num_layers)


def _line(spec: ModelSpec, context: int) -> tuple[str, ...]:
    plans = [plan(spec, nodes_of(sizes), NO_SPEEDS, Objective(min(context, spec.context))) for sizes in _SETS.values()]
    return spec.name, f"{_nbytes(spec) / 1e9:.0f}", str(spec.num_layers), *map(cell, plans)


if __name__ == "__main__":
    run_command(main)
