"""Draft: which of the nodes that were found go into a cluster.yaml, at which addresses; why the others do not."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from coordinator.finding.present import Present
from coordinator.finding.ways import Way
from worker.config import is_certifiable, split_address


@dataclass(frozen=True)
class Chosen:
    """A worker to write down: its ways, the best first."""

    name: str
    ways: tuple[Way, ...]
    is_encrypted: bool

    @property
    def is_here_only(self) -> bool:
        """Whether no other machine reaches it."""
        return all(way.is_loopback for way in self.ways)

    @property
    def is_exposed(self) -> bool:
        """Whether the links to it leave this machine unencrypted."""
        return not (self.is_encrypted or self.is_here_only)

    @property
    def addresses(self) -> list[str]:
        return [way.address for way in self.ways]

    def __str__(self) -> str:
        first, *others = map(str, self.ways)
        return f"{self.name} at {first}" + "".join(f", else at {other}" for other in others)


@dataclass(frozen=True)
class Draft:
    """What is to be written, and a line for each node that is not."""

    workers: tuple[Chosen, ...]
    left_out: tuple[str, ...] = ()

    @property
    def is_encrypted(self) -> bool:
        return any(worker.is_encrypted for worker in self.workers)

    @property
    def is_exposed(self) -> bool:
        """Whether links leave this machine unencrypted."""
        return any(worker.is_exposed for worker in self.workers)

    def without(self, reasons: dict[str, str]) -> "Draft":
        """The same without some workers, by name, each for its reason."""
        kept = tuple(worker for worker in self.workers if worker.name not in reasons)
        return Draft(kept, self.left_out + tuple(f"{name} is left out: {why}" for name, why in reasons.items()))


def draft(found: Sequence[Present], coordinator: str, wanted: Collection[str] = ()) -> Draft:
    """All workers that may be in one cluster with a coordinator of this name; if any are wanted, only of these.

    A cluster is encrypted or not: where some workers show certificates, it is of those. Once it is known who is taken,
    `within_reach` has the last word.
    """
    heard = [node for node in found if node.is_announced]
    names = Counter(node.name.lower() for node in heard)
    heard = [node for node in heard if not wanted or node.name in wanted]
    chosen = {node.name: _chosen(node) for node in heard}
    whole = Draft(tuple(chosen.values()))
    whole = whole.without({node.name: why for node in heard if (why := _unusable(node, names, coordinator))})
    apart = "no interface of this machine leads there"
    whole = whole.without({worker.name: apart for worker in whole.workers if not worker.ways})
    whole = whole.without(dict(_unencrypted_beside_others(whole.workers)))
    return whole.without(dict(_at_the_same_place(whole.workers)))


def within_reach(whole: Draft) -> Draft:
    """Without those that the others would call in vain. This machine's layers are the coordinator's in any case."""
    return whole.without(dict(_here_beside_others(whole.workers)))


def _chosen(node: Present) -> Chosen:
    """By the addresses that lead there; loopback would be another place on every node."""
    ways = [way for way in node.ways if way.interface]
    far = [way for way in ways if not way.is_loopback]
    return Chosen(node.name, tuple(far or ways), node.fingerprint is not None)


def _unusable(node: Present, names: Counter[str], coordinator: str) -> str:
    name = node.name.lower()
    if names[name] > 1:
        return f"{names[name]} workers call themselves so; write down yourself which is meant"
    if name == coordinator.lower():
        return "the coordinator has this name"
    if node.fingerprint and not is_certifiable(node.name):
        return "a certificate cannot carry this name"
    return ""


def _unencrypted_beside_others(workers: Sequence[Chosen]) -> Iterator[tuple[str, str]]:
    if any(worker.is_encrypted for worker in workers):
        for worker in workers:
            if not worker.is_encrypted:
                yield worker.name, "it was started without a certificate, and the others with one"


def _here_beside_others(workers: Sequence[Chosen]) -> Iterator[tuple[str, str]]:
    if any(not worker.is_here_only for worker in workers):
        for worker in workers:
            if worker.is_here_only:
                why = "it listens on this machine's loopback, where the others cannot reach it"
                _, port = split_address(worker.addresses[0])
                yield worker.name, f"{why}: start it with --bind 0.0.0.0:{port}, or leave its layers to the coordinator"


def _at_the_same_place(workers: Sequence[Chosen]) -> Iterator[tuple[str, str]]:
    owners: dict[str, str] = {}
    for worker in workers:
        for address in worker.addresses:
            if (owner := owners.setdefault(address, worker.name)) != worker.name:
                yield worker.name, f"{owner} says that it listens at {address}, too"
                break
