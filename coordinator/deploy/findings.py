"""Doctor's data: what it collects about nodes and hops, and the findings that follow. Pure.

docs/doctor.md has a section for each kind of finding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from coordinator.planning.speeds import NodeSpeed
from protos.brigade_pb2 import Configuration, Facts, Interface, LinkReply, Medium, ThunderboltPort, Way
from worker.errors import BrigadeError
from worker.platform.text import printable

_MAX_LISTED = 64  # interfaces and ports of one node; further ones are ignored


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "must be mended"  # in --json; people read FIX


class Kind(StrEnum):
    """The subject of a finding."""

    APP_NAP = "app-nap"
    BRIGADE = "brigade"
    CERTIFICATE = "certificate"
    CHAIN = "chain"
    CLOCK = "clock"
    CONFIGURATION = "configuration"
    DISK = "disk"
    FIREWALL = "firewall"
    GRPC = "grpc"
    INTERFACE = "interface"
    LOCAL_NETWORK = "local-network"
    MACHINE = "machine"
    MEMORY = "memory"
    MLX = "mlx"
    MODEL = "model"
    MTU = "mtu"
    PLAN = "plan"
    PYTHON = "python"
    RDMA = "rdma"
    ROWS = "rows"
    SLEEP = "sleep"
    SPEED = "speed"
    THUNDERBOLT = "thunderbolt"
    TRIAL = "trial"
    UNMEASURED = "unmeasured"
    UNREACHABLE = "unreachable"
    UNREAD = "unread"
    WIFI = "wifi"
    WIRED_LIMIT = "wired-limit"


@dataclass(frozen=True)
class Finding:
    """One line about a node, a hop ("mini → studio") or the chain, and how to fix it."""

    level: Level
    kind: Kind
    about: str
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        """Make the texts printable: they quote other nodes, which must not control or fill a terminal."""
        for name in ("about", "text", "fix"):
            object.__setattr__(self, name, printable(getattr(self, name)))


ok, note = partial(Finding, Level.OK), partial(Finding, Level.NOTE)


def problem(kind: Kind, about: str, text: str, fix: str) -> Finding:
    return Finding(Level.PROBLEM, kind, about, text, fix)


def graded(kind: Kind, about: str, text: str, fix: str, *, is_problem: bool = False, is_note: bool = False) -> Finding:
    """Return a problem or a note, or else that all is well, without the fix."""
    if is_problem:
        return problem(kind, about, text, fix)
    return note(kind, about, text, fix) if is_note else ok(kind, about, text)


def measured(value: float) -> float | None:
    """Return another node's measurement; None if it is no positive number."""
    return value if math.isfinite(value) and value > 0 else None


def medium_name(medium: int) -> str:
    """Return the medium's name in JSON; "unspecified" for an unknown number."""
    is_known = medium in Medium.values()
    return Medium.Name(Medium.ValueType(medium)).removeprefix("MEDIUM_").lower() if is_known else "unspecified"


@dataclass(frozen=True)
class ExaminedNode:
    """A node of the configuration. Without `facts` it could not be asked, for the reason `error`.

    `ways` tell how the coordinator's connections to its addresses went; the coordinator itself has none.
    """

    name: str
    facts: Facts | None = None
    error: BrigadeError | None = None
    ways: Sequence[Way] = ()
    clock_offset_s: float | None = None  # its clock minus the coordinator's
    configuration: Configuration = field(default_factory=Configuration)  # of its own name and cluster.yaml
    configured_bytes: int | None = None  # the memory limit in cluster.yaml
    is_here: bool = False  # a worker on the coordinator's machine, which shares its memory
    start: str = ""  # where and how a worker is started
    launch: str = ""  # the same for one that is launched: it brings version, configuration and certificate up to date
    speed: NodeSpeed | None = None  # at the model in use

    @property
    def interfaces(self) -> Sequence[Interface]:
        return self.facts.interfaces[:_MAX_LISTED] if self.facts else ()

    @property
    def ports(self) -> Sequence[ThunderboltPort]:
        return self.facts.thunderbolt[:_MAX_LISTED] if self.facts else ()

    @property
    def is_mac(self) -> bool:
        return self.facts is not None and self.facts.system == "Darwin"

    def interface_with(self, address: str) -> Interface | None:
        """Return the interface that has this IP address."""
        return next((each for each in self.interfaces if address and address in each.addresses), None)

    def cable_to(self, other: "ExaminedNode") -> ThunderboltPort | None:
        """Return the port whose cable ends at a port of the other node, by what both nodes report."""
        theirs = {port.id for port in other.ports if port.id}
        return next((port for port in self.ports if port.is_connected and port.peer_id in theirs), None)


@dataclass(frozen=True)
class ExaminedHop:
    """A hop of the chain, measured from `source` to `target`.

    Results go from the last worker to the coordinator: that hop is measured in the other direction, and `is_back`.
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
        return measured(self.reply.rtt_ms) if self.reply else None

    @property
    def bytes_per_s(self) -> float | None:
        return measured(self.reply.bytes_per_s) if self.reply else None


@dataclass(frozen=True)
class ExaminedCluster:
    """All nodes, the coordinator first, and all hops."""

    nodes: Sequence[ExaminedNode]
    hops: Sequence[ExaminedHop] = ()

    @property
    def by_name(self) -> Mapping[str, ExaminedNode]:
        return {node.name: node for node in self.nodes}
