"""The findings that follow from what doctor has collected. Pure: the same facts give the same findings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from coordinator.deploy.findings import (
    ExaminedCluster,
    ExaminedHop,
    ExaminedNode,
    Finding,
    Kind,
    graded,
    note,
    ok,
    problem,
)
from coordinator.planning.plan import MemoryOffer, Node, Objective, Plan, budgets
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed, NodeSpeed, Survey, format_ms
from protos.brigade_pb2 import (
    MEDIUM_ETHERNET,
    MEDIUM_LOOPBACK,
    MEDIUM_THUNDERBOLT,
    MEDIUM_TUNNEL,
    MEDIUM_UNSPECIFIED,
    MEDIUM_WIFI,
    TRANSPORT_GRPC,
    TRANSPORT_TCP,
    TRANSPORT_TLS,
    Facts,
    Interface,
    Medium,
    Transport,
    Way,
)
from worker.errors import CLOSED_AT_ONCE, NO_WORKER, BrigadeError, CallerRefused, ConfigError, ModelError, Unanswered
from worker.model.model_spec import ModelSpec
from worker.node.certificates import WARN_AHEAD, Role, reported_expiry
from worker.node.configuration import MOST_DIFFERENCES, differing
from worker.platform.text import counted, format_bytes

MAX_VERSIONS = 8  # shown of one node: it has four

_GIB, _MIB = 2**30, 2**20
_EXPIRES_SOON = timedelta(days=7)
_CLOCK_NOTED_S, _CLOCK_WRONG_S = 2.0, 86_400.0  # certificates are valid from a day before they were made
_DISK_NOTED, _DISK_FULL = 20 * _GIB, _GIB
_RDMA_MACOS, _RDMA_GBIT = (26, 2), 80.0
_LEFT_TO_MACOS, _LEFT_SHARE = 4 * _GIB, 8  # at least; at least one part in so many of the memory
_SLOW_MS, VERY_SLOW_MS = 1.0, 20.0  # round trips: a cable's is below the first, the other is as long as a token
_SLOW_BYTES_PER_S = 25e6  # a fifth of Gigabit Ethernet
_PROMPT = 1000  # tokens
_FREE = 1.25  # factor by which more rows may take longer than one and still count as free
_DELAYED_MS, _DELAYED_TIMES = 2.0, 4.0  # a round trip of gRPC above both, the latter times TCP's, is noted
_LEAST_MTU = 1500
_NO_NAME = -1  # Way.errno
_REFUSED = (61, 111)  # ECONNREFUSED on Darwin and on Linux
_NO_ROUTE_DARWIN = 65  # EHOSTUNREACH; without the permission for the local network, macOS returns it at once

_LOOK = "is it awake, the cable in, the address right (`ipconfig getifaddr bridge0` there), its firewall open?"
_FIX_MODEL = "correct --model or --draft-model, or `model:` or `draft_model:` in cluster.yaml"
_SAME_BRIGADE = "install the same version of Brigade on all nodes"
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


@dataclass(frozen=True)
class ModelInUse:
    """The model that the nodes are to hold, or why it cannot be read, and what is wanted of the plan."""

    spec: ModelSpec | None = None
    refusal: str = ""
    objective: Objective = Objective(4096)  # noqa: RUF009 - immutable

    @property
    def row_bytes(self) -> int:
        """Bytes of hidden state per token; 0 if the model is unknown."""
        return self.spec.row_bytes if self.spec else 0

    def plan_over(self, nodes: Sequence[Node], speeds: Survey = NO_SPEEDS) -> Plan:
        """Return the plan over all these nodes in this order, or with speeds over the best of them.

        Raises:
            ConfigError: as `plan` does.
        """
        assert self.spec is not None
        return plan(self.spec, nodes, speeds, self.objective)


def check_cluster(cluster: ExaminedCluster, model: ModelInUse, now: datetime) -> Iterator[Finding]:
    """Yield the findings of each node, of each hop, and of all nodes together."""
    coordinator = cluster.nodes[0]
    for node in cluster.nodes:
        if node.facts is None:
            yield _check_unreached(node, coordinator)
            continue
        for way in node.ways:
            if way.error:
                text = f"is not reached at {way.address} ({way.error}), but at another of its addresses"
                yield _blocked(node.name, way, coordinator) or note(Kind.UNREACHABLE, node.name, text, _LOOK)
        if node.error is not None:  # the coordinator's own certificate: it can ask no other node
            yield _check_trust(node, node.error, Role.COORDINATOR)
        yield from _check_node(node, node.facts, now, is_coordinator=node is coordinator)
        if node is not coordinator and coordinator.facts is not None:
            yield from _check_versions(node, node.facts, coordinator.facts)
            yield from _check_configuration(node, coordinator)
        if node.speed and model.spec:
            yield _check_rows(node.name, node.speed.gbps_by_rows(model.spec))
    for hop in cluster.hops:
        yield from _check_hop(hop, cluster, model.row_bytes)
    costs = [ms_per_token(hop, model.row_bytes) for hop in cluster.hops]
    known = [ms for ms in costs if ms is not None]
    if costs and len(known) == len(costs):
        text = f"{format_ms(sum(known))} of each token, in a chain as in the configuration"
        yield ok(Kind.CHAIN, "all hops", text)
    if model.refusal:
        yield problem(Kind.MODEL, coordinator.name, model.refusal, _FIX_MODEL)
    elif model.spec and all(node.facts and not node.error for node in cluster.nodes):
        yield from _check_plan(model.spec, cluster.nodes, model)


# Nodes


def _check_unreached(node: ExaminedNode, coordinator: ExaminedNode) -> Finding:
    """Return why a node could not be asked, as far as the coordinator can tell."""
    error = node.error
    text = error.message if error else "did not answer"
    if isinstance(error, ConfigError):
        return _check_trust(node, error, Role.WORKER)
    if isinstance(error, ModelError):
        return problem(Kind.BRIGADE, node.name, text, node.launch or _SAME_BRIGADE)
    if node.ways and all(way.error for way in node.ways):
        way = node.ways[0]
        if finding := _blocked(node.name, way, coordinator):
            return finding
        text, fix = f"{way.address}: {way.error}", f"{_LOOK} Then {node.start}"
        if way.errno in _REFUSED:
            text, fix = f"no worker listens at {way.address} (connection refused)", node.start
        elif way.errno == _NO_NAME:
            fix = "correct `address:`, or give the IP address"
    elif text == NO_WORKER or isinstance(error, CallerRefused):
        text, _, fix = text.partition("; ")
    elif text == CLOSED_AT_ONCE:
        fix = "give cluster.yaml here the `tls:` of the worker's file, and its cluster's keys; else read its log"
        if coordinator.facts and coordinator.facts.certificate_expires:
            issue = Role.COORDINATOR.issue_hint(coordinator.name)
            fix = f"its log tells which; a certificate that it takes: {issue}"
    else:
        text = f"{error.found if isinstance(error, Unanswered) else text}, though connections are accepted"
        start = f"{node.launch} --restart" if node.launch else node.start
        fix = (
            f"a worker that hangs or sleeps: wake or end it; another program: end it or use another port; then {start}"
        )
    return problem(Kind.UNREACHABLE, node.name, text, fix)


def _check_trust(node: ExaminedNode, error: BrigadeError, role: Role) -> Finding:
    """Return why a certificate does not serve: the error names the fix after a semicolon."""
    text, _, fix = error.message.partition("; ")
    return problem(Kind.CERTIFICATE, node.name, text, fix or node.launch or role.issue_hint(node.name))


def _blocked(about: str, way: Way, caller: ExaminedNode) -> Finding | None:
    """Return a finding if macOS seems to keep the caller out of the local network."""
    if not (caller.is_mac and way.errno == _NO_ROUTE_DARWIN):
        return None
    text = f"{way.address}: no route to host (errno 65) from {caller.name}"
    return problem(Kind.LOCAL_NETWORK, about, text, _ALLOW_LOCAL_NETWORK)


def _check_node(node: ExaminedNode, facts: Facts, now: datetime, *, is_coordinator: bool) -> Iterator[Finding]:
    yield _check_machine(node.name, facts)
    yield _check_disk(node.name, facts)
    if until := reported_expiry(facts.certificate_expires):
        yield _check_certificate(node, until, now, Role.COORDINATOR if is_coordinator else Role.WORKER)
    if node.clock_offset_s is not None:
        yield _check_clock(node.name, node.clock_offset_s)
    yield from _check_sleep(node.name, facts, is_coordinator=is_coordinator)
    if node.is_mac and facts.power.HasField("may_nap"):
        if facts.power.may_nap:
            text = "App Nap may slow down programs in a terminal whose window is hidden"
            fix = "defaults write NSGlobalDomain NSAppSleepDisabled -bool YES, or run the worker as a service"
            yield note(Kind.APP_NAP, node.name, text, fix)
        else:
            yield ok(Kind.APP_NAP, node.name, "App Nap is off")
    if facts.firewall in ("blocks all", "blocks this program"):  # a note: the node was reached all the same
        text = f"its firewall {facts.firewall}, according to its settings"
        fix = "System Settings, Network, Firewall, Options: allow incoming connections for Python"
        yield note(Kind.FIREWALL, node.name, text, fix)
    elif facts.firewall in ("on", "off"):
        yield ok(Kind.FIREWALL, node.name, f"its firewall is {facts.firewall}")
    if node.is_mac:
        yield _check_rdma(node, facts)
    if facts.unread:
        text = f"these commands gave no answer: {', '.join(facts.unread[:8])}"
        yield note(Kind.UNREAD, node.name, text, "run doctor again; if it persists, run them there in a terminal")


def _check_machine(name: str, facts: Facts) -> Finding:
    system = f"{'macOS' if facts.system == 'Darwin' else facts.system} {facts.system_version}"
    memory = f"{format_bytes(facts.memory_bytes)}, of which it offers {format_bytes(facts.budget_bytes)}"
    if facts.wired_limit_mb:
        memory += f" (iogpu.wired_limit_mb is {facts.wired_limit_mb})"
    versions = ", ".join(f"{package} {facts.versions[package]}" for package in sorted(facts.versions)[:MAX_VERSIONS])
    return ok(Kind.MACHINE, name, f"{facts.chip or 'unknown chip'}, {memory}; {system}; {versions}")


def _check_disk(name: str, facts: Facts) -> Finding:
    text = f"{format_bytes(facts.free_disk_bytes)} free for {facts.cache_folder}"
    fix = "free some space there, or move the folder with XDG_CACHE_HOME (and models with HF_HOME)"
    free = facts.free_disk_bytes
    return graded(Kind.DISK, name, text, fix, is_problem=free < _DISK_FULL, is_note=free < _DISK_NOTED)


def _check_certificate(node: ExaminedNode, until: datetime, now: datetime, role: Role) -> Finding:
    left = until - now
    text = f"its certificate expires on {until:%Y-%m-%d}, in {counted(left.days, 'day')}"
    fix = node.launch or f"{role.issue_hint(node.name)}, and copy the file to it"
    return graded(Kind.CERTIFICATE, node.name, text, fix, is_problem=left < _EXPIRES_SOON, is_note=left < WARN_AHEAD)


def _check_clock(name: str, offset_s: float) -> Finding:
    if abs(offset_s) < _CLOCK_NOTED_S:
        return ok(Kind.CLOCK, name, "its clock agrees with the coordinator's within two seconds")
    text = f"its clock is {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} the coordinator's"
    fix = "set the time automatically: System Settings, General, Date & Time; on Linux by NTP"
    if abs(offset_s) >= _CLOCK_WRONG_S:
        return problem(Kind.CLOCK, name, f"{text}: new certificates are refused", fix)
    return note(Kind.CLOCK, name, text, fix)


def _check_sleep(name: str, facts: Facts, *, is_coordinator: bool) -> Iterator[Finding]:
    power = facts.power
    if power.is_on_battery:
        yield note(Kind.SLEEP, name, "runs on battery: it may slow down, and sleeps with its lid", "connect power")
    if power.is_saving:
        fix = "sudo pmset -a lowpowermode 0, or powermode 0 where `pmset -g` shows that"
        yield note(Kind.SLEEP, name, "low power mode slows it down", fix)
    if not power.HasField("sleep_minutes"):
        if facts.system == "Linux":
            yield ok(Kind.SLEEP, name, "systemd may put it to sleep; its worker joins again after that")
    elif power.sleep_minutes == 0:
        yield ok(Kind.SLEEP, name, "does not fall asleep by itself")
    elif power.is_kept_awake or is_coordinator:
        kept = "commands and workers keep it awake while they run"
        yield ok(Kind.SLEEP, name, f"falls asleep after {power.sleep_minutes} min; {kept}")
    else:
        text = f"falls asleep after {power.sleep_minutes} min, and no worker seems to keep it awake"
        yield note(Kind.SLEEP, name, text, "sudo pmset -c sleep 0")


def _check_rdma(node: ExaminedNode, facts: Facts) -> Finding:
    """Return whether RDMA is enabled. It is never a problem: Brigade does not use it."""
    version = tuple(int(each) for each in facts.system_version.split(".")[:2] if each.isdecimal() and len(each) < 6)
    if facts.rdma == "enabled":
        state = f"RDMA over Thunderbolt is enabled ({', '.join(facts.rdma_devices[:8])})"
    elif version >= _RDMA_MACOS and any(port.gbit >= _RDMA_GBIT for port in node.ports):
        state = "RDMA over Thunderbolt could be enabled in Recovery"
    else:
        state = "no RDMA over Thunderbolt (macOS 26.2 and Thunderbolt 5 have it)"
    return ok(Kind.RDMA, node.name, f"{state}; Brigade's hops are TCP and do not use it")


def _check_versions(node: ExaminedNode, facts: Facts, own: Facts) -> Iterator[Finding]:
    """Yield where a worker's versions differ from the coordinator's."""
    name, same_brigade = node.name, node.launch or _SAME_BRIGADE
    theirs, ours = dict(facts.versions), dict(own.versions)
    if (found := theirs.get("brigade", "none")) != (expected := ours["brigade"]):
        yield problem(Kind.BRIGADE, name, f"has brigade {found}, the coordinator {expected}", same_brigade)
    elif facts.is_outdated:
        text = "its code was replaced on disk after it was started"
        yield problem(Kind.BRIGADE, name, text, "start the worker again")
    elif facts.code != own.code:
        text = f"has brigade {found} like the coordinator, but other files of it ({facts.code}, there {own.code})"
        yield note(Kind.BRIGADE, name, text, node.launch or "install Brigade from the same sources on all nodes")
    for package in ("mlx", "mlx-lm"):
        if (found := theirs.get(package, "none")) != (expected := ours[package]):
            text = f"has {package} {found}, the coordinator {expected}: tokens may differ from those of one Mac"
            fix = node.launch or f"there: pip install {package}=={expected}, or the same install on all"
            yield note(Kind.MLX, name, text, fix)
    python, own_python = theirs.get("python", "none"), ours["python"]
    if python.split(".")[:2] != own_python.split(".")[:2]:
        text = f"runs Python {python}, the coordinator {own_python}"
        yield note(Kind.PYTHON, name, text, "it works; the same version on all nodes rules it out as a cause")


def _check_configuration(node: ExaminedNode, coordinator: ExaminedNode) -> Iterator[Finding]:
    """Yield where a worker has another name or another cluster.yaml than the coordinator, whose copy counts."""
    if (name := node.configuration.name) not in ("", node.name):
        text = f"calls itself {name}: either its name or the address here is wrong"
        fix = f"there: brigade worker --name {node.name}, or correct `address:`"
        yield problem(Kind.CONFIGURATION, node.name, text, fix)
    fix = node.launch or "copy the coordinator's cluster.yaml to it, and start it again"
    found = differing(node.configuration, coordinator.configuration)
    for key, there, here in found[:MOST_DIFFERENCES]:
        text = f"its cluster.yaml has `{key}: {there}`; the coordinator's counts, in which it is {here}"
        yield note(Kind.CONFIGURATION, node.name, text, fix)
    if more := found[MOST_DIFFERENCES:]:
        keys = counted(len(more), "more key of its cluster.yaml differs", "more keys of its cluster.yaml differ")
        yield note(Kind.CONFIGURATION, node.name, keys, fix)


# Hops


def ms_per_token(hop: ExaminedHop, row_bytes: int) -> float | None:
    """Return the milliseconds of one row of hidden states, or of a few bytes back; None if not measured."""
    return None if hop.rtt_ms is None else _link(hop).ms(0 if hop.is_back else row_bytes)


def _link(hop: ExaminedHop) -> LinkSpeed:
    return LinkSpeed(hop.rtt_ms or 0.0, hop.bytes_per_s or float("inf"))


def _check_hop(hop: ExaminedHop, cluster: ExaminedCluster, row_bytes: int) -> Iterator[Finding]:
    """Yield whether a connection is possible, which way it takes, and what it costs."""
    sender, receiver = cluster.by_name[hop.source], cluster.by_name[hop.target]
    if hop.error is not None:
        fix = f"end and start the workers of this hop again; {hop.source} has to reach {hop.target}"
        yield problem(Kind.UNREACHABLE, hop.about, hop.error.message, fix)
    elif hop.reply is None:
        yield note(Kind.UNMEASURED, hop.about, "not measured", "fix the findings about these nodes")
    elif hop.reply.way.error:
        way = hop.reply.way
        fix = f"make {hop.target} reachable at {way.address} from {hop.source}: same network or cable, no firewall"
        text = f"{way.address}: {way.error}"
        yield _blocked(hop.about, way, sender) or problem(Kind.UNREACHABLE, hop.about, text, fix)
    else:
        yield from _check_way(hop, hop.reply.way, sender, receiver)
        yield _check_speed(hop, row_bytes)
        yield from _check_transports(hop)


def _check_way(hop: ExaminedHop, way: Way, sender: ExaminedNode, receiver: ExaminedNode) -> Iterator[Finding]:
    here, there = sender.interface_with(way.local), receiver.interface_with(way.remote)
    yield _check_interface(hop, here, there, sender, receiver)
    if cable := sender.cable_to(receiver):
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
        fix = "set both to the same size: networksetup -setMTU"
        yield note(Kind.MTU, hop.about, f"{sizes} differ: large packets may be lost", fix)
    elif here.mtu < _LEAST_MTU:
        yield note(Kind.MTU, hop.about, f"{sizes} are below {_LEAST_MTU}", "is a VPN or a tunnel between them?")


def _check_interface(
    hop: ExaminedHop, here: Interface | None, there: Interface | None, sender: ExaminedNode, receiver: ExaminedNode
) -> Finding:
    """Return which interfaces the hop takes, and a better one if there is one."""
    media = [end.medium for end in (here, there) if end]
    worst = next((medium for medium in (MEDIUM_TUNNEL, MEDIUM_WIFI) if medium in media), media[0] if media else None)
    text = f"takes {_interface_text(here)}"
    if here and there and here.medium != there.medium:
        text += f", at {hop.target} {_interface_text(there)}"
    better = None
    if worst in (MEDIUM_TUNNEL, MEDIUM_WIFI, MEDIUM_ETHERNET) and sender.cable_to(receiver):
        better = _use(sender, receiver, MEDIUM_THUNDERBOLT)
        text += " though a Thunderbolt cable is there"
    elif worst == MEDIUM_WIFI and _share_ethernet(sender, receiver):
        better = _use(sender, receiver, MEDIUM_ETHERNET)
        text += " though both are on one Ethernet"
    advice = {
        MEDIUM_WIFI: "connect them by a Thunderbolt cable, or by Ethernet",
        MEDIUM_TUNNEL: "use an address that the VPN does not take, or end it",
    }.get(worst or MEDIUM_UNSPECIFIED, "")
    kind, fix = Kind.WIFI if worst == MEDIUM_WIFI else Kind.INTERFACE, better or advice
    return graded(kind, hop.about, text, fix, is_problem=bool(better and advice), is_note=bool(fix))


def _interface_text(end: Interface | None) -> str:
    if end is None:
        return "an unknown interface"
    medium = _MEDIA.get(end.medium, "an interface of unknown kind")
    return medium if end.medium == MEDIUM_LOOPBACK else f"{end.port or medium} ({end.name}, MTU {end.mtu})"


def _use(sender: ExaminedNode, receiver: ExaminedNode, medium: Medium) -> str:
    """Return how to make the hop take another interface of the receiver: one on a network of the sender, if any is."""
    near, far = _networks(sender, medium), _networks(receiver, medium)
    shared = [address for network, address in far.items() if network in near]
    found = [address for each in receiver.interfaces if each.medium == medium for address in each.addresses]
    if address := next((each for each in (*shared, *found) if ":" not in each), None):
        return f"put {address} and the port first in `address:` of {receiver.name} in cluster.yaml, on both nodes"
    return "give both an address on it: System Settings, Network, Thunderbolt Bridge, TCP/IP"


def _share_ethernet(sender: ExaminedNode, receiver: ExaminedNode) -> bool:
    """Return whether both have an active Ethernet interface with addresses of one /24."""
    return bool(_networks(sender, MEDIUM_ETHERNET).keys() & _networks(receiver, MEDIUM_ETHERNET).keys())


def _networks(node: ExaminedNode, medium: Medium) -> dict[str, str]:
    """Return an IPv4 address of the node in each /24 that its active interfaces of this medium are on."""
    return {
        address.rpartition(".")[0]: address
        for each in node.interfaces
        if each.medium == medium and each.is_active
        for address in each.addresses
        if ":" not in address
    }


def _check_rows(name: str, gbps: Mapping[int, float]) -> Finding:
    """Return how fast the node reads the model's layers, and up to how many rows of a frame that costs no more."""
    one, *more = gbps
    free = max(rows for rows in gbps if _FREE * gbps[rows] >= gbps[one])
    by_rows = "".join(f", {_short(gbps[rows])} with {rows}" for rows in more)
    end = f": up to {free} rows take about as long as one"
    if free == one:
        end = f": {more[0]} rows take {gbps[one] / gbps[more[0]]:.1f} x as long as one" if more else ""
    return ok(Kind.ROWS, name, f"layers at {_short(gbps[one])} GB/s with {one} row{by_rows}{end}")


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def _check_speed(hop: ExaminedHop, row_bytes: int) -> Finding:
    """Return what the hop takes of every token, and of a prompt."""
    if hop.rtt_ms is None or hop.bytes_per_s is None:
        text = "its measurements are not positive numbers"
        return note(Kind.UNMEASURED, hop.about, text, "run doctor again; install the same version")
    text = f"{format_ms(ms_per_token(hop, row_bytes) or 0.0)} of each token"
    text += f" (round trip {format_ms(hop.rtt_ms)}, {_rate(hop.bytes_per_s)} by gRPC)"
    if row_bytes and not hop.is_back:
        text += f"; {_PROMPT:,} tokens of a prompt {format_ms(_link(hop).ms(_PROMPT * row_bytes))}"
    fix = "use a cable instead of Wi-Fi, no VPN and no busy switch; end other programs that load these Macs"
    is_slow = hop.rtt_ms > _SLOW_MS or hop.bytes_per_s < _SLOW_BYTES_PER_S
    return graded(Kind.SPEED, hop.about, text, fix, is_problem=hop.rtt_ms > VERY_SLOW_MS, is_note=is_slow)


def _check_transports(hop: ExaminedHop) -> Iterator[Finding]:
    """Yield how fast plain sockets and unencrypted gRPC are on the same way."""
    assert hop.reply is not None
    lines = [(_TRANSPORTS.get(line.transport, "other"), line) for line in hop.reply.lines[: len(_TRANSPORTS)]]
    good = [(name, line) for name, line in lines if not line.error and line.rtt_ms > 0 and line.bytes_per_s > 0]
    if failed := [f"{name}: {line.error}" for name, line in lines if (name, line) not in good]:
        fix = "answers do not need this; a firewall between them may let only known ports pass"
        yield note(Kind.UNMEASURED, hop.about, f"not measured: {'; '.join(failed)}", fix)
    if not lines:
        yield note(Kind.UNMEASURED, hop.about, f"only gRPC was measured: {hop.target} opened no port")
    if not good:
        return
    speeds = [f"{name} {format_ms(line.rtt_ms)}, {_rate(line.bytes_per_s)}" for name, line in good]
    text = f"for comparison: {', '.join(speeds)}"
    tcp_ms = next((line.rtt_ms for _, line in good if line.transport == TRANSPORT_TCP), None)
    grpc_ms = hop.rtt_ms or 0.0
    if tcp_ms and grpc_ms > max(_DELAYED_MS, _DELAYED_TIMES * tcp_ms):
        text = f"gRPC's round trip is {grpc_ms / tcp_ms:.0f} times TCP's; {text}"
        fix = "look for a proxy, a VPN or a program that inspects connections; a busy Mac has the same effect"
        yield note(Kind.GRPC, hop.about, text, fix)
    else:
        yield ok(Kind.GRPC, hop.about, text)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


# The plan


def offers_of(nodes: Sequence[ExaminedNode]) -> list[Node]:
    """Return what each node can hold, for a plan by memory alone."""
    offered = [
        MemoryOffer(node.facts.budget_bytes if node.facts else 0, node.configured_bytes, node.is_here) for node in nodes
    ]
    return [Node(node.name, memory) for node, memory in zip(nodes, budgets(offered[0], offered[1:]), strict=True)]


def _check_plan(spec: ModelSpec, nodes: Sequence[ExaminedNode], model: ModelInUse) -> Iterator[Finding]:
    """Yield whether the model fits, by memory alone."""
    offers = offers_of(nodes)
    try:
        found = model.plan_over(offers)
    except ConfigError as error:
        fix = "correct `layers:` or the number of workers in cluster.yaml"
        yield problem(Kind.PLAN, "all nodes", error.message, fix)
        return
    is_by_speed = not all(node.is_here for node in nodes[1:])  # else nodes keep this order
    equally_fast = Survey(dict.fromkeys((node.name for node in nodes), NodeSpeed.assumed(spec, gbps=100)))
    if not found.fits and is_by_speed and (other := model.plan_over(offers, equally_fast)).fits:
        found = other
    context = f"{model.objective.context:,} tokens of context"
    if found.fits and found.names == [node.name for node in nodes]:
        yield ok(Kind.MEMORY, "all nodes", f"{spec.name} fits, with {context}")
        return
    if found.fits:
        how = f"does not fit on all nodes in this order, but it fits as {found}: no answer was tried"
        text = f"{spec.name} with {context} {how}"
        yield note(Kind.MEMORY, "all nodes", text, "leave it so, or free memory on the others")
        return
    shares_machine = [each.is_here or (each is nodes[0] and any(node.is_here for node in nodes)) for each in nodes]
    raised = [
        now if is_shared else Node(now.name, max(now.memory_bytes, _raised_budget(node)))
        for node, now, is_shared in zip(nodes, offers, shares_machine, strict=True)
    ]
    wider = model.plan_over(raised)
    if wider.fits:
        yield from _raised_limits(wider, offers, nodes)
        return
    text = f"{spec.name} with {context} does not fit: {found.lacking}"
    fix = "more nodes, a model of fewer bits, or fewer tokens (`context:`)"
    yield problem(Kind.MEMORY, "all nodes", text, fix)


def _raised_budget(node: ExaminedNode) -> int:
    """Return the bytes a Mac can offer once its wired limit is as high as is sensible; 0 if the user has set them."""
    facts = node.facts
    if facts is None or node.configured_bytes or not node.is_mac or not facts.working_set_bytes:
        return 0
    sensible = facts.memory_bytes - max(_LEFT_TO_MACOS, facts.memory_bytes // _LEFT_SHARE)
    return int(sensible * _offered_share(facts))


def _offered_share(facts: Facts) -> float:
    """Return which part of Metal's recommended working set this node offers."""
    return min(1.0, facts.budget_bytes / facts.working_set_bytes)


def _raised_limits(wider: Plan, offers: Sequence[Node], nodes: Sequence[ExaminedNode]) -> Iterator[Finding]:
    """Yield, for each Mac that has to offer more, the command that lets it."""
    for assignment, now, node in zip(wider.assignments, offers, nodes, strict=True):
        if assignment.needed_bytes > now.memory_bytes and node.facts is not None:
            limit = math.ceil(assignment.needed_bytes / _offered_share(node.facts) / _MIB)
            text = f"has to hold {format_bytes(assignment.needed_bytes)}, offers {format_bytes(now.memory_bytes)}"
            fix = f"there: sudo sysctl iogpu.wired_limit_mb={limit} (until it restarts), and start the worker again"
            yield problem(Kind.WIRED_LIMIT, node.name, text, fix)
