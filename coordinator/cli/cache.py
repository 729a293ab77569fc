"""`brigade cache`: the parts of models that this machine has received from other nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coordinator.cli import flags
from worker.errors import BrigadeError, InputError
from worker.platform.run import App
from worker.platform.text import format_bytes

if TYPE_CHECKING:
    from worker.node.weights_cache import Kept

_SHORT = 8  # characters of a key that are shown

cache = App(no_args_is_help=True, help="Layers that this machine received as a worker, kept for the next load.")


@cache.command()
def ls(as_json: flags.JsonFlag = False) -> None:
    """List the kept models, the latest used first.

    brigade cache ls
    """
    from worker.node.weights_cache import WeightsCache

    weights = WeightsCache()
    kept = weights.kept()
    if as_json:
        print(json.dumps({"folder": str(weights.folder), "models": [_as_json(each) for each in kept]}))
        return
    console = Console(highlight=False)
    console.print(_table(kept) if kept else "nothing is kept")
    console.print(f"in {weights.folder}", soft_wrap=True)


@cache.command()
def rm(
    which: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="By name or key, as `brigade cache ls` shows them.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every model.")] = False,
    as_json: flags.JsonFlag = False,
) -> None:
    """Remove kept models. Those that a worker of this machine has loaded or receives stay: exit code 3.

    brigade cache rm Qwen/Qwen3-8B

    The last part of a name is enough if it is unique: brigade cache rm Qwen3-8B

    brigade cache rm --all
    """
    from worker.node.weights_cache import WeightsCache

    if bool(which) == every:
        raise InputError("", "expected models by name or key (`brigade cache ls` shows them), or --all")
    weights = WeightsCache()
    chosen = weights.kept() if every else _chosen(weights.kept(), which or [])
    removed = [each for each in chosen if weights.remove(each.key)]
    in_use = [each.name for each in chosen if each not in removed]
    if as_json:
        print(json.dumps({"removed": [_as_json(each) for each in removed], "in_use": in_use}))
    else:
        for each in removed:
            print(f"removed {_layers(each.places)} of {each.name}, {format_bytes(each.nbytes)}")
    if in_use:
        names = ", ".join(in_use)
        raise BrigadeError(
            f"{names}: in use by a worker of this machine, so it stays. End that worker (Ctrl-C, or `brigade launch "
            "--stop NAME` from where it was launched), then remove it again"
        )


def _as_json(kept: Kept) -> dict[str, Any]:
    return {
        "key": kept.key,
        "model": kept.name,
        "layers": [place for place in kept.places if place >= 0],
        "bytes": kept.nbytes,
        "used": kept.used,
        "in_use": kept.is_used,
    }


def _chosen(kept: Sequence[Kept], names: Sequence[str]) -> list[Kept]:
    """Return the models of these names, each once. Raises InputError for a name of none, or of several.

    A name is a model's, with or without its revision, the first four or more characters of its key, or the last part of
    its name: the name of a model from a folder is its whole path.
    """
    chosen: dict[str, Kept] = {}
    for name in names:
        plain = {each.key: each.name.partition("@")[0] for each in kept}
        found = [
            each
            for each in kept
            if name in (each.name, plain[each.key]) or (len(name) >= 4 and each.key.startswith(name))
        ]
        if not found:
            found = [each for each in kept if plain[each.key].rstrip("/").rpartition("/")[2] == name]
            if len({each.name for each in found}) > 1:
                raise InputError("", f"{name!r} may be any of: {', '.join(each.name for each in found)}")
        if not found:
            has = ", ".join(each.name for each in kept)
            raise InputError("", f"nothing is kept of {name!r}, only of: {has}" if kept else "nothing is kept")
        chosen |= {each.key: each for each in found}
    return list(chosen.values())


def _table(kept: Sequence[Kept]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("key", "model", "layers"):
        table.add_column(column, overflow="fold")
    for column in ("size", "used"):
        table.add_column(column, justify="right")
    for each in kept:
        used = "now" if each.is_used else _ago(time.time() - each.used)
        table.add_row(each.key[:_SHORT], each.name, _layers(each.places), format_bytes(each.nbytes), used)
    return table


def _layers(places: Sequence[int]) -> str:
    """Return places as runs, such as "0-11, 13, head"."""
    from worker.model.describe import BACK, FRONT

    runs: list[list[int]] = []
    for place in sorted(place for place in places if place >= 0):
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    names = {FRONT: "embedding", BACK: "head"}
    return ", ".join([*words, *(name for place, name in names.items() if place in places)]) or "none whole"


def _ago(passed_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed_s >= length_s:
            return f"{passed_s / length_s:.0f} {unit} ago"
    return "just now"
