"""Findings: what doctor says, a line each. Pure. docs/doctor.md has a section per kind."""

from dataclasses import dataclass
from enum import StrEnum

from worker.process.printable import printable


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    MEND = "must be mended"


class Kind(StrEnum):
    """What a finding is about."""

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
    SLEEP = "sleep"
    SPEED = "speed"
    THUNDERBOLT = "thunderbolt"
    UNMEASURED = "unmeasured"
    UNREACHABLE = "unreachable"
    UNREAD = "unread"
    WIFI = "wifi"
    WIRED_LIMIT = "wired-limit"


@dataclass(frozen=True)
class Finding:
    """One line about a node, a hop ("mini → studio") or the chain, and what to do where something is to be done."""

    level: Level
    kind: Kind
    about: str
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        """Much of it is the word of another node: nothing of that may steer a terminal or fill it."""
        for name in ("about", "text", "fix"):
            object.__setattr__(self, name, printable(getattr(self, name)))


def ok(kind: Kind, about: str, text: str) -> Finding:
    return Finding(Level.OK, kind, about, text)


def note(kind: Kind, about: str, text: str, fix: str = "") -> Finding:
    return Finding(Level.NOTE, kind, about, text, fix)


def mend(kind: Kind, about: str, text: str, fix: str) -> Finding:
    return Finding(Level.MEND, kind, about, text, fix)
