"""Certificates for the nodes of a test, right ones and others, and networks that use them."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from coordinator.deploy.authority import Authority
from worker.node.certificates import Identity, KeyFile, Role, split_pem
from worker.node.network import Network

NO_CERTIFICATE: Any = {"key": None, "certificate": None}


class Shown(KeyFile):
    """An identity that is used unchecked: how a peer behaves that means harm, or is of another version."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(Path(), identity.name, identity.role)
        self._shown = identity

    def read(self) -> Identity:
        return self._shown


class Certificates:
    """An authority, and the networks of nodes that have something to do with it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.make(folder / "keys")
        self._other = Authority.make(folder / "other")

    def network(self, name: str, role: Role = Role.WORKER) -> Network:
        """Of a node with a right certificate, issued now."""
        self.authority.issue(name, role)
        return Network(keys=KeyFile(self.authority.folder, name, role))

    def coordinator(self) -> Network:
        return self.network("coordinator", Role.COORDINATOR)

    def of(self, name: str) -> Network:
        """Of whichever node has this name."""
        return self.coordinator() if name == "coordinator" else self.network(name)

    def wrong(self, how: str, name: str, role: Role) -> Network:
        """Of a node with an `expired` or `foreign` certificate, with `none` at all, or one that speaks `plaintext`."""
        if how == "plaintext":
            return Network()
        now = datetime.now(UTC)
        begins, until = now - timedelta(days=9), now - timedelta(seconds=2)
        right = _identity(self.authority.issue(name, role), name, role)
        wrongs = {
            "expired": lambda: _identity(self.authority.issue(name, role, begins=begins, until=until), name, role),
            "foreign": lambda: _identity(self._other.issue(name, role), name, role),
            "none": lambda: replace(right, **NO_CERTIFICATE),
        }
        return Network(keys=Shown(replace(wrongs[how](), authority=right.authority)))


def _identity(path: Path, name: str, role: Role) -> Identity:
    key, certificate, authority = split_pem(path.read_bytes())
    return Identity(name, role, key, certificate, authority, datetime.now(UTC) + timedelta(days=365))
