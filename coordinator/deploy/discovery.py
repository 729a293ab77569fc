"""Discovery: which nodes announce themselves in this machine's networks, and over which links it reaches them.

Any machine can announce anything: number, texts and addresses of announcements are checked before they are used.
"""

import asyncio
import contextlib
import ipaddress
import platform
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coordinator.deploy.findings import medium_name
from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_LOOPBACK,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_UNSPECIFIED,
    MEDIUM_WIFI,
    Medium,
)
from worker.config import MOST_ADDRESSES, ClusterConfig, is_here, join_address, split_address
from worker.errors import StageLost
from worker.node.announce import SERVICE, About
from worker.platform import linux, mac
from worker.platform.commands import Commands
from worker.platform.interfaces import Interface, own_interfaces
from worker.platform.tasks import cancel_all
from worker.platform.threads import run_in_thread

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf

MAX_ANNOUNCEMENTS = 256  # to resolve: a flood can hide other nodes, but cost no more than that
_LINKS: dict[Medium, str] = {  # as shown to people, the best first: a cable has the lowest latency
    MEDIUM_LOOPBACK: "this machine",
    MEDIUM_THUNDERBOLT: "Thunderbolt",
    MEDIUM_ETHERNET: "Ethernet",
    MEDIUM_WIFI: "Wi-Fi",
    MEDIUM_TUNNEL: "a VPN",
    MEDIUM_UNSPECIFIED: "another link",
}


@dataclass
class Heard:
    """The announced nodes, each with the addresses, HOST:PORT, that it claims to listen at, in order of arrival."""

    nodes: dict[About, list[str]] = field(default_factory=dict)
    num_ignored: int = 0  # invalid announcements, and those beyond MAX_ANNOUNCEMENTS

    def add(self, about: About, addresses: Iterable[str]) -> None:
        """Take an announcement in: a node announces itself separately on each interface."""
        self.nodes[about] = list(dict.fromkeys([*self.nodes.get(about, ()), *addresses]))


async def browse(for_s: float) -> Heard:
    """Listen for announcements for `for_s` seconds.

    Raises:
        StageLost: this machine cannot listen.
    """
    from zeroconf import Error
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

    listener = ServiceListener(asyncio.get_running_loop().time() + for_s)
    try:
        own = [address for each in own_interfaces() if not each.is_tunnel for address in each.addresses]
        async with AsyncZeroconf(interfaces=own) as zeroconf, contextlib.aclosing(listener):
            async with AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[listener.on_change]):
                await asyncio.sleep(for_s)
            await listener.wait_resolved()
    except (OSError, RuntimeError, Error) as error:
        why = str(error) or type(error).__name__
        raise StageLost(f"cannot look for nodes on this machine's networks: {why}") from error
    return listener.heard


class ServiceListener:
    """Resolves each name that a browser hears once."""

    def __init__(self, until: float) -> None:
        """`until` is when to give up, by the event loop's clock."""
        self.heard = Heard()
        self._until = until
        self._resolving: dict[str, asyncio.Task[None]] = {}

    def on_change(self, zeroconf: "Zeroconf", service_type: str, name: str, state_change: "ServiceStateChange") -> None:
        if state_change.name != "Added" or name in self._resolving:
            return
        if len(self._resolving) == MAX_ANNOUNCEMENTS or not name.endswith(f".{SERVICE}"):  # a PTR may name anything
            self.heard.num_ignored += 1
        else:
            self._resolving[name] = asyncio.create_task(self._resolve(zeroconf, name))

    async def wait_resolved(self) -> None:
        await asyncio.gather(*self._resolving.values())

    async def aclose(self) -> None:
        """Cancel what is still being resolved."""
        await cancel_all(*self._resolving.values())

    async def _resolve(self, zeroconf: "Zeroconf", name: str) -> None:
        from zeroconf import Error
        from zeroconf.asyncio import AsyncServiceInfo

        about, addresses = None, tuple[str, ...]()
        with contextlib.suppress(Error):  # an invalid name
            service = AsyncServiceInfo(SERVICE, name)
            left_ms = 1000 * (self._until - asyncio.get_running_loop().time())
            if await service.async_request(zeroconf, max(1.0, left_ms)):
                about = About.of_txt(service.properties)
                addresses = usable_addresses(service.parsed_addresses(), service.port)
        if about and addresses:
            self.heard.add(about, addresses)
        else:
            self.heard.num_ignored += 1


def usable_addresses(ips: Iterable[str], port: int | None) -> tuple[str, ...]:
    """Return the announced addresses at which a node can be called, as HOST:PORT."""

    def is_usable(text: str) -> bool:
        try:
            ip = ipaddress.ip_address(text)
        except ValueError:
            return False
        return not (ip.is_multicast or ip.is_unspecified or (ip.version == 6 and ip.is_link_local))

    return tuple(join_address(ip, port) for ip in list(ips)[:MOST_ADDRESSES] if port and is_usable(ip))


@dataclass(frozen=True)
class Endpoint:
    """An address of a node, HOST:PORT, and the interface of this machine that leads there; "" if none does."""

    address: str
    interface: str
    medium: Medium

    @property
    def is_loopback(self) -> bool:
        return is_here(self.address)

    @property
    def link(self) -> str:
        """The link as shown to people; "" if no interface leads there."""
        if self.medium == MEDIUM_LOOPBACK:
            return _LINKS[MEDIUM_LOOPBACK]
        return f"{_LINKS[self.medium]} ({self.interface})" if self.interface else ""

    def __str__(self) -> str:
        if self.medium == MEDIUM_LOOPBACK:
            return f"{self.address} on {self.link}"
        return f"{self.address} by {self.link or 'no interface of this machine'}"


def source_address(address: str) -> str:
    """Return the own address that the system would send to HOST:PORT from; "" if none. Sends nothing."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:  # it may know no IPv6
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return ""


@dataclass(frozen=True)
class LocalNetwork:
    """This machine's interfaces, their media by name, and the function that returns the address it sends from."""

    interfaces: Sequence[Interface]
    media: Mapping[str, Medium]
    source: Callable[[str], str] = source_address

    @classmethod
    def read(cls) -> "LocalNetwork":
        """Read it. Blocks for as long as the system's commands take."""
        read = mac.read_interfaces if platform.system() == "Darwin" else linux.read_interfaces
        return cls(own_interfaces(), {each.name: each.medium for each in read(Commands())})

    def endpoints(self, addresses: Iterable[str]) -> list[Endpoint]:
        """Return the endpoint of each address, the best link first."""
        ranks = list(_LINKS)
        found = [self._endpoint(address) for address in dict.fromkeys(addresses)]
        return sorted(found, key=lambda endpoint: ranks.index(endpoint.medium))

    def _endpoint(self, address: str) -> Endpoint:
        own = self.source(address)
        name = next((each.name for each in self.interfaces if own in each.addresses), "")
        if name and own == split_address(address)[0]:
            return Endpoint(address, name, MEDIUM_LOOPBACK)
        return Endpoint(address, name, self.media.get(name, MEDIUM_UNSPECIFIED))


@dataclass(frozen=True)
class FoundNode:
    """A node that announced itself or that the configuration names; only the latter is known of a silent node."""

    name: str
    version: str | None
    fingerprint: str | None  # of its certificate; None for none, or a silent node
    is_announced: bool
    is_configured: bool | None  # under this name; None without a configuration
    endpoints: Sequence[Endpoint]
    configured: Sequence[str] = ()  # its addresses that the configuration has, too

    @property
    def is_elsewhere(self) -> bool:
        """Whether the configuration has its name with other addresses only."""
        return bool(self.is_configured and self.is_announced and not self.configured)

    @property
    def is_encrypted(self) -> bool:
        return self.fingerprint is not None

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
        return f"{self.name} at {', else at '.join(map(str, self.endpoints))}"

    def as_json(self) -> dict[str, Any]:
        addresses = [
            {
                "address": each.address,
                "interface": each.interface,
                "medium": medium_name(each.medium),
                "is_configured": None if self.is_configured is None else each.address in self.configured,
            }
            for each in self.endpoints
        ]
        keys = ("name", "version", "fingerprint", "is_announced", "is_configured")
        return {key: getattr(self, key) for key in keys} | {"addresses": addresses}


@dataclass(frozen=True)
class Discovered:
    """All nodes that `look_around` found."""

    nodes: Sequence[FoundNode]
    num_ignored: int  # announcements

    def as_json(self) -> dict[str, Any]:
        """Return the output of `brigade nodes --json`."""
        return {"nodes": [node.as_json() for node in self.nodes], "num_ignored": self.num_ignored}


async def look_around(for_s: float, cluster: ClusterConfig | None = None) -> Discovered:
    """Listen for `for_s` seconds; add the silent workers of the configuration.

    Raises:
        StageLost: this machine cannot listen.
    """
    heard = await browse(for_s)
    nodes = await run_in_thread(lambda: found_nodes(heard.nodes, cluster, LocalNetwork.read()))
    return Discovered(nodes, heard.num_ignored)


def found_nodes(
    announced: Mapping[About, Sequence[str]], cluster: ClusterConfig | None, here: LocalNetwork
) -> list[FoundNode]:
    """Return every node that announced itself, configured nodes first, then the configuration's silent nodes."""
    workers = {worker.name: worker for worker in cluster.workers} if cluster else {}
    nodes = []
    for about in sorted(announced, key=lambda about: (about.name not in workers, about.name)):
        addresses, worker = announced[about][:MOST_ADDRESSES], workers.get(about.name)
        is_configured = None if cluster is None else worker is not None
        configured = [address for address in addresses if worker and address in worker.addresses]
        known = (about.name, about.version, about.fingerprint or None, True, is_configured)
        nodes.append(FoundNode(*known, here.endpoints(addresses), configured))
    silent = [worker for name, worker in workers.items() if name not in {node.name for node in nodes}]
    return nodes + [
        FoundNode(each.name, None, None, False, True, here.endpoints(each.addresses), each.addresses) for each in silent
    ]
