"""This machine's network interfaces that are up, their addresses, and whether a port there is taken."""

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_IP_BOUND_IF, _IPV6_BOUND_IF = 25, 125  # of xnu's bsd/netinet/in.h and bsd/netinet6/in6.h: Python has no names for them

_WILDCARDS = {"0.0.0.0": ("127.0.0.1",), "::": ("::1", "127.0.0.1")}
_ACCEPTS_S = 0.2  # within which a listener of this machine accepts, or the system refuses

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Interface:
    """An interface with its addresses, without link-local IPv6 (fe80::), which peers cannot use."""

    name: str
    addresses: tuple[str, ...]
    is_tunnel: bool = False  # point to point, such as a VPN

    @property
    def is_loopback(self) -> bool:
        return any(ipaddress.ip_address(address).is_loopback for address in self.addresses)


def own_interfaces() -> list[Interface]:
    """Return the interfaces that are up and have an address."""
    states = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        mine = [entry for entry in entries if entry.family in _FAMILIES and _counts_elsewhere(entry.address)]
        if mine and (name not in states or states[name].isup):
            found.append(Interface(name, tuple(entry.address for entry in mine), any(entry.ptp for entry in mine)))
    return found


def listened_on(host: str, interfaces: Sequence[Interface]) -> Iterator[Interface]:
    """Yield the interfaces, with addresses, that reach a server bound to `host`.

    A wildcard means every link, or loopback if there is no link.
    """
    ip = ipaddress.ip_address(host)
    links = [each for each in interfaces if not each.is_loopback and not each.is_tunnel]
    for each in (links or interfaces) if ip.is_unspecified else interfaces:
        addresses = tuple(address for address in each.addresses if _is_meant(ip, ipaddress.ip_address(address)))
        if addresses:
            yield replace(each, addresses=addresses)


def is_taken(host: str, port: int) -> bool:
    """Return whether a listener of this machine accepts connections at this address; of a wildcard, on loopback.

    bind tells only part of it: on macOS a wildcard and an address may have the same port, and the address gets all
    connections to it.
    """
    for address in _WILDCARDS.get(host, (host,)) if port else ():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(_ACCEPTS_S)
            probe.bind((address, 0))  # so that it calls no other machine
            if probe.getsockname()[1] != port:  # else the port is free, and it would call itself
                probe.connect((address, port))
                return True
    return False


def keep_to(sock: socket.socket, interface: str) -> None:
    """Let a socket receive and send on this interface only. Raises OSError if the system refuses."""
    if sys.platform == "darwin":
        of_v6 = sock.family == socket.AF_INET6
        level, option = (socket.IPPROTO_IPV6, _IPV6_BOUND_IF) if of_v6 else (socket.IPPROTO_IP, _IP_BOUND_IF)
        sock.setsockopt(level, option, socket.if_nametoindex(interface))
    elif sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())


def _is_meant(bound: IpAddress, own: IpAddress) -> bool:
    """Return whether a server bound to `bound` is reached at `own`; 0.0.0.0 is IPv4 only, :: is both."""
    return own == bound or (bound.is_unspecified and (bound.version == 6 or own.version == 4))


def _counts_elsewhere(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return not (ip.version == 6 and ip.is_link_local)
