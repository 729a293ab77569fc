"""Which way a hop takes, and whether a better one is there. Pure."""

from collections.abc import Iterator

from coordinator.examine.finding import Finding, Kind, mend, note, ok
from coordinator.examine.known import KnownHop, KnownNode
from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_LOOPBACK,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_WIFI,
    Interface,
    Medium,
    ThunderboltPort,
    Way,
)

_LEAST_MTU = 1500
_MEDIA = {
    MEDIUM_LOOPBACK: "loopback, within one machine", MEDIUM_THUNDERBOLT: "Thunderbolt", MEDIUM_ETHERNET: "Ethernet",
    MEDIUM_WIFI: "Wi-Fi", MEDIUM_TUNNEL: "a VPN",
}  # fmt: skip
_WORST_FIRST = (MEDIUM_TUNNEL, MEDIUM_WIFI)  # one end of such a kind makes it the hop's
_IS_THERE = "though a Thunderbolt cable is there"


def judge_way(hop: KnownHop, way: Way, sender: KnownNode, receiver: KnownNode) -> Iterator[Finding]:
    """Of a hop whose two ends are known by their IP addresses."""
    here, there = sender.interface_with(way.local), receiver.interface_with(way.remote)
    cable = cable_between(sender, receiver)
    yield _taken(hop, here, there, cable, sender, receiver)
    if cable:
        yield _cable(hop, cable, sender, receiver)
    yield from _mtu(hop, here, there)


def cable_between(sender: KnownNode, receiver: KnownNode) -> ThunderboltPort | None:
    """The sender's port whose other end is the receiver's, both by what their own ports say."""
    theirs = {port.id for port in receiver.ports if port.id}
    return next((port for port in sender.ports if port.is_connected and port.peer_id in theirs), None)


def _taken(
    hop: KnownHop,
    here: Interface | None,
    there: Interface | None,
    cable: ThunderboltPort | None,
    sender: KnownNode,
    receiver: KnownNode,
) -> Finding:
    """The interfaces at both ends, and what to take instead."""
    media = [end.medium for end in (here, there) if end]
    worst = next((medium for medium in _WORST_FIRST if medium in media), media[0] if media else None)
    text, by_cable = _path(hop, here, there), _use(receiver, MEDIUM_THUNDERBOLT)
    if worst == MEDIUM_WIFI and cable:
        return mend(Kind.WIFI, hop.about, f"{text} {_IS_THERE}", by_cable)
    if worst == MEDIUM_WIFI and _share_ethernet(sender, receiver):
        return mend(Kind.WIFI, hop.about, f"{text} though both are on one Ethernet", _use(receiver, MEDIUM_ETHERNET))
    if worst == MEDIUM_WIFI:
        return note(Kind.WIFI, hop.about, text, "connect them by a Thunderbolt cable, or by Ethernet")
    if worst == MEDIUM_TUNNEL and cable:
        return mend(Kind.INTERFACE, hop.about, f"{text} {_IS_THERE}", by_cable)
    if worst == MEDIUM_TUNNEL:
        return note(Kind.INTERFACE, hop.about, text, "use an address that the VPN does not take, or end it")
    if worst == MEDIUM_ETHERNET and cable:
        return note(Kind.INTERFACE, hop.about, f"{text} {_IS_THERE}", by_cable)
    return ok(Kind.INTERFACE, hop.about, text)


def _path(hop: KnownHop, here: Interface | None, there: Interface | None) -> str:
    """The interface here, and the one there if that is of another kind."""
    text = f"takes {_name(here)}"
    if here and there and here.medium != there.medium:
        text += f", at {hop.target} {_name(there)}"
    return text


def _name(end: Interface | None) -> str:
    if end is None:
        return "an unknown interface"
    medium = _MEDIA.get(end.medium, "an interface of unknown kind")
    return medium if end.medium == MEDIUM_LOOPBACK else f"{end.port or medium} ({end.name}, MTU {end.mtu})"


def _use(receiver: KnownNode, medium: Medium) -> str:
    """How to have another interface taken."""
    found = [address for each in receiver.interfaces if each.medium == medium for address in each.addresses]
    address = next((each for each in found if ":" not in each), None)
    if address:
        return f"put {address} and the port first in `address:` of {receiver.name} in cluster.yaml, on both nodes"
    return "give both an address on it: System Settings, Network, Thunderbolt Bridge, TCP/IP"


def _share_ethernet(sender: KnownNode, receiver: KnownNode) -> bool:
    """Whether both have an active Ethernet interface with addresses of one /24."""
    first, second = (
        {
            address.rpartition(".")[0]
            for each in node.interfaces
            if each.medium == MEDIUM_ETHERNET and each.is_active
            for address in each.addresses
            if ":" not in address
        }
        for node in (sender, receiver)
    )
    return bool(first & second)


def _cable(hop: KnownHop, cable: ThunderboltPort, sender: KnownNode, receiver: KnownNode) -> Finding:
    """How fast the cable is, and whether both ends could do more."""
    able = min(max((port.gbit for port in node.ports), default=0.0) for node in (sender, receiver))
    symmetric = min(able, 80.0)  # 120 is what Thunderbolt 5 does one way, with 40 the other
    text = f"Thunderbolt cable between them: {cable.gbit:g} Gb/s (Thunderbolt {_generation(cable.gbit)})"
    if 0 < cable.gbit < symmetric:
        fix = "use a cable that is made for the faster Thunderbolt, at most 1 m if it is passive, directly between both"
        return note(Kind.THUNDERBOLT, hop.about, f"{text}, though both can do {symmetric:g}", fix)
    return ok(Kind.THUNDERBOLT, hop.about, text)


def _generation(gbit: float) -> str:
    return "5" if gbit >= 80 else "3 or 4" if gbit >= 40 else "2, or a slow cable"


def _mtu(hop: KnownHop, here: Interface | None, there: Interface | None) -> Iterator[Finding]:
    if not (here and there and here.mtu and there.mtu) or MEDIUM_LOOPBACK in (here.medium, there.medium):
        return
    sizes = f"MTU {here.mtu} ({here.name} of {hop.source}) and {there.mtu} ({there.name} of {hop.target})"
    if here.mtu != there.mtu:
        yield note(
            Kind.MTU, hop.about, f"{sizes} differ: large packets may be lost", "set both alike: networksetup -setMTU"
        )
    elif here.mtu < _LEAST_MTU:
        yield note(Kind.MTU, hop.about, f"{sizes} are below {_LEAST_MTU}", "is a VPN or a tunnel between them?")
