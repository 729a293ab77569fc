"""What doctor has found out, as plain data: of every node, and of every hop. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos.brigade_pb2 import Configuration, Facts, Interface, LinkReply, ThunderboltPort, Way
from worker.errors import BrigadeError

_MOST_LISTED = 64  # interfaces and ports of one node: more are not believed


def figure(value: float) -> float | None:
    """What another node says was measured, if it can be that."""
    return value if math.isfinite(value) and value > 0 else None


@dataclass(frozen=True)
class KnownNode:
    """A node of the configuration; without `facts` it could not be asked, for the reason `error`.

    `ways` is how the coordinator's connections to its addresses went; there are none to itself.
    """

    name: str
    facts: Facts | None = None
    error: BrigadeError | None = None
    ways: Sequence[Way] = ()
    clock_offset_s: float | None = None  # its clock minus the coordinator's
    configuration: Configuration | None = None  # what its own cluster.yaml says; None if it was started without one
    configured_bytes: int | None = None  # what cluster.yaml lets it offer
    is_here: bool = False  # a worker on the coordinator's machine, whose memory they share
    start: str = ""  # where and how a worker is started

    @property
    def interfaces(self) -> Sequence[Interface]:
        return self.facts.interfaces[:_MOST_LISTED] if self.facts else ()

    @property
    def ports(self) -> Sequence[ThunderboltPort]:
        return self.facts.thunderbolt[:_MOST_LISTED] if self.facts else ()

    @property
    def is_mac(self) -> bool:
        return self.facts is not None and self.facts.system == "Darwin"

    def interface_with(self, address: str) -> Interface | None:
        """The one that has this IP address."""
        return next((each for each in self.interfaces if address and address in each.addresses), None)


@dataclass(frozen=True)
class KnownHop:
    """A hop of the chain, as measured from `source` to `target`.

    Results go from the last worker to the coordinator: that is measured the other way round, and `is_back`.
    """

    source: str
    target: str
    reply: LinkReply | None = None
    error: BrigadeError | None = None
    is_back: bool = False

    @property
    def about(self) -> str:
        return f"{self.source} {'←' if self.is_back else '→'} {self.target}"

    @property
    def rtt_ms(self) -> float | None:
        return figure(self.reply.rtt_ms) if self.reply else None

    @property
    def bytes_per_s(self) -> float | None:
        return figure(self.reply.bytes_per_s) if self.reply else None


@dataclass(frozen=True)
class Known:
    """Everything, the coordinator first."""

    nodes: Sequence[KnownNode]
    hops: Sequence[KnownHop] = ()

    @property
    def by_name(self) -> Mapping[str, KnownNode]:
        return {node.name: node for node in self.nodes}
