"""Who is there: what was heard, beside what the configuration expects."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from coordinator.finding.browse import Found, merged
from coordinator.finding.ways import Map, Way
from worker.config import Cluster


@dataclass(frozen=True)
class Present:
    """One node. Of one that did not announce itself nothing is known but what the configuration says."""

    name: str
    version: str | None
    fingerprint: str | None  # None: it shows no certificate, or did not announce itself
    is_announced: bool
    is_configured: bool | None  # by its name; None without a configuration
    ways: Sequence[Way]
    configured: Sequence[str] = ()  # of its addresses those that the configuration has

    @property
    def is_elsewhere(self) -> bool:
        """Whether the configuration has its name with other addresses only."""
        return bool(self.is_configured and self.is_announced and not self.configured)

    def to_json(self) -> dict[str, Any]:
        said = asdict(self)
        del said["configured"], said["ways"]
        ways = [asdict(way) | {"is_configured": self._has(way)} for way in self.ways]
        return said | {"addresses": ways}

    def _has(self, way: Way) -> bool | None:
        return None if self.is_configured is None else way.address in self.configured


def nodes_json(nodes: Sequence[Present], *, num_ignored: int) -> dict[str, Any]:
    """What `brigade nodes --json` prints."""
    return {"nodes": [node.to_json() for node in nodes], "num_ignored": num_ignored}


def presence(found: Iterable[Found], cluster: Cluster | None, here: Map) -> list[Present]:
    """Everybody who announced itself, and then those of the configuration that did not."""
    known = {worker.name: worker for worker in cluster.workers} if cluster else {}
    nodes = []
    for each in sorted(merged(found), key=lambda node: (node.about.name not in known, node.about.name)):
        about, worker = each.about, known.get(each.about.name)
        nodes.append(
            Present(
                about.name,
                about.version,
                about.fingerprint or None,
                True,
                None if cluster is None else worker is not None,
                here.ways(each.addresses),
                [address for address in each.addresses if worker and address in worker.addresses],
            )
        )
    heard = {node.name for node in nodes}
    silent = [worker for name, worker in known.items() if name not in heard]
    return nodes + [
        Present(each.name, None, None, False, True, here.ways(each.addresses), each.addresses) for each in silent
    ]
