"""Writes cluster.yaml: the found nodes for `brigade init`, the layers of a plan for `brigade plan --write`."""

import asyncio
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509

from coordinator.cluster.peer import Peer
from coordinator.deploy.discovery import FoundNode
from coordinator.planning.plan import Plan
from worker.config import KEYS_FOLDER, ClusterConfig, CoordinatorConfig, is_certifiable, load_cluster, split_address
from worker.errors import BrigadeError, ConfigError
from worker.node.certificates import Role, split_pem, subjects_of
from worker.node.network import Network
from worker.platform.files import replacing
from worker.platform.text import printable

HELLO_S = 3.0
_MAX_KEY_BYTES = 1 << 16
_HEAD = "# Written by `brigade init`. All keys: docs/cluster_yaml.md\n"


@dataclass(frozen=True)
class Draft:
    """The workers to write down, with the endpoints to call them at, and a line for each node that is left out."""

    workers: tuple[FoundNode, ...]
    left_out: tuple[str, ...] = ()

    @property
    def is_encrypted(self) -> bool:
        return any(worker.is_encrypted for worker in self.workers)

    @property
    def is_exposed(self) -> bool:
        return any(worker.is_exposed for worker in self.workers)

    def without(self, reasons: Mapping[str, str]) -> "Draft":
        """Return the draft without the workers of these names, each left out for its reason."""
        kept = tuple(worker for worker in self.workers if worker.name not in reasons)
        return Draft(kept, self.left_out + tuple(f"{name} is left out: {why}" for name, why in reasons.items()))


def draft(found: Sequence[FoundNode], coordinator: str, wanted: Collection[str] = ()) -> Draft:
    """Return all workers, or those `wanted`, that can be in one cluster with a coordinator of this name.

    A cluster is encrypted or not: if some workers show certificates, those without are left out. Call `within_reach`
    once the user has chosen among these workers.
    """
    announced = [node for node in found if node.is_announced]
    counts = Counter(node.name.lower() for node in announced)
    workers = {}  # by name
    reasons = {}
    for node in announced:
        if wanted and node.name not in wanted:
            continue
        usable = [each for each in node.endpoints if each.interface]
        remote = [each for each in usable if not each.is_loopback]  # loopback is another machine for every node
        workers[node.name] = replace(node, endpoints=remote or usable)
        if (count := counts[node.name.lower()]) > 1:
            reasons[node.name] = f"{count} workers have this name; write the right one into cluster.yaml yourself"
        elif node.name.lower() == coordinator.lower():
            reasons[node.name] = "the coordinator has this name"
        elif node.is_encrypted and not is_certifiable(node.name):
            reasons[node.name] = "a certificate cannot carry this name"
        elif not usable:
            reasons[node.name] = "no interface of this machine leads there"
    whole = Draft(tuple(workers.values())).without(reasons)
    if whole.is_encrypted:
        why = "it was started without a certificate, and the others with one"
        whole = whole.without({worker.name: why for worker in whole.workers if not worker.is_encrypted})
    owners: dict[str, str] = {}  # by address
    reasons = {}
    for worker in whole.workers:
        for address in worker.addresses:
            if (owner := owners.setdefault(address, worker.name)) != worker.name:
                reasons[worker.name] = f"{owner} announces {address}, too"
                break
    return whole.without(reasons)


def within_reach(whole: Draft) -> Draft:
    """Leave out workers on this machine's loopback if there are others, which could not call them."""
    local = [worker for worker in whole.workers if worker.is_here_only]
    if len(local) == len(whole.workers):
        return whole
    reasons = {}
    for worker in local:
        _, port = split_address(worker.addresses[0])
        why = "it listens on this machine's loopback, where the others cannot reach it"
        reasons[worker.name] = f"{why}: start it with --bind 0.0.0.0:{port}, or leave its layers to the coordinator"
    return whole.without(reasons)


async def unproven(workers: Sequence[FoundNode], network: Network) -> dict[str, str]:
    """Ask the workers for their names; return the reason by name for each that does not prove it."""
    reasons = await asyncio.gather(*(_why_unproven(worker, network) for worker in workers))
    return {worker.name: why for worker, why in zip(workers, reasons, strict=True) if why}


async def _why_unproven(worker: FoundNode, network: Network) -> str:
    try:
        peer = Peer(worker.name, worker.addresses, network)
    except BrigadeError as error:
        return error.message
    try:
        reply = await peer.hello(HELLO_S)
        return "" if reply.node == worker.name else f"the worker at {peer.address} has another name"
    except BrigadeError as error:
        return printable(error.message)
    finally:
        await peer.close()


def coordinator_in(folder: Path) -> str | None:
    """Return the name of the one coordinator whose certificate is in this folder of keys; None for none or several."""
    names = []
    for file in folder.glob("*.pem"):
        with contextlib.suppress(OSError, ValueError), file.open("rb") as opened:
            _, certificate, _ = split_pem(opened.read(_MAX_KEY_BYTES))
            own, roles = subjects_of(x509.load_pem_x509_certificate(certificate))
            names += own[:1] if roles == [Role.COORDINATOR] else []
    return names[0] if len(names) == 1 else None


def cluster_text(model: str, coordinator: str, draft: Draft) -> str:
    """Return the file's text; all that came from the network becomes YAML strings."""
    keys: dict[str, Any] = {"model": model}
    if draft.is_encrypted:
        keys["tls"] = {"keys": KEYS_FOLDER}
    elif draft.is_exposed:
        keys["insecure"] = True
    if coordinator != CoordinatorConfig().name:
        keys["coordinator"] = {"name": coordinator}
    keys["workers"] = [
        {"name": worker.name, "address": worker.addresses if len(worker.addresses) > 1 else worker.addresses[0]}
        for worker in draft.workers
    ]
    return _HEAD + yaml.safe_dump(keys, sort_keys=False, allow_unicode=False)


def check_target(path: Path, *, force: bool) -> None:
    """Raise ConfigError if the folder is missing, or a file exists and must not be replaced."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist; make it, or give another --config")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} exists already and is not overwritten: give --force, or another --config")


def write_cluster(path: Path, text: str, *, force: bool) -> None:
    """Write the file atomically, after a test that it loads.

    Raises:
        ConfigError: it exists already, cannot be written, or would not load.
    """
    with _replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
        load_cluster(unfinished)
        check_target(path, force=force)


def write_layers(path: Path, cluster: ClusterConfig, plan: Plan) -> None:
    """Append the plan's `layers:` to the file, whose present content is `cluster`, and leave all other lines unchanged.

    Raises:
        ConfigError: the plan's nodes are not the file's nodes in the file's order, its layers are those of prompts but
            the file does not say so, or the line cannot be added.
    """
    layers = list(plan.layers)
    require_changeable(path)
    listed = [cluster.coordinator.name, *(worker.name for worker in cluster.workers)]
    members = [assignment.name for assignment in plan.assignments]
    if members != listed:
        raise ConfigError(
            f"{path}: expected a plan over {', '.join(listed)}, in this order, as `layers:` counts them; the fastest "
            f"is over {', '.join(members)}: list the workers so there"
        )
    if plan.prompt_end is not None and cluster.objective != "prompt":
        raise ConfigError(f"{path}: expected `objective: prompt` beside layers of prompts, found {cluster.objective}")
    with _replacing(path) as unfinished:
        found = path.read_bytes()
        end = b"\r\n" if b"\r\n" in found else b"\n"
        gap = b"" if found.endswith(end) else end
        unfinished.write_bytes(b"%b%blayers: %b  # as brigade plan says%b" % (found, gap, str(layers).encode(), end))
        shutil.copymode(path, unfinished)
        try:
            written = load_cluster(unfinished).layers
        except ConfigError:
            written = None  # the file may have ended inside a block
        if list(written or ()) != layers:
            raise ConfigError(f"{path}: cannot add a line to it; write there yourself: layers: {layers}")


def require_changeable(path: Path) -> None:
    """Raise ConfigError if the file is read-only: replacing it would ignore that."""
    if not os.access(path, os.W_OK) or not path.stat().st_mode & 0o222:  # the superuser may write to any file
        raise ConfigError(f"{path} is read-only: expected a file that may be changed (chmod u+w), or no --write")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside this file, or beside the one to which it links, which replaces that at the end.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with replacing(path.resolve()) as unfinished:
            yield unfinished
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
