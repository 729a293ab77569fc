"""`brigade nodes` and `brigade init`: the workers that announce themselves, and a cluster.yaml of them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from coordinator.cli import flags
from coordinator.cli.flags import find_config
from coordinator.cli.run import run_async
from coordinator.cluster.progress import say
from coordinator.cluster.tables import fitting, plain_console
from worker.config import CONFIG, KEYS_FOLDER, CoordinatorConfig, load_cluster
from worker.errors import InputError, StageLost
from worker.model.repository import require_model
from worker.platform.text import counted

if TYPE_CHECKING:
    from coordinator.deploy.cluster_file import Draft
    from coordinator.deploy.discovery import FoundNode
    from worker.node.network import Network

LISTENS_S = 2.0

Timeout = Annotated[
    float, typer.Option(metavar="S", min=0.1, max=60, help="How long to listen for announcements, seconds.")
]


async def nodes(
    config: flags.Config = None,
    timeout: Timeout = LISTENS_S,  # noqa: ASYNC109 - a flag
    as_json: flags.JsonFlag = False,
) -> None:
    """List the workers that announce themselves, and their addresses.

    With --config, also whether the configuration has them, and which of its workers were not heard.

    An announcement is a hint. A worker is used only if cluster.yaml names it, and over an encrypted link only if its
    certificate comes from the cluster's own authority.
    """
    from coordinator.deploy.discovery import look_around

    config = find_config(config)
    found = await look_around(timeout, load_cluster(config) if config else None)
    if as_json:
        flags.print_json(found.as_json())
        return
    if found.nodes:
        console = plain_console()
        console.print(node_table(found.nodes, config.name if config else "", console.width))
    for line in remarks(found.nodes, found.num_ignored, timeout):
        say(line)


def node_table(found: "Sequence[FoundNode]", file: str, width: int) -> Group:
    """Return a row per address; `file` is the name of the configuration, or empty."""
    heads = ["node", "version", "address", "reached by", "certificate", *([f"in {file}"] if file else [])]
    rows = []
    for node in found:
        certificate = node.fingerprint[:16] if node.fingerprint else "none" if node.is_announced else "–"
        standing = ("at another address" if node.is_elsewhere else "yes") if node.is_configured else "no"
        first, last = [node.name, node.version or "not heard"], [certificate, *([standing] if file else [])]
        for endpoint in node.endpoints:
            rows.append([*first, endpoint.address, endpoint.link or "–", *last])
            first, last = [""] * len(first), [""] * len(last)  # once per node is enough
    return fitting(heads, rows, width, num_left=len(heads))


def remarks(found: "Sequence[FoundNode]", num_ignored: int, timeout_s: float) -> list[str]:
    """Return the lines below the table."""
    lines = []
    names = [node.name for node in found if node.is_announced]
    if not names:
        lines.append(
            f"no worker announced itself within {timeout_s:g} s. On the others: brigade worker --bind 0.0.0.0:50070 "
            "--name NAME --keys keys. If macOS asks whether it may find devices on the local network, allow it"
        )
    lines += [
        f"{names.count(name)} workers call themselves {name}" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    if num_ignored:
        lines.append(f"left out {counted(num_ignored, 'announcement')}: incomplete, too many, or not from a worker")
    return lines


def init(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Only these workers. (default: all that are found)")
    ] = None,
    config: Annotated[Path, typer.Option("--config", metavar="PATH", help="The file to write.")] = CONFIG,
    model: flags.Model = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take every usable worker.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Take workers without certificates, on a network that you trust.")
    ] = False,
    timeout: Timeout = LISTENS_S,
) -> None:
    """Write a cluster.yaml of the workers that announce themselves; this machine is its coordinator.

    Each worker gets the address of its best link: Thunderbolt, then Ethernet, then Wi-Fi. If there is an authority in
    the folder `keys`, workers without a certificate of it are left out.

    On the other Mac: brigade worker --name mini --bind 0.0.0.0:50070 --keys keys

    Here: brigade init --yes, or only two of them: brigade init mini air
    """
    from coordinator.deploy.cluster_file import (
        check_target,
        cluster_text,
        coordinator_in,
        draft,
        unproven,
        within_reach,
        write_cluster,
    )
    from coordinator.deploy.discovery import look_around

    if model is not None:
        require_model(model)
    check_target(config, force=force)
    keys = config.parent / KEYS_FOLDER
    owner = coordinator_in(keys)
    coordinator = owner or CoordinatorConfig().name
    found = run_async(look_around(timeout)).nodes
    if missing := [repr(name) for name in names or [] if name not in {node.name for node in found}]:
        raise StageLost(f"no worker {' or '.join(missing)} announced itself within {timeout:g} s; see `brigade nodes`")
    whole = draft(found, coordinator, names or [])
    if whole.workers and not (yes or sys.stdin.isatty()):
        raise InputError("", "expected --yes: standard input is no terminal, so there is no answer to questions")
    whole = _encrypted_or_trusted(whole, yes=yes, insecure=insecure)
    if network := _network(whole, keys, owner):
        whole = whole.without(run_async(unproven(whole.workers, network)))
    whole = within_reach(_taken(whole, yes=yes))
    for line in whole.left_out:
        say(line)
    if not whole.workers:
        raise StageLost("found no worker to write down, and wrote nothing; `brigade nodes` lists those that are there")
    model = _model(model, yes=yes)
    write_cluster(config, cluster_text(model, coordinator, whole), force=force)
    say(f"wrote {config}: coordinator {coordinator}, model {model}")
    for worker in whole.workers:
        say(f"  {worker}")
    _say_next(config, keys, is_proven=network is not None)


def _encrypted_or_trusted(whole: "Draft", *, yes: bool, insecure: bool) -> "Draft":
    """Return the draft without workers whose links would not be encrypted, unless the user wants them."""
    exposed = [worker.name for worker in whole.workers if worker.is_exposed]
    if not exposed or insecure:
        return whole
    asked = f"Links to {' and '.join(exposed)} would not be encrypted. Do you trust this network?"
    if not yes and typer.confirm(asked, default=False, err=True):
        return whole
    why = "it has no certificate, so links to it would not be encrypted: see `brigade keys init`, or give --insecure"
    return whole.without(dict.fromkeys(exposed, why))


def _network(whole: "Draft", keys: Path, owner: str | None) -> "Network | None":
    """Return the network on which workers are asked for their names; None without a certificate of this coordinator."""
    from worker.node.certificates import KeyFile, Role
    from worker.node.network import Network

    if not whole.is_encrypted:
        return Network(insecure=whole.is_exposed)
    return Network(keys=KeyFile(keys, owner, Role.COORDINATOR), warn=say) if owner else None


def _taken(whole: "Draft", *, yes: bool) -> "Draft":
    if yes:
        return whole
    refused = [each.name for each in whole.workers if not typer.confirm(f"Take {each}?", default=True, err=True)]
    return whole.without(dict.fromkeys(refused, "as you said"))


def _model(model: str | None, *, yes: bool) -> str:
    if model is not None or yes:
        return model or "demo"

    def checked(model: str) -> str:
        try:
            require_model(model)
        except InputError as error:
            raise typer.BadParameter(error.message) from error  # typer asks again
        return model

    return str(typer.prompt("Model, a folder or a hub repository", "demo", value_proc=checked, err=True))


def _say_next(path: Path, keys: Path, *, is_proven: bool) -> None:
    if not is_proven:
        say(f"no coordinator's certificate is in {keys}, so the workers' names are not verified")
        say(f"next: copy the folder of keys of these workers' cluster to {keys}, from where they were issued")
        say(f"only if it is lost: brigade keys init --config {path}, and a new certificate for each worker")
    say(f"next: brigade plan --config {path}")
