"""What doctor finds about a hop: whether a connection is possible, which way it takes, and what it costs. Pure."""

from collections.abc import Iterator, Sequence

from coordinator.deploy.findings import (
    ExaminedCluster,
    ExaminedHop,
    ExaminedNode,
    Finding,
    Kind,
    note,
    ok,
    problem,
)
from coordinator.planning.speeds import LinkSpeed, format_ms
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
    Medium,
    ThunderboltPort,
    Transport,
    Way,
)

_SLOW_MS, _VERY_SLOW_MS = 1.0, 20.0  # round trips: a cable's is below the first, the other is as long as a token
_SLOW_BYTES_PER_S = 25e6  # a fifth of Gigabit Ethernet
_PROMPT = 1000  # tokens
_DELAYED_MS, _DELAYED_TIMES = 2.0, 4.0  # what gRPC may take beside plain TCP
_LEAST_MTU = 1500
_NO_ROUTE_DARWIN = 65  # EHOSTUNREACH; without the permission for the local network, macOS returns it at once
_ALLOW_LOCAL_NETWORK = (
    "System Settings, Privacy & Security, Local Network: allow the program that runs it; "
    "Terminal and ssh need no permission (Apple TN3179)"
)
_TRANSPORTS: dict[Transport, str] = {
    TRANSPORT_TCP: "bare TCP", TRANSPORT_TLS: "bare TLS", TRANSPORT_GRPC: "gRPC without TLS",
}  # fmt: skip
_MEDIA: dict[Medium, str] = {
    MEDIUM_LOOPBACK: "loopback, within one machine", MEDIUM_THUNDERBOLT: "Thunderbolt", MEDIUM_ETHERNET: "Ethernet",
    MEDIUM_WIFI: "Wi-Fi", MEDIUM_TUNNEL: "a VPN",
}  # fmt: skip


def check_hop(hop: ExaminedHop, cluster: ExaminedCluster, row_bytes: int) -> Iterator[Finding]:
    """Yield the findings of one hop; `row_bytes` of hidden state travel per token, 0 if no model is known."""
    sender, receiver = cluster.by_name[hop.source], cluster.by_name[hop.target]
    if hop.error is not None:
        fix = f"end and start the workers of this hop again; {hop.source} has to reach {hop.target}"
        yield problem(Kind.UNREACHABLE, hop.about, hop.error.message, fix)
        return
    if hop.reply is None:
        yield note(Kind.UNMEASURED, hop.about, "not measured", "fix what is said of these nodes")
        return
    way = hop.reply.way
    if way.error:
        fix = f"let {hop.target} be reached at {way.address} from {hop.source}: same network or cable, no firewall"
        text = f"{way.address}: {way.error}"
        yield blocked(hop.about, way, sender) or problem(Kind.UNREACHABLE, hop.about, text, fix)
        return
    yield from _check_way(hop, way, sender, receiver)
    yield _check_speed(hop, row_bytes)
    yield from _check_transports(hop)


def check_chain(hops: Sequence[ExaminedHop], row_bytes: int) -> Iterator[Finding]:
    """Yield what all hops take of a token together."""
    costs = [ms_per_token(hop, row_bytes) for hop in hops]
    known = [ms for ms in costs if ms is not None]
    if hops and len(known) == len(hops):
        text = f"{format_ms(sum(known))} of each token, in a chain as in the configuration"
        yield ok(Kind.CHAIN, "all hops", text)


def ms_per_token(hop: ExaminedHop, row_bytes: int) -> float | None:
    """Return the milliseconds of one row of hidden states, or of a few bytes back; None if not measured."""
    return None if hop.rtt_ms is None else _link(hop).ms(0 if hop.is_back else row_bytes)


def blocked(about: str, way: Way, caller: ExaminedNode) -> Finding | None:
    """Return a finding if macOS seems to keep the caller out of the local network."""
    if not (caller.is_mac and way.errno == _NO_ROUTE_DARWIN):
        return None
    text = f"{way.address}: no route to host (errno 65) from {caller.name}"
    return problem(Kind.LOCAL_NETWORK, about, text, _ALLOW_LOCAL_NETWORK)


def cable_between(sender: ExaminedNode, receiver: ExaminedNode) -> ThunderboltPort | None:
    """Return the sender's port whose other end is the receiver's, by what the ports of both say."""
    theirs = {port.id for port in receiver.ports if port.id}
    return next((port for port in sender.ports if port.is_connected and port.peer_id in theirs), None)


def _check_way(hop: ExaminedHop, way: Way, sender: ExaminedNode, receiver: ExaminedNode) -> Iterator[Finding]:
    here, there = sender.interface_with(way.local), receiver.interface_with(way.remote)
    cable = cable_between(sender, receiver)
    yield _check_interface(hop, here, there, cable, sender, receiver)
    if cable:
        best = min(max((port.gbit for port in node.ports), default=0.0) for node in (sender, receiver))
        symmetric = min(best, 80.0)  # Thunderbolt 5 does 120 one way, with 40 the other
        generation = "5" if cable.gbit >= 80 else "3 or 4" if cable.gbit >= 40 else "2, or a slow cable"
        text = f"Thunderbolt cable between them: {cable.gbit:g} Gb/s (Thunderbolt {generation})"
        if 0 < cable.gbit < symmetric:
            fix = "use a cable made for the faster Thunderbolt, at most 1 m if it is passive, directly between both"
            yield note(Kind.THUNDERBOLT, hop.about, f"{text}, though both can do {symmetric:g}", fix)
        else:
            yield ok(Kind.THUNDERBOLT, hop.about, text)
    if not (here and there and here.mtu and there.mtu) or MEDIUM_LOOPBACK in (here.medium, there.medium):
        return
    sizes = f"MTU {here.mtu} ({here.name} of {hop.source}) and {there.mtu} ({there.name} of {hop.target})"
    if here.mtu != there.mtu:
        fix = "set both alike: networksetup -setMTU"
        yield note(Kind.MTU, hop.about, f"{sizes} differ: large packets may be lost", fix)
    elif here.mtu < _LEAST_MTU:
        yield note(Kind.MTU, hop.about, f"{sizes} are below {_LEAST_MTU}", "is a VPN or a tunnel between them?")


def _check_interface(
    hop: ExaminedHop,
    here: Interface | None,
    there: Interface | None,
    cable: ThunderboltPort | None,
    sender: ExaminedNode,
    receiver: ExaminedNode,
) -> Finding:
    """Return what the hop takes at both ends, and what to take instead."""
    media = [end.medium for end in (here, there) if end]
    worst = next((medium for medium in (MEDIUM_TUNNEL, MEDIUM_WIFI) if medium in media), media[0] if media else None)
    text = f"takes {_interface_text(here)}"
    if here and there and here.medium != there.medium:
        text += f", at {hop.target} {_interface_text(there)}"
    beside_cable, use_cable = f"{text} though a Thunderbolt cable is there", _use(receiver, MEDIUM_THUNDERBOLT)
    if worst == MEDIUM_WIFI:
        if cable:
            return problem(Kind.WIFI, hop.about, beside_cable, use_cable)
        if _share_ethernet(sender, receiver):
            text += " though both are on one Ethernet"
            return problem(Kind.WIFI, hop.about, text, _use(receiver, MEDIUM_ETHERNET))
        return note(Kind.WIFI, hop.about, text, "connect them by a Thunderbolt cable, or by Ethernet")
    if worst == MEDIUM_TUNNEL:
        if cable:
            return problem(Kind.INTERFACE, hop.about, beside_cable, use_cable)
        return note(Kind.INTERFACE, hop.about, text, "use an address that the VPN does not take, or end it")
    if worst == MEDIUM_ETHERNET and cable:
        return note(Kind.INTERFACE, hop.about, beside_cable, use_cable)
    return ok(Kind.INTERFACE, hop.about, text)


def _interface_text(end: Interface | None) -> str:
    if end is None:
        return "an unknown interface"
    medium = _MEDIA.get(end.medium, "an interface of unknown kind")
    return medium if end.medium == MEDIUM_LOOPBACK else f"{end.port or medium} ({end.name}, MTU {end.mtu})"


def _use(receiver: ExaminedNode, medium: Medium) -> str:
    """Return how to have another interface of the receiver taken."""
    found = [address for each in receiver.interfaces if each.medium == medium for address in each.addresses]
    if address := next((each for each in found if ":" not in each), None):
        return f"put {address} and the port first in `address:` of {receiver.name} in cluster.yaml, on both nodes"
    return "give both an address on it: System Settings, Network, Thunderbolt Bridge, TCP/IP"


def _share_ethernet(sender: ExaminedNode, receiver: ExaminedNode) -> bool:
    """Return whether both have an active Ethernet interface with addresses of one /24."""
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


def _check_speed(hop: ExaminedHop, row_bytes: int) -> Finding:
    """Return what the hop takes of every token, and of a prompt."""
    if hop.rtt_ms is None or hop.bytes_per_s is None:
        return note(Kind.UNMEASURED, hop.about, "its figures are none", "run doctor again; install the same version")
    figures = f"round trip {format_ms(hop.rtt_ms)}, {_rate(hop.bytes_per_s)} by gRPC"
    text = f"{format_ms(ms_per_token(hop, row_bytes) or 0.0)} of each token ({figures})"
    if row_bytes and not hop.is_back:
        text += f"; {_PROMPT:,} tokens of a prompt {format_ms(_link(hop).ms(_PROMPT * row_bytes))}"
    fix = "a cable instead of Wi-Fi, no VPN, no switch that is busy; end what loads these Macs"
    if hop.rtt_ms > _VERY_SLOW_MS:
        return problem(Kind.SPEED, hop.about, text, fix)
    if hop.rtt_ms > _SLOW_MS or hop.bytes_per_s < _SLOW_BYTES_PER_S:
        return note(Kind.SPEED, hop.about, text, fix)
    return ok(Kind.SPEED, hop.about, text)


def _check_transports(hop: ExaminedHop) -> Iterator[Finding]:
    """Yield what plain sockets and unencrypted gRPC make of the same way."""
    assert hop.reply is not None
    lines = hop.reply.lines[: len(_TRANSPORTS)]
    good = [line for line in lines if not line.error and line.rtt_ms > 0 and line.bytes_per_s > 0]
    if failed := [f"{_TRANSPORTS.get(line.transport, 'other')}: {line.error}" for line in lines if line not in good]:
        fix = "a firewall between them that lets only known ports pass explains it; answers do not need this"
        yield note(Kind.UNMEASURED, hop.about, f"not measured: {'; '.join(failed)}", fix)
    if not lines:
        yield note(Kind.UNMEASURED, hop.about, f"nothing beside gRPC was measured: {hop.target} opened no port")
    if not good:
        return
    text = "beside it: " + ", ".join(_line_text(line) for line in good)
    plain = next((line.rtt_ms for line in good if line.transport == TRANSPORT_TCP), None)
    if plain and (hop.rtt_ms or 0.0) > max(_DELAYED_MS, _DELAYED_TIMES * plain):
        text = f"gRPC's round trip is {(hop.rtt_ms or 0.0) / plain:.0f} times TCP's; {text}"
        fix = "look for a proxy, a VPN or a program that inspects connections; a busy Mac does it too"
        yield note(Kind.GRPC, hop.about, text, fix)
    else:
        yield ok(Kind.GRPC, hop.about, text)


def _line_text(line: Line) -> str:
    return f"{_TRANSPORTS.get(line.transport, 'other')} {format_ms(line.rtt_ms)}, {_rate(line.bytes_per_s)}"


def _link(hop: ExaminedHop) -> LinkSpeed:
    return LinkSpeed(hop.rtt_ms or 0.0, hop.bytes_per_s or float("inf"))


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
