"""What is to be said of each hop: the way that it takes, and what that costs every token. Pure."""

from collections.abc import Iterator, Sequence

from coordinator.examine.finding import Finding, Kind, mend, note, ok
from coordinator.examine.judge_reach import blocked
from coordinator.examine.known import Known, KnownHop, KnownNode
from coordinator.planning.outlook import format_ms
from coordinator.planning.speeds import Link
from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_LOOPBACK,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_WIFI,
    TRANSPORT_GRPC,
    TRANSPORT_TCP,
    TRANSPORT_TLS,
    Interface,
    Line,
    ThunderboltPort,
    Transport,
)

_SLOW_MS, _VERY_SLOW_MS = 1.0, 20.0  # round trips: a cable's is below the first, the other is as long as a token
_SLOW_BYTES_PER_S = 25e6  # a fifth of Gigabit Ethernet
_PROMPT = 1000  # tokens
_DELAYED_MS, _DELAYED_TIMES = 2.0, 4.0  # what gRPC may take beside plain TCP
_LEAST_MTU = 1500
_MEDIA = {
    MEDIUM_LOOPBACK: "loopback, within one machine", MEDIUM_THUNDERBOLT: "Thunderbolt", MEDIUM_ETHERNET: "Ethernet",
    MEDIUM_WIFI: "Wi-Fi", MEDIUM_TUNNEL: "a VPN",
}  # fmt: skip
_PLAIN: dict[Transport, str] = {
    TRANSPORT_TCP: "bare TCP", TRANSPORT_TLS: "bare TLS", TRANSPORT_GRPC: "gRPC without TLS",
}  # fmt: skip


def judge_hop(hop: KnownHop, known: Known, row_bytes: int) -> Iterator[Finding]:
    """All findings of one hop; `row_bytes` of hidden state travel per token, none if no model is known."""
    sender, receiver = known.by_name[hop.source], known.by_name[hop.target]
    if hop.reply is None:
        reason = hop.error.message if hop.error else "it was not asked"
        yield note(Kind.UNMEASURED, hop.about, f"not measured: {reason}", "mend what is said of these nodes")
        return
    way = hop.reply.way
    if way.error:
        fix = f"let {hop.target} be reached at {way.address} from {hop.source}: same network or cable, no firewall"
        yield blocked(hop.about, way, sender) or mend(Kind.UNREACHABLE, hop.about, f"{way.address}: {way.error}", fix)
        return
    here, there = sender.interface_with(way.local), receiver.interface_with(way.remote)
    yield from _way(hop, sender, receiver, here)
    yield from _mtu(hop, here, there)
    yield from _speed(hop, row_bytes)
    yield from _beside_plain(hop)


def judge_chain(hops: Sequence[KnownHop], row_bytes: int) -> Iterator[Finding]:
    """What all hops take of a token together."""
    one_way = [ms_per_token(hop, row_bytes) for hop in hops]
    known = [ms for ms in one_way if ms is not None]
    if hops and len(known) == len(hops):
        text = f"{format_ms(sum(known))} of each token, in a chain as in the configuration"
        yield ok(Kind.CHAIN, "all hops", text)


def cable_between(sender: KnownNode, receiver: KnownNode) -> ThunderboltPort | None:
    """The sender's port whose other end is the receiver's, both by what their own ports say."""
    theirs = {port.id for port in receiver.ports if port.id}
    return next((port for port in sender.ports if port.is_connected and port.peer_id in theirs), None)


def ms_per_token(hop: KnownHop, row_bytes: int) -> float | None:
    """One way, of one row of hidden states, back of a few bytes; None where it was not measured."""
    return None if hop.rtt_ms is None else _link(hop).ms(0 if hop.is_back else row_bytes)


def _way(hop: KnownHop, sender: KnownNode, receiver: KnownNode, here: Interface | None) -> Iterator[Finding]:
    """Which interface is taken, and whether a better one is there."""
    medium = _MEDIA.get(here.medium, "an interface of unknown kind") if here else "an unknown interface"
    name = f" ({here.port or here.name}, MTU {here.mtu})" if here and here.medium != MEDIUM_LOOPBACK else ""
    text, cable = f"takes {medium}{name}", cable_between(sender, receiver)
    is_there = "though a Thunderbolt cable is there"
    if here is not None and here.medium == MEDIUM_WIFI:
        if cable:
            yield mend(Kind.WIFI, hop.about, f"{text} {is_there}", _use(receiver, MEDIUM_THUNDERBOLT))
        elif _share_ethernet(sender, receiver):
            better = _use(receiver, MEDIUM_ETHERNET)
            yield mend(Kind.WIFI, hop.about, f"{text} though both are on one Ethernet", better)
        else:
            yield note(Kind.WIFI, hop.about, text, "connect them by a Thunderbolt cable, or by Ethernet")
    elif here is not None and here.medium == MEDIUM_TUNNEL and cable:
        yield mend(Kind.INTERFACE, hop.about, f"{text} {is_there}", _use(receiver, MEDIUM_THUNDERBOLT))
    elif here is not None and here.medium == MEDIUM_TUNNEL:
        yield note(Kind.INTERFACE, hop.about, text, "use an address that the VPN does not take, or end it")
    elif here is not None and here.medium == MEDIUM_ETHERNET and cable:
        yield note(Kind.INTERFACE, hop.about, f"{text} {is_there}", _use(receiver, MEDIUM_THUNDERBOLT))
    else:
        yield ok(Kind.INTERFACE, hop.about, text)
    if cable:
        yield _cable(hop, cable, sender, receiver)


def _use(receiver: KnownNode, medium: int) -> str:
    """How to have another interface taken."""
    found = [address for each in receiver.interfaces if each.medium == medium for address in each.addresses]
    address = next((each for each in found if ":" not in each), None)
    if address:
        return f"put {address} and the port first in `address:` of {receiver.name} in cluster.yaml"
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


def _speed(hop: KnownHop, row_bytes: int) -> Iterator[Finding]:
    """What the hop takes of every token, and of a prompt."""
    if hop.rtt_ms is None or hop.bytes_per_s is None:
        yield note(Kind.UNMEASURED, hop.about, "its figures are none", "run doctor again; install the same version")
        return
    figures = f"round trip {format_ms(hop.rtt_ms)}, {_rate(hop.bytes_per_s)} by gRPC"
    text = f"{format_ms(ms_per_token(hop, row_bytes) or 0.0)} of each token ({figures})"
    if row_bytes and not hop.is_back:
        text += f"; {_PROMPT:,} tokens of a prompt {format_ms(_link(hop).ms(_PROMPT * row_bytes))}"
    fix = "a cable instead of Wi-Fi, no VPN, no switch that is busy; end what loads these Macs"
    if hop.rtt_ms > _VERY_SLOW_MS:
        yield mend(Kind.SPEED, hop.about, text, fix)
    elif hop.rtt_ms > _SLOW_MS or hop.bytes_per_s < _SLOW_BYTES_PER_S:
        yield note(Kind.SPEED, hop.about, text, fix)
    else:
        yield ok(Kind.SPEED, hop.about, text)


def _beside_plain(hop: KnownHop) -> Iterator[Finding]:
    """What plain sockets and unencrypted gRPC make of the same way."""
    assert hop.reply is not None
    lines = hop.reply.lines[: len(_PLAIN)]
    measured = [line for line in lines if not line.error and line.rtt_ms > 0 and line.bytes_per_s > 0]
    if failed := [f"{_PLAIN.get(line.transport, 'other')}: {line.error}" for line in lines if line not in measured]:
        fix = "a firewall between them that lets only known ports pass explains it; answers do not need this"
        yield note(Kind.UNMEASURED, hop.about, f"not measured: {'; '.join(failed)}", fix)
    if not measured:
        return
    text = "beside it: " + ", ".join(_of(line) for line in measured)
    plain = next((line.rtt_ms for line in measured if line.transport == TRANSPORT_TCP), None)
    if plain and (hop.rtt_ms or 0.0) > max(_DELAYED_MS, _DELAYED_TIMES * plain):
        fix = "look for a proxy, a VPN or a program that inspects connections; a busy Mac does it too"
        yield note(
            Kind.GRPC, hop.about, f"gRPC's round trip is {(hop.rtt_ms or 0.0) / plain:.0f} times TCP's; {text}", fix
        )
    else:
        yield ok(Kind.GRPC, hop.about, text)


def _of(line: Line) -> str:
    return f"{_PLAIN.get(line.transport, 'other')} {format_ms(line.rtt_ms)}, {_rate(line.bytes_per_s)}"


def _link(hop: KnownHop) -> Link:
    return Link(hop.rtt_ms or 0.0, hop.bytes_per_s or float("inf"))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
