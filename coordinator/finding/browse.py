"""Browsing: listens for a while to the nodes that announce themselves. Whatever is heard comes from anybody."""

import asyncio
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from worker.config import MOST_ADDRESSES, join_address
from worker.errors import StageLost
from worker.node.announcement import SERVICE, About
from worker.process.interfaces import own_interfaces

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf

MOST_HEARD = 256  # announcements that are looked at: who floods the network can hide others, and do no more


@dataclass(frozen=True)
class Found:
    """A node, and where it says that it listens: HOST:PORT."""

    about: About
    addresses: tuple[str, ...]


@dataclass
class Heard:
    """What came in, in the order in which it did."""

    nodes: list[Found] = field(default_factory=list)
    num_ignored: int = 0  # announcements that no node would make, or beyond those that are looked at


async def browse(for_s: float) -> Heard:
    """Listen for so long.

    Raises:
        StageLost: this machine cannot listen.
    """
    from zeroconf import Error

    try:
        return await _browse(for_s)
    except (OSError, RuntimeError, Error) as error:
        why = str(error) or type(error).__name__
        raise StageLost(f"cannot look for nodes on this machine's networks: {why}") from error


def merged(found: Iterable[Found]) -> list[Found]:
    """Each node once: it announces itself on every interface by itself."""
    places: dict[About, dict[str, None]] = {}
    for each in found:
        places.setdefault(each.about, {}).update(dict.fromkeys(each.addresses))
    return [Found(about, tuple(addresses)[:MOST_ADDRESSES]) for about, addresses in places.items()]


def addresses_in(ips: Iterable[str], port: int | None) -> tuple[str, ...]:
    """Those that a node may be called at, of what an announcement has."""
    return tuple(join_address(ip, port) for ip in list(ips)[:MOST_ADDRESSES] if port and _is_callable(ip))


async def _browse(for_s: float) -> Heard:
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

    everywhere = [address for each in own_interfaces() if not each.is_tunnel for address in each.addresses]
    async with AsyncZeroconf(interfaces=everywhere) as listener:
        ear = _Ear(asyncio.get_running_loop().time() + for_s)
        async with AsyncServiceBrowser(listener.zeroconf, SERVICE, handlers=[ear.on_change]):
            await asyncio.sleep(for_s)
        await ear.wait_resolved()
    return ear.heard


class _Ear:
    """Takes in what the browser hears, and asks each that it hears of for the rest."""

    def __init__(self, until: float) -> None:
        """`until` is by the event loop's clock."""
        self.heard = Heard()
        self._until = until
        self._asked: dict[str, asyncio.Task[None]] = {}

    def on_change(self, zeroconf: "Zeroconf", service_type: str, name: str, state_change: "ServiceStateChange") -> None:
        if state_change.name != "Added" or name in self._asked:
            return
        if len(self._asked) == MOST_HEARD or not name.endswith(f".{SERVICE}"):  # anybody may point to anything
            self.heard.num_ignored += 1
        else:
            self._asked[name] = asyncio.create_task(self._resolve(zeroconf, name))

    async def wait_resolved(self) -> None:
        await asyncio.gather(*self._asked.values())

    async def _resolve(self, zeroconf: "Zeroconf", instance: str) -> None:
        from zeroconf import Error

        try:
            found = await self._ask(zeroconf, instance)
        except Error:  # a name that is none
            found = None
        if found:
            self.heard.nodes.append(found)
        else:
            self.heard.num_ignored += 1

    async def _ask(self, zeroconf: "Zeroconf", instance: str) -> Found | None:
        from zeroconf.asyncio import AsyncServiceInfo

        service = AsyncServiceInfo(SERVICE, instance)
        left_ms = 1000 * (self._until - asyncio.get_running_loop().time())
        is_complete = await service.async_request(zeroconf, max(1.0, left_ms))
        about = About.of_txt(service.properties) if is_complete else None
        addresses = addresses_in(service.parsed_addresses(), service.port)
        return Found(about, addresses) if about and addresses else None


def _is_callable(ip: str) -> bool:
    try:
        found = ipaddress.ip_address(ip)
    except ValueError:
        return False
    return not (found.is_multicast or found.is_unspecified or (found.version == 6 and found.is_link_local))
