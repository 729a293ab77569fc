"""All findings that follow from what doctor has collected. Pure: the same facts give the same findings."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from coordinator.deploy.findings import (
    ExaminedCluster,
    ExaminedNode,
    Finding,
    Kind,
    note,
    ok,
    problem,
)
from coordinator.deploy.hop_checks import blocked, check_chain, check_hop
from coordinator.planning.plan import MemoryOffer, Node, Objective, Plan, budgets
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NOTHING_KNOWN
from protos.brigade_pb2 import Facts, Way
from worker.errors import CLOSED_AT_ONCE, ConfigError, ModelError, Unanswered
from worker.model.modelspec import ModelSpec
from worker.node.configuration import differing
from worker.node.identity import TOLD_AHEAD, Role, expiry_told
from worker.platform.text import format_bytes

MAX_VERSIONS = 8  # that are shown of one node: it has four

_GIB, _MIB = 2**30, 2**20
_EXPIRES_SOON = timedelta(days=7)
_CLOCK_NOTED_S, _CLOCK_WRONG_S = 2.0, 86_400.0  # certificates are valid from a day before they were made
_DISK_NOTED, _DISK_FULL = 20 * _GIB, _GIB
_RDMA_MACOS, _RDMA_GBIT = (26, 2), 80.0
_LEFT_TO_MACOS, _LEFT_SHARE = 4 * _GIB, 8  # of the memory, at least; one part in so many
_MAX_DIFFERENCES = 5  # between two copies of cluster.yaml
_NO_NAME = -1  # Way.errno
_REFUSED = (61, 111)  # ECONNREFUSED on Darwin and on Linux
_LOOK = "is it awake, the cable in, the address right (`ipconfig getifaddr bridge0` there), its firewall open?"
_SAME_BRIGADE = "install the same version of Brigade on all nodes"


@dataclass(frozen=True)
class ModelInUse:
    """What the nodes are to hold: the model, or why it cannot be read, and the plan's terms."""

    spec: ModelSpec | None = None
    refusal: str = ""
    context: int = 4096  # tokens
    layers: tuple[int, ...] | None = None

    @property
    def row_bytes(self) -> int:
        return self.spec.row_bytes if self.spec else 0


def check_cluster(cluster: ExaminedCluster, model: ModelInUse, now: datetime) -> list[Finding]:
    """Return the findings of each node, of each hop, and of all nodes together."""
    return list(_check_cluster(cluster, model, now))


def _check_cluster(cluster: ExaminedCluster, model: ModelInUse, now: datetime) -> Iterator[Finding]:
    coordinator = cluster.nodes[0]
    for node in cluster.nodes:
        if node.facts is None:
            yield _check_unreached(node, coordinator)
            continue
        for way in node.ways:
            if way.error:
                text = f"is not reached at {way.address} ({way.error}), but at another of its addresses"
                yield blocked(node.name, way, coordinator) or note(Kind.UNREACHABLE, node.name, text, _LOOK)
        if node.error is not None:  # the coordinator's own certificate: it can ask no other node
            yield problem(Kind.CERTIFICATE, node.name, node.error.message, Role.COORDINATOR.way_to_issue(node.name))
        yield from _check_node(node, node.facts, now, is_coordinator=node is coordinator)
        if node is not coordinator and coordinator.facts is not None:
            yield from _check_versions(node.name, node.facts, coordinator.facts)
            yield from _check_configuration(node, node.facts, coordinator)
    for hop in cluster.hops:
        yield from check_hop(hop, cluster, model.row_bytes)
    yield from check_chain(cluster.hops, model.row_bytes)
    if model.refusal:
        yield problem(Kind.MODEL, coordinator.name, model.refusal, "correct --model, or `model:` in cluster.yaml")
    elif model.spec and all(node.facts and not node.error for node in cluster.nodes):
        yield from _check_plan(model.spec, cluster.nodes, model.context, model.layers)


def _check_unreached(node: ExaminedNode, coordinator: ExaminedNode) -> Finding:
    """Return why a node could not be asked, as far as can be told from here."""
    error = node.error
    text = error.message if error else "did not answer"
    if isinstance(error, ConfigError):
        return problem(Kind.CERTIFICATE, node.name, text, Role.WORKER.way_to_issue(node.name))
    if isinstance(error, ModelError):
        return problem(Kind.BRIGADE, node.name, text, _SAME_BRIGADE)
    if node.ways and all(way.error for way in node.ways):
        way = node.ways[0]
        return blocked(node.name, way, coordinator) or _check_unconnected(node, way)
    if text == CLOSED_AT_ONCE:
        fix = "give cluster.yaml here the `tls:` that the worker has, and its cluster's keys; else its log tells why"
        if coordinator.facts and coordinator.facts.certificate_expires:
            issue = Role.COORDINATOR.way_to_issue(coordinator.name)
            fix = f"its log tells which; a certificate that it takes: {issue}"
        return problem(Kind.UNREACHABLE, node.name, text, fix)
    text = f"{error.found if isinstance(error, Unanswered) else text}, though connections are accepted"
    fix = f"it hangs, sleeps, or is no worker: wake or end it; then {node.start}"
    return problem(Kind.UNREACHABLE, node.name, text, fix)


def _check_unconnected(node: ExaminedNode, way: Way) -> Finding:
    if way.errno in _REFUSED:
        text = f"no worker listens at {way.address} (connection refused)"
        return problem(Kind.UNREACHABLE, node.name, text, node.start)
    fix = "correct `address:`, or give the IP address" if way.errno == _NO_NAME else f"{_LOOK} Then {node.start}"
    return problem(Kind.UNREACHABLE, node.name, f"{way.address}: {way.error}", fix)


def _check_node(node: ExaminedNode, facts: Facts, now: datetime, *, is_coordinator: bool) -> Iterator[Finding]:
    yield _check_machine(node.name, facts)
    yield _check_disk(node.name, facts)
    yield from _check_certificate(node.name, facts, now, Role.COORDINATOR if is_coordinator else Role.WORKER)
    if node.clock_offset_s is not None:
        yield _check_clock(node.name, node.clock_offset_s)
    yield from _check_sleep(node.name, facts, is_coordinator=is_coordinator)
    if node.is_mac and facts.power.HasField("may_nap"):
        if facts.power.may_nap:
            text = "App Nap may slow down what runs in a terminal that is hidden"
            fix = "defaults write NSGlobalDomain NSAppSleepDisabled -bool YES, or run the worker as a service"
            yield note(Kind.APP_NAP, node.name, text, fix)
        else:
            yield ok(Kind.APP_NAP, node.name, "App Nap is off")
    if facts.firewall in ("blocks all", "blocks this program"):  # a note: it was reached all the same
        text = f"its firewall {facts.firewall}, as far as its settings tell"
        fix = "System Settings, Network, Firewall, Options: allow incoming connections for Python"
        yield note(Kind.FIREWALL, node.name, text, fix)
    elif facts.firewall in ("on", "off"):
        yield ok(Kind.FIREWALL, node.name, f"its firewall is {facts.firewall}")
    if node.is_mac:
        yield _check_rdma(node, facts)
    if facts.unread:
        text = f"gave no answer: {', '.join(facts.unread[:8])}"
        yield note(
            Kind.UNREAD, node.name, text, "run doctor again; if it stays so, run that command there in a terminal"
        )


def _check_machine(name: str, facts: Facts) -> Finding:
    system = f"{'macOS' if facts.system == 'Darwin' else facts.system} {facts.system_version}"
    memory = f"{format_bytes(facts.memory_bytes)}, of which it offers {format_bytes(facts.budget_bytes)}"
    if facts.wired_limit_mb:
        memory += f" (iogpu.wired_limit_mb is {facts.wired_limit_mb})"
    versions = ", ".join(f"{package} {facts.versions[package]}" for package in sorted(facts.versions)[:MAX_VERSIONS])
    return ok(Kind.MACHINE, name, f"{facts.chip or 'unknown chip'}, {memory}; {system}; {versions}")


def _check_disk(name: str, facts: Facts) -> Finding:
    text = f"{format_bytes(facts.free_disk_bytes)} free for {facts.cache_folder}"
    fix = "free some space there, or move the folder by XDG_CACHE_HOME (and models by HF_HOME)"
    if facts.free_disk_bytes < _DISK_FULL:
        return problem(Kind.DISK, name, text, fix)
    return note(Kind.DISK, name, text, fix) if facts.free_disk_bytes < _DISK_NOTED else ok(Kind.DISK, name, text)


def _check_certificate(name: str, facts: Facts, now: datetime, role: Role) -> Iterator[Finding]:
    until = expiry_told(facts.certificate_expires)
    if until is None:
        return
    left = until - now
    text = f"its certificate expires on {until:%Y-%m-%d}, in {left.days} days"
    fix = f"{role.way_to_issue(name)}, and copy the file to it"
    if left < _EXPIRES_SOON:
        yield problem(Kind.CERTIFICATE, name, text, fix)
    else:
        yield note(Kind.CERTIFICATE, name, text, fix) if left < TOLD_AHEAD else ok(Kind.CERTIFICATE, name, text)


def _check_clock(name: str, offset_s: float) -> Finding:
    if abs(offset_s) < _CLOCK_NOTED_S:
        return ok(Kind.CLOCK, name, "its clock is the coordinator's, to within two seconds")
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
        yield note(Kind.SLEEP, name, "low power mode slows it down", "sudo pmset -a lowpowermode 0")
    if not power.HasField("sleep_minutes"):
        if facts.system == "Linux":
            yield ok(Kind.SLEEP, name, "systemd may put it to sleep; a worker that slept joins again")
    elif power.sleep_minutes == 0:
        yield ok(Kind.SLEEP, name, "does not fall asleep by itself")
    elif power.is_kept_awake or is_coordinator:
        kept = "commands and workers keep it awake while they run"
        yield ok(Kind.SLEEP, name, f"falls asleep after {power.sleep_minutes} min; {kept}")
    else:
        text = f"falls asleep after {power.sleep_minutes} min, and no worker is seen to keep it awake"
        yield note(Kind.SLEEP, name, text, "sudo pmset -c sleep 0")


def _check_rdma(node: ExaminedNode, facts: Facts) -> Finding:
    """For information: enabling it takes a visit to Recovery, and Brigade does not use it."""
    version = tuple(int(each) for each in facts.system_version.split(".")[:2] if each.isdecimal() and len(each) < 6)
    if facts.rdma == "enabled":
        state = f"RDMA over Thunderbolt is enabled ({', '.join(facts.rdma_devices[:8])})"
    elif version >= _RDMA_MACOS and any(port.gbit >= _RDMA_GBIT for port in node.ports):
        state = "RDMA over Thunderbolt could be enabled in Recovery"
    else:
        state = "no RDMA over Thunderbolt (macOS 26.2 and Thunderbolt 5 have it)"
    return ok(Kind.RDMA, node.name, f"{state}; Brigade's hops are TCP and do not use it")


def _check_versions(name: str, facts: Facts, own: Facts) -> Iterator[Finding]:
    """Yield where a worker's versions differ from the coordinator's."""
    theirs, ours = dict(facts.versions), dict(own.versions)
    if (found := theirs.get("brigade", "none")) != (expected := ours["brigade"]):
        yield problem(Kind.BRIGADE, name, f"has brigade {found}, the coordinator {expected}", _SAME_BRIGADE)
    elif facts.is_outdated:
        text = "runs code that was replaced since it was started"
        yield problem(Kind.BRIGADE, name, text, "start the worker again")
    elif facts.code != own.code:
        text = f"has brigade {found} like the coordinator, but other files of it ({facts.code}, there {own.code})"
        yield note(Kind.BRIGADE, name, text, "install Brigade from the same sources on all nodes")
    for package in ("mlx", "mlx-lm"):
        if (found := theirs.get(package, "none")) != (expected := ours[package]):
            text = f"has {package} {found}, the coordinator {expected}: tokens may differ from those of one Mac"
            yield note(Kind.MLX, name, text, f"there: pip install {package}=={expected}, or the same install on all")
    python, own_python = theirs.get("python", "none"), ours["python"]
    if python.split(".")[:2] != own_python.split(".")[:2]:
        text = f"runs Python {python}, the coordinator {own_python}"
        yield note(Kind.PYTHON, name, text, "it works; to have one thing less that differs, install the same")


def _check_configuration(node: ExaminedNode, facts: Facts, coordinator: ExaminedNode) -> Iterator[Finding]:
    """Yield where a worker has another name or another cluster.yaml than the coordinator, whose copy counts."""
    if node.configuration is None or coordinator.configuration is None:
        return
    if facts.node != node.name:
        text = f"calls itself {facts.node}: one of both has the wrong name or address"
        fix = f"there: brigade worker --name {node.name}, or correct `address:`"
        yield problem(Kind.CONFIGURATION, node.name, text, fix)
    for key, there, here in differing(node.configuration, coordinator.configuration)[:_MAX_DIFFERENCES]:
        text = f"its cluster.yaml has `{key}: {there}`, the coordinator's {here}, which counts"
        yield note(Kind.CONFIGURATION, node.name, text, "copy the coordinator's cluster.yaml to it")


def offers_of(nodes: Sequence[ExaminedNode]) -> list[Node]:
    """Return what each node can hold, for a plan by memory alone."""
    offered = [
        MemoryOffer(node.facts.budget_bytes if node.facts else 0, node.configured_bytes, node.is_here) for node in nodes
    ]
    return [Node(node.name, memory) for node, memory in zip(nodes, budgets(offered[0], offered[1:]), strict=True)]


def _check_plan(
    spec: ModelSpec, nodes: Sequence[ExaminedNode], context: int, layers: Sequence[int] | None
) -> Iterator[Finding]:
    """Yield whether the model fits, by memory alone: such a plan fits if any does."""
    offers = offers_of(nodes)
    objective = Objective(context, layers=layers)
    try:
        found = plan(spec, offers, NOTHING_KNOWN, objective)
    except ConfigError as error:
        fix = "correct `layers:` or the number of workers in cluster.yaml"
        yield problem(Kind.PLAN, "all nodes", error.message, fix)
        return
    if found.fits:
        yield ok(Kind.MEMORY, "all nodes", f"{spec.name} fits, with {context:,} tokens of context")
        return
    shares_machine = [each.is_here or (each is nodes[0] and any(node.is_here for node in nodes)) for each in nodes]
    raised = [
        now if is_shared else Node(now.name, max(now.memory_bytes, _raised_budget(node)))
        for node, now, is_shared in zip(nodes, offers, shares_machine, strict=True)
    ]
    wider = plan(spec, raised, NOTHING_KNOWN, objective)
    if wider.fits:
        yield from _raised_limits(wider, offers, nodes)
        return
    lacking = ", ".join(f"{a.name} lacks {format_bytes(a.missing_bytes)}" for a in found.assignments if not a.fits)
    text = f"{spec.name} with {context:,} tokens of context does not fit: {lacking}"
    yield problem(Kind.MEMORY, "all nodes", text, "more nodes, a model of fewer bits, or fewer tokens (`context:`)")


def _raised_budget(node: ExaminedNode) -> int:
    """Return the bytes a Mac can offer once its wired limit is as high as is sensible; 0 if the user has set them."""
    facts = node.facts
    if facts is None or node.configured_bytes or not node.is_mac or not facts.working_set_bytes:
        return 0
    sensible = facts.memory_bytes - max(_LEFT_TO_MACOS, facts.memory_bytes // _LEFT_SHARE)
    return int(sensible * _offered_share(facts))


def _offered_share(facts: Facts) -> float:
    """Return which part of what Metal recommends this node offers."""
    return min(1.0, facts.budget_bytes / facts.working_set_bytes)


def _raised_limits(wider: Plan, offers: Sequence[Node], nodes: Sequence[ExaminedNode]) -> Iterator[Finding]:
    """Yield, for each Mac that has to offer more, the command that lets it."""
    for assignment, now, node in zip(wider.assignments, offers, nodes, strict=True):
        if assignment.needed_bytes > now.memory_bytes and node.facts is not None:
            limit = math.ceil(assignment.needed_bytes / _offered_share(node.facts) / _MIB)
            text = f"has to hold {format_bytes(assignment.needed_bytes)}, offers {format_bytes(now.memory_bytes)}"
            fix = f"there: sudo sysctl iogpu.wired_limit_mb={limit} (until it restarts), and start the worker again"
            yield problem(Kind.WIRED_LIMIT, node.name, text, fix)
