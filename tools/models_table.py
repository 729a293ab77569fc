"""Which model types can be cut, and what of caches, lanes and quantisations each may have: the table of docs/models.md.

python -m tools.models_table --json docs/models.json --markdown docs/models.md

Some types only: `python -m tools.models_table llama gpt_oss`. Another version of mlx-lm: run it with `--json FILE` in
an environment of its own, then `--compare FILE` here. `--from FILE` lays out what an earlier run found.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import typer

from tools.figures import load, save
from tools.model_types.configs import all_types
from tools.model_types.matrix import best_lanes, bf16, int8_of, look_at, quantisations, rotating_of
from tools.model_types.report import Survey, differences, to_markdown
from tools.model_types.row import MISSING, Row
from tools.model_types.stand_ins import stand_ins
from worker.errors import InputError
from worker.platform.machine import machine_name
from worker.platform.run import run_command

Types = Annotated[list[str] | None, typer.Argument(help="Model types; all if none is given.")]


def main(
    types: Types = None,
    json: Annotated[Path | None, typer.Option(help="Save the rows.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the page.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Lay out rows that were saved.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Say what differs from rows that were saved.")] = None,
) -> None:
    """Try every model type of the installed mlx-lm."""
    if unknown := sorted(set(types or ()) - set(all_types())):
        raise InputError("", f"{unknown[0]} is no model type of this mlx-lm; one of them is {all_types()[0]}")
    survey = load(Survey, source) if source else Survey(machine_name(), _versions(), _rows(types or all_types()))
    if json:
        save(survey, json)
    if markdown:
        markdown.write_text(to_markdown(survey), encoding="utf-8")
    if compare:
        print(differences(survey, load(Survey, compare)))
    elif not markdown:
        print(to_markdown(survey))


def _rows(types: list[str]) -> list[Row]:
    """A row per type, found in a process of its own: another mlx-lm may have code that ends a process."""
    rows = []
    pool = _process()
    for number, name in enumerate(types, 1):
        print(f"\r\x1b[K{number} of {len(types)}: {name}", end="", file=sys.stderr, flush=True)
        try:
            rows.append(pool.submit(row_of, name).result())
        except BrokenProcessPool:
            rows.append(Row(name, f"{MISSING}it ends its process"))
            pool = _process()
    pool.shutdown()
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return rows


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def row_of(name: str) -> Row:
    """All that is found of a type."""
    with stand_ins():
        row = look_at(name)
        if row.is_cut:
            row.bf16, row.int8, row.rotating = bf16(name), int8_of(name), rotating_of(name)
            if (best := best_lanes(name)) != row.lanes:
                row.lanes += f" ({best} would do)"
        row.quantised = quantisations(name)
    return row


def _versions() -> dict[str, str]:
    found = {"device": mx.default_device().type.name}
    for package in ("mlx-lm", "mlx", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


if __name__ == "__main__":
    run_command(main)
