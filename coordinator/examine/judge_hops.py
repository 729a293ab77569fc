"""What is to be said of each hop: whether there is a way, and what it costs every token. Pure."""

from collections.abc import Iterator, Sequence

from coordinator.examine.finding import Finding, Kind, mend, note, ok
from coordinator.examine.judge_reach import blocked
from coordinator.examine.judge_way import judge_way
from coordinator.examine.known import Known, KnownHop
from coordinator.planning.outlook import format_ms
from coordinator.planning.speeds import Link
from protos.brigade_pb2 import TRANSPORT_GRPC, TRANSPORT_TCP, TRANSPORT_TLS, Line, Transport

_SLOW_MS, _VERY_SLOW_MS = 1.0, 20.0  # round trips: a cable's is below the first, the other is as long as a token
_SLOW_BYTES_PER_S = 25e6  # a fifth of Gigabit Ethernet
_PROMPT = 1000  # tokens
_DELAYED_MS, _DELAYED_TIMES = 2.0, 4.0  # what gRPC may take beside plain TCP
_PLAIN: dict[Transport, str] = {
    TRANSPORT_TCP: "bare TCP", TRANSPORT_TLS: "bare TLS", TRANSPORT_GRPC: "gRPC without TLS",
}  # fmt: skip


def judge_hop(hop: KnownHop, known: Known, row_bytes: int) -> Iterator[Finding]:
    """All findings of one hop; `row_bytes` of hidden state travel per token, none if no model is known."""
    sender, receiver = known.by_name[hop.source], known.by_name[hop.target]
    if hop.error is not None:
        fix = f"end and start the workers of this hop again; {hop.source} has to reach {hop.target}"
        yield mend(Kind.UNREACHABLE, hop.about, hop.error.message, fix)
        return
    if hop.reply is None:
        yield note(Kind.UNMEASURED, hop.about, "not measured", "mend what is said of these nodes")
        return
    way = hop.reply.way
    if way.error:
        fix = f"let {hop.target} be reached at {way.address} from {hop.source}: same network or cable, no firewall"
        yield blocked(hop.about, way, sender) or mend(Kind.UNREACHABLE, hop.about, f"{way.address}: {way.error}", fix)
        return
    yield from judge_way(hop, way, sender, receiver)
    yield from _speed(hop, row_bytes)
    yield from _beside_plain(hop)


def judge_chain(hops: Sequence[KnownHop], row_bytes: int) -> Iterator[Finding]:
    """What all hops take of a token together."""
    one_way = [ms_per_token(hop, row_bytes) for hop in hops]
    known = [ms for ms in one_way if ms is not None]
    if hops and len(known) == len(hops):
        text = f"{format_ms(sum(known))} of each token, in a chain as in the configuration"
        yield ok(Kind.CHAIN, "all hops", text)


def ms_per_token(hop: KnownHop, row_bytes: int) -> float | None:
    """One way, of one row of hidden states, back of a few bytes; None where it was not measured."""
    return None if hop.rtt_ms is None else _link(hop).ms(0 if hop.is_back else row_bytes)


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
    if not lines:
        yield note(Kind.UNMEASURED, hop.about, f"nothing beside gRPC was measured: {hop.target} opened no port")
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
