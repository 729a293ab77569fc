"""`brigade cache`: what this machine keeps of models that other nodes have sent it."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli import flags
from worker.errors import BrigadeError, InputError
from worker.process.app import App

if TYPE_CHECKING:
    from rich.table import Table

    from worker.store.store import Kept, Store

_SHORT = 8  # characters of a key, which usually tell it apart

cache = App(no_args_is_help=True, help="Layers that this machine was sent as a worker, kept for the next load.")

Which = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help="By name or key, as `brigade cache ls` shows them.")
]
Every = Annotated[bool, typer.Option("--all", help="Every model.")]


@cache.command()
def ls(as_json: flags.Json = False) -> None:
    """What is kept of which model, the latest used first.

    brigade cache ls
    """
    from worker.store.store import Store

    store = Store()
    kept = store.kept()
    if as_json:
        print(json.dumps(listing(store.folder, kept)))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(kept) if kept else "nothing is kept")
    console.print(f"in {store.folder}", soft_wrap=True)


@cache.command()
def rm(which: Which = None, every: Every = False, as_json: flags.Json = False) -> None:
    """Remove what is kept of some models. What a worker of this machine has loaded, or receives, stays: exit code 3.

    brigade cache rm Qwen/Qwen3-8B

    The last part of a name will do where only one has it: brigade cache rm Qwen3-8B

    brigade cache rm --all
    """
    from worker.store.store import Store

    if bool(which) == every:
        raise InputError("", "expected models by name or key (`brigade cache ls` shows them), or --all")
    store = Store()
    chosen = store.kept() if every else _chosen(store, which or [])
    removed = [each for each in chosen if store.remove(each.key)]
    in_use = [each.name for each in chosen if each not in removed]
    if as_json:
        print(json.dumps(removal(removed, in_use)))
    else:
        for each in removed:
            print(f"removed {_layers(each.places)} of {each.name}, {_size(each.nbytes)}")
    if in_use:
        names = ", ".join(in_use)
        raise BrigadeError(
            f"{names}: in use by a worker of this machine, so it stays. End that worker (Ctrl-C, or `brigade launch "
            "--stop NAME` from where it was launched), then remove it again"
        )


def _chosen(store: "Store", names: Sequence[str]) -> "list[Kept]":
    """Raises InputError for a name that nothing has, or for the last part of several."""
    kept = store.kept()
    found = {name: [each for each in kept if _is_called(each, name)] or _called_last(kept, name) for name in names}
    for name, matching in found.items():
        if not matching:
            has = ", ".join(each.name for each in kept) or "nothing"
            raise InputError("", f"nothing is kept of {name!r}, only of: {has}" if kept else "nothing is kept")
    return list({each.key: each for matching in found.values() for each in matching}.values())


def _is_called(kept: "Kept", name: str) -> bool:
    return name == kept.name or name == kept.name.partition("@")[0] or (len(name) >= 4 and kept.key.startswith(name))


def _called_last(kept: "Sequence[Kept]", name: str) -> "list[Kept]":
    """Those whose name ends in this: a model that was a folder there has its whole path for a name."""
    found = [each for each in kept if each.name.partition("@")[0].rstrip("/").rpartition("/")[2] == name]
    if len({each.name for each in found}) > 1:
        raise InputError("", f"{name!r} may be any of: {', '.join(each.name for each in found)}")
    return found


def _table(kept: "Sequence[Kept]") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("key", "model", "layers"):
        table.add_column(column, overflow="fold")
    for column in ("size", "used"):
        table.add_column(column, justify="right")
    for each in kept:
        used = "now" if each.is_used else _ago(time.time() - each.used)
        table.add_row(each.key[:_SHORT], each.name, _layers(each.places), _size(each.nbytes), used)
    return table


def listing(folder: Path, kept: "Sequence[Kept]") -> dict[str, Any]:
    return {"folder": str(folder), "models": [_plain(each) for each in kept]}


def removal(removed: "Sequence[Kept]", in_use: Sequence[str]) -> dict[str, Any]:
    return {"removed": [_plain(each) for each in removed], "in_use": list(in_use)}


def _plain(kept: "Kept") -> dict[str, Any]:
    return {
        "key": kept.key,
        "model": kept.name,
        "layers": [place for place in kept.places if place >= 0],
        "bytes": kept.nbytes,
        "used": kept.used,
        "in_use": kept.is_used,
    }


def _layers(places: Sequence[int]) -> str:
    """0-11, 13, head: as few words as there are runs."""
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


def _size(nbytes: int) -> str:
    from worker.process.sizes import format_bytes

    return format_bytes(nbytes)


def _ago(passed_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed_s >= length_s:
            return f"{passed_s / length_s:.0f} {unit} ago"
    return "just now"
