"""The cluster.yaml that `brigade init` writes: which found nodes go into it, at which addresses, and its text."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509

from coordinator.cluster.peer import Peer
from coordinator.deploy.certificates import KEYS_FOLDER
from coordinator.deploy.discovery import Endpoint, FoundNode
from worker.config import ClusterConfig, CoordinatorConfig, is_certifiable, load_cluster, split_address
from worker.errors import BrigadeError, ConfigError
from worker.node.identity import Role, split_pem, subjects_of
from worker.node.network import Network
from worker.platform.text import printable

_HELLO_S = 3.0
_MAX_KEY_BYTES = 1 << 16
_HEAD = "# Written by `brigade init`. All keys: docs/cluster_yaml.md\n"


@dataclass(frozen=True)
class DraftWorker:
    """A worker to write down, with its endpoints, the best first."""

    name: str
    endpoints: tuple[Endpoint, ...]
    is_encrypted: bool

    @property
    def is_here_only(self) -> bool:
        """Whether no other machine reaches it."""
        return all(each.is_loopback for each in self.endpoints)

    @property
    def is_exposed(self) -> bool:
        """Whether links to it leave this machine unencrypted."""
        return not (self.is_encrypted or self.is_here_only)

    @property
    def addresses(self) -> list[str]:
        return [each.address for each in self.endpoints]

    def __str__(self) -> str:
        first, *others = map(str, self.endpoints)
        return f"{self.name} at {first}" + "".join(f", else at {other}" for other in others)


@dataclass(frozen=True)
class Draft:
    """The workers to write down, and a line for each node that is left out."""

    workers: tuple[DraftWorker, ...]
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

    A cluster is encrypted or not: if some workers show certificates, it is theirs. `within_reach` has to follow once it
    is known which workers are taken.
    """
    announced = [node for node in found if node.is_announced]
    counts = Counter(node.name.lower() for node in announced)
    announced = [node for node in announced if not wanted or node.name in wanted]
    workers = {}  # by name
    for node in announced:
        usable = [each for each in node.endpoints if each.interface]
        remote = [each for each in usable if not each.is_loopback]  # loopback is another place on every node
        workers[node.name] = DraftWorker(node.name, tuple(remote or usable), node.fingerprint is not None)
    whole = Draft(tuple(workers.values()))
    whole = whole.without({node.name: why for node in announced if (why := _unusable(node, counts, coordinator))})
    unreached = "no interface of this machine leads there"
    whole = whole.without({worker.name: unreached for worker in whole.workers if not worker.endpoints})
    if whole.is_encrypted:
        why = "it was started without a certificate, and the others with one"
        whole = whole.without({worker.name: why for worker in whole.workers if not worker.is_encrypted})
    return whole.without(dict(_at_same_address(whole.workers)))


def _unusable(node: FoundNode, counts: Counter[str], coordinator: str) -> str:
    name = node.name.lower()
    if counts[name] > 1:
        return f"{counts[name]} workers call themselves so; write down yourself which is meant"
    if name == coordinator.lower():
        return "the coordinator has this name"
    if node.fingerprint and not is_certifiable(node.name):
        return "a certificate cannot carry this name"
    return ""


def _at_same_address(workers: Sequence[DraftWorker]) -> Iterator[tuple[str, str]]:
    owners: dict[str, str] = {}
    for worker in workers:
        for address in worker.addresses:
            if (owner := owners.setdefault(address, worker.name)) != worker.name:
                yield worker.name, f"{owner} says that it listens at {address}, too"
                break


def within_reach(whole: Draft) -> Draft:
    """Leave out workers on this machine's loopback if there are others, which could not call them."""
    if all(worker.is_here_only for worker in whole.workers):
        return whole
    reasons = {}
    for worker in whole.workers:
        if worker.is_here_only:
            _, port = split_address(worker.addresses[0])
            why = "it listens on this machine's loopback, where the others cannot reach it"
            reasons[worker.name] = f"{why}: start it with --bind 0.0.0.0:{port}, or leave its layers to the coordinator"
    return whole.without(reasons)


async def unproven(workers: Sequence[DraftWorker], network: Network) -> dict[str, str]:
    """Ask the workers who they are; return the reason by name for each that does not prove it."""
    reasons = await asyncio.gather(*(_why_unproven(worker, network) for worker in workers))
    return {worker.name: why for worker, why in zip(workers, reasons, strict=True) if why}


async def _why_unproven(worker: DraftWorker, network: Network) -> str:
    try:
        peer = Peer(worker.name, worker.addresses, network)
    except BrigadeError as error:
        return error.message
    try:
        reply = await peer.hello(_HELLO_S)
        return "" if reply.node == worker.name else f"who answers at {peer.address} has another name"
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
    """Return the file's text; what came from the network stands in it as YAML strings only."""
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
    """Raise ConfigError if the folder is missing, or a file exists and is not to be replaced."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a folder that is there; make it, or give another --config")
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} is there already, and is not written over: give --force, or another --config")


def write_cluster(path: Path, text: str, *, force: bool) -> ClusterConfig:
    """Write the file atomically, once it is known to load.

    Raises:
        ConfigError: it exists already, cannot be written, or would not load.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        load_cluster(unfinished)
        check_target(path, force=force)
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # the first error says more
            unfinished.unlink()
    return load_cluster(path)
