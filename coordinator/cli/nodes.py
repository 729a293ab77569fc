"""`brigade nodes`: who announces itself in the networks of this machine, and how each is reached."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli import flags
from worker.config import Cluster, load_cluster

if TYPE_CHECKING:
    from rich.console import Group

    from coordinator.finding.present import Present

LISTENS_S = 2.0

Timeout = Annotated[
    float, typer.Option(metavar="S", min=0.1, max=60, help="How long to listen for announcements, seconds.")
]


def nodes(config: flags.Config = None, timeout: Timeout = LISTENS_S, as_json: flags.Json = False) -> None:
    """Who is there: the workers that announce themselves, and how each is reached.

    With --config also which of them the configuration has, and which of its workers were not heard.

    An announcement is a hint. A worker is used only if cluster.yaml names it, and over an encrypted link only if its
    certificate is of the cluster's own authority.
    """
    cluster = load_cluster(config) if config else None

    from coordinator.cli.run_async import run_async

    run_async(_show(cluster, config, timeout, as_json=as_json))


async def _show(cluster: Cluster | None, config: Path | None, timeout_s: float, *, as_json: bool) -> None:
    from rich.console import Console

    from coordinator.finding.look import look_around
    from coordinator.finding.present import nodes_json

    found, num_ignored = await look_around(timeout_s, cluster)
    if as_json:
        print(json.dumps(nodes_json(found, num_ignored=num_ignored)))
        return
    if found:
        console = Console(highlight=False)
        console.print(node_table(found, config.name if config else "", console.width))
    for line in remarks(found, num_ignored, timeout_s):
        print(line, file=sys.stderr)


def node_table(found: "Sequence[Present]", file: str, width: int) -> "Group":
    """A row per address; `file` is what the configuration is called, if there is one."""
    from coordinator.cluster.tables import fitting

    heads = ["node", "version", "address", "reached by", "certificate", *([f"in {file}"] if file else [])]
    rows = []
    for node in found:
        certificate = node.fingerprint[:16] if node.fingerprint else "none" if node.is_announced else "–"
        for i, way in enumerate(node.ways):
            of_node = [node.name, node.version or "not heard"] if i == 0 else ["", ""]
            last = [certificate, *([_standing(node)] if file else [])] if i == 0 else [""] * (1 + bool(file))
            rows.append([*of_node, way.address, way.link or "–", *last])
    return fitting(heads, rows, width, num_left=len(heads))


def remarks(found: "Sequence[Present]", num_ignored: int, timeout_s: float) -> list[str]:
    """What a table cannot say."""
    said = []
    names = [node.name for node in found if node.is_announced]
    if not names:
        said.append(
            f"no worker announced itself within {timeout_s:g} s. On the others: brigade worker --bind 0.0.0.0:50070 "
            "--name NAME --keys keys. If macOS asks whether it may find devices on the local network, allow it"
        )
    said += [
        f"{names.count(name)} workers call themselves {name}" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    if num_ignored:
        said.append(f"{num_ignored} announcements were left out: incomplete, too many, or none that a worker makes")
    return said


def _standing(node: "Present") -> str:
    if not node.is_configured:
        return "no"
    return "at another address" if node.is_elsewhere else "yes"
