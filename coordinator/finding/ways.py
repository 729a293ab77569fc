"""Ways: the addresses of a node as seen from this machine, with the link that each leads over, the best first."""

import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.finding.media import Medium, media_now
from worker.config import is_loopback, split_address
from worker.process.interfaces import Interface, own_interfaces


@dataclass(frozen=True)
class Way:
    """An address, HOST:PORT, and the interface here that leads there; empty where none does."""

    address: str
    interface: str
    medium: Medium

    @property
    def is_loopback(self) -> bool:
        return is_loopback(split_address(self.address)[0])

    def __str__(self) -> str:
        if self.medium is Medium.LOOPBACK:
            return f"{self.address} on {self.link}"
        return f"{self.address} by {self.link or 'no interface of this machine'}"

    @property
    def link(self) -> str:
        """For people; empty where there is none."""
        if self.medium is Medium.LOOPBACK:
            return self.medium.said
        return f"{self.medium.said} ({self.interface})" if self.interface else ""


def source_address(address: str) -> str:
    """The address of this machine from which the system would send to HOST:PORT; empty if it would not."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return ""


@dataclass(frozen=True)
class Map:
    """This machine's interfaces, what each is, and from which of its addresses it sends where."""

    interfaces: Sequence[Interface]
    media: Mapping[str, Medium]
    source: Callable[[str], str] = source_address

    @classmethod
    def read(cls) -> "Map":
        """As they are now. Blocks for as long as a command takes."""
        return cls(own_interfaces(), media_now())

    def ways(self, addresses: Iterable[str]) -> list[Way]:
        """How these are reached, as the system would send there; nothing is sent."""
        found = [self._way(address) for address in dict.fromkeys(addresses)]
        return sorted(found, key=lambda way: way.medium.rank)

    def _way(self, address: str) -> Way:
        own = self.source(address)
        name = next((each.name for each in self.interfaces if own in each.addresses), "")
        if name and own == split_address(address)[0]:
            return Way(address, name, Medium.LOOPBACK)
        return Way(address, name, self.media.get(name, Medium.UNSPECIFIED))
