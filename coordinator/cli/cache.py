"""`brigade cache`: the parts of models that this machine has received, and the prefixes on all nodes' disks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from coordinator.cli import flags
from coordinator.cli.flags import find_config
from coordinator.cli.run import run_async
from coordinator.cluster.options import cluster_options
from coordinator.cluster.progress import say
from coordinator.cluster.tables import fitting, plain_console
from protos.brigade_pb2 import PrefixesReply, PrefixesRequest
from worker.errors import BrigadeError, InputError
from worker.platform.run import App
from worker.platform.text import ago, format_bytes

if TYPE_CHECKING:
    from coordinator.cluster.peer import Peer
    from worker.node.weights_cache import Kept

_SHORT = 8  # characters of a key that are shown

cache = App(no_args_is_help=True, help="What is kept on disk: received layers, and what prompts left in the caches.")

Kind = Annotated[
    Literal["weights", "prompts"],
    typer.Option(
        help="`weights`: layers that this machine received as a worker. `prompts`: what `cache_disk` keeps on this "
        "machine and on the workers of the configuration."
    ),
]


@cache.command()
def ls(kind: Kind = "weights", config: flags.Config = None, as_json: flags.JsonFlag = False) -> None:
    """List the kept models, the latest used first, or how much each node keeps of prompts.

    brigade cache ls

    brigade cache ls --kind prompts
    """
    if kind == "prompts":
        run_async(_show_prompts(config, as_json=as_json, remove=False))
        return
    _refuse_config(config)

    from worker.node.weights_cache import WeightsCache

    weights = WeightsCache()
    kept = weights.kept()
    if as_json:
        flags.print_json({"folder": str(weights.folder), "models": [_as_json(each) for each in kept]})
        return
    console = plain_console()
    console.print(_table(kept) if kept else "nothing is kept")
    console.print(f"in {weights.folder}", soft_wrap=True)


@cache.command()
def rm(
    which: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="By name or key, as `brigade cache ls` shows them.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every model, or all prompts on all nodes.")] = False,
    kind: Kind = "weights",
    config: flags.Config = None,
    as_json: flags.JsonFlag = False,
) -> None:
    """Remove kept models, or all prompts. What a worker here uses, or another user owns, stays: exit code 3.

    brigade cache rm Qwen/Qwen3-8B

    The last part of a name is enough if it is unique: brigade cache rm Qwen3-8B

    brigade cache rm --all

    brigade cache rm --kind prompts --all
    """
    if kind == "prompts":
        if which or not every:
            raise InputError("", "expected --all and no names: prompts are kept without anything that tells them apart")
        run_async(_show_prompts(config, as_json=as_json, remove=True))
        return
    _refuse_config(config)

    from worker.node.weights_cache import WeightsCache

    if bool(which) == every:
        raise InputError("", "expected models by name or key (`brigade cache ls` shows them), or --all")
    weights = WeightsCache()
    chosen = weights.kept() if every else _chosen(weights.kept(), which or [])
    removed = [each for each in chosen if weights.remove(each.key)]
    left = [each for each in chosen if each not in removed]
    if as_json:
        names = [each.name for each in left]
        flags.print_json({"removed": [_as_json(each) for each in removed], "in_use": names})
    else:
        for each in removed:
            print(f"removed {_layers(each.places)} of {each.name}, {format_bytes(each.nbytes)}")
    if left:
        used = {each.key for each in weights.kept() if each.is_used}
        reasons = []
        if in_use := ", ".join(each.name for each in left if each.key in used):
            reasons.append(
                f"{in_use}: what a worker of this machine uses stays. End that worker (Ctrl-C, or `brigade launch "
                "--stop NAME` from where it was launched), then remove it again"
            )
        reasons += [
            f"{each.name}: expected files of yours, found some that another user owns (of a worker that was run with "
            f"sudo?); remove them as that user: {weights.folder / each.key}"
            for each in left
            if each.key not in used
        ]
        raise BrigadeError("\n".join(reasons))


def _refuse_config(config: Path | None) -> None:
    """Raise InputError: received layers are those of this machine."""
    if config is not None:
        raise InputError("config", "expected only with --kind prompts: received layers are those of this machine")


async def _show_prompts(config: Path | None, *, as_json: bool, remove: bool) -> None:
    """Print what each node keeps of prompts, after removing it if asked to. Raises the error of a silent worker."""
    from coordinator.cluster.peer import peers_of, raise_worst
    from worker.node.network import Network
    from worker.node.prefix_store import list_prefixes

    request = PrefixesRequest(remove=remove)
    cluster = cluster_options(find_config(config)).cluster
    found: dict[str, PrefixesReply | BaseException] = {cluster.coordinator.name: list_prefixes(request)}
    if cluster.workers:
        network = Network.of(cluster, warn=lambda line: say(f"warning: {line}"))
        async with peers_of(cluster, network) as peers:
            replies = await asyncio.gather(*(_prefixes_of(peer, request) for peer in peers), return_exceptions=True)
        found |= {peer.name: reply for peer, reply in zip(peers, replies, strict=True)}
    replied = {name: reply for name, reply in found.items() if isinstance(reply, PrefixesReply)}
    counts = {name: len({piece.name for piece in reply.pieces}) for name, reply in replied.items()}  # of several files
    if as_json:
        rows = [
            {
                "node": name,
                "pieces": counts[name],
                "bytes": reply.bytes,
                "used": reply.used or None,
            }
            for name, reply in replied.items()
        ]
        flags.print_json({"removed" if remove else "nodes": rows})
    else:
        cells = []
        for name, reply in replied.items():
            used = ago(time.time() - reply.used) if reply.pieces else "–"
            cells.append([name, str(counts[name]), format_bytes(reply.bytes), used])
        console = plain_console()
        if remove:
            console.print("removed:")
        console.print(fitting(("node", "pieces", "size", "used"), cells, console.width))
    raise_worst([reply for reply in found.values() if isinstance(reply, BaseException)])


async def _prefixes_of(peer: Peer, request: PrefixesRequest) -> PrefixesReply:
    await peer.hello()  # finds the address at which it answers
    return await peer.prefixes(request)


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
        found = [each for each in kept if name in (each.key, each.name, plain[each.key])]
        if not found:
            by_key = [each for each in kept if len(name) >= 4 and each.key.startswith(name)]
            found = by_key or [each for each in kept if plain[each.key].rstrip("/").rpartition("/")[2] == name]
            if len(by_key) > 1 or len({each.name for each in found}) > 1:
                raise InputError("", f"{name!r} may be any of: {', '.join(f'{e.name} ({e.key})' for e in found)}")
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
        used = "now" if each.is_used else ago(time.time() - each.used)
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
