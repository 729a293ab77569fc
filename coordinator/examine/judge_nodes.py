"""What is to be said of each node for itself. Pure: facts in, findings out."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from coordinator.examine.finding import Finding, Kind, mend, note, ok
from coordinator.examine.known import KnownNode
from protos.brigade_pb2 import Facts
from worker.node.identity import TOLD_AHEAD, Role, expiry_told
from worker.process.sizes import format_bytes

MOST_VERSIONS = 8  # that are told of one node: it has four

_GIB = 2**30
_VERY_SOON = timedelta(days=7)
_CLOCK_NOTED_S, _CLOCK_WRONG_S = 2.0, 86_400.0  # certificates are valid from a day before they were made
_DISK_NOTED, _DISK_FULL = 20 * _GIB, _GIB
_RDMA_MACOS, _RDMA_GBIT = (26, 2), 80.0
_SYSTEMS = {"Darwin": "macOS"}


def judge_node(node: KnownNode, now: datetime, *, is_coordinator: bool) -> Iterator[Finding]:
    """All findings of a node that could be asked."""
    facts = node.facts
    if facts is None:
        return
    yield _machine(node.name, facts)
    yield _disk(node.name, facts)
    yield from _certificate(node.name, facts, now, Role.COORDINATOR if is_coordinator else Role.WORKER)
    if node.clock_offset_s is not None:
        yield _clock(node.name, node.clock_offset_s)
    yield from _sleep(node.name, facts, is_coordinator=is_coordinator)
    if node.is_mac and facts.power.HasField("may_nap"):
        yield _app_nap(node.name, facts)
    yield from _firewall(node.name, facts)
    if node.is_mac:
        yield _rdma(node, facts)
    if facts.unread:
        yield note(
            Kind.UNREAD, node.name, f"gave no answer: {', '.join(facts.unread[:8])}",
            "run doctor again; if it stays so, run that command there in a terminal",
        )  # fmt: skip


def _machine(name: str, facts: Facts) -> Finding:
    system = f"{_SYSTEMS.get(facts.system, facts.system)} {facts.system_version}"
    memory = f"{format_bytes(facts.memory_bytes)}, of which it offers {format_bytes(facts.budget_bytes)}"
    if facts.wired_limit_mb:
        memory += f" (iogpu.wired_limit_mb is {facts.wired_limit_mb})"
    versions = ", ".join(f"{package} {facts.versions[package]}" for package in sorted(facts.versions)[:MOST_VERSIONS])
    return ok(Kind.MACHINE, name, f"{facts.chip or 'unknown chip'}, {memory}; {system}; {versions}")


def _disk(name: str, facts: Facts) -> Finding:
    text = f"{format_bytes(facts.free_disk_bytes)} free for {facts.cache_folder}"
    fix = "free some space there, or move the folder by XDG_CACHE_HOME (and models by HF_HOME)"
    if facts.free_disk_bytes < _DISK_FULL:
        return mend(Kind.DISK, name, text, fix)
    return note(Kind.DISK, name, text, fix) if facts.free_disk_bytes < _DISK_NOTED else ok(Kind.DISK, name, text)


def _certificate(name: str, facts: Facts, now: datetime, role: Role) -> Iterator[Finding]:
    until = expiry_told(facts.certificate_expires)
    if until is None:
        return
    left = until - now
    text = f"its certificate expires on {until:%Y-%m-%d}, in {left.days} days"
    fix = f"{role.way_to_issue(name)}, and copy the file to it"
    if left < _VERY_SOON:
        yield mend(Kind.CERTIFICATE, name, text, fix)
    else:
        yield note(Kind.CERTIFICATE, name, text, fix) if left < TOLD_AHEAD else ok(Kind.CERTIFICATE, name, text)


def _clock(name: str, offset_s: float) -> Finding:
    if abs(offset_s) < _CLOCK_NOTED_S:
        return ok(Kind.CLOCK, name, "its clock is the coordinator's, to within two seconds")
    text = f"its clock is {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} the coordinator's"
    fix = "set the time automatically: System Settings, General, Date & Time; on Linux by NTP"
    if abs(offset_s) >= _CLOCK_WRONG_S:
        return mend(Kind.CLOCK, name, f"{text}: new certificates are refused", fix)
    return note(Kind.CLOCK, name, text, fix)


def _sleep(name: str, facts: Facts, *, is_coordinator: bool) -> Iterator[Finding]:
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
        yield note(
            Kind.SLEEP, name, f"falls asleep after {power.sleep_minutes} min, and no worker is seen to keep it awake",
            "sudo pmset -c sleep 0",
        )  # fmt: skip


def _app_nap(name: str, facts: Facts) -> Finding:
    if not facts.power.may_nap:
        return ok(Kind.APP_NAP, name, "App Nap is off")
    return note(
        Kind.APP_NAP, name, "App Nap may slow down what runs in a terminal that is hidden",
        "defaults write NSGlobalDomain NSAppSleepDisabled -bool YES, or run the worker as a service",
    )  # fmt: skip


def _firewall(name: str, facts: Facts) -> Iterator[Finding]:
    """It was reached all the same, or its facts were not here: so this may only matter for other ways to it."""
    fix = "System Settings, Network, Firewall, Options: allow incoming connections for Python"
    if facts.firewall in ("blocks all", "blocks this program"):
        yield note(Kind.FIREWALL, name, f"its firewall {facts.firewall}, as far as its settings tell", fix)
    elif facts.firewall in ("on", "off"):
        yield ok(Kind.FIREWALL, name, f"its firewall is {facts.firewall}")


def _rdma(node: KnownNode, facts: Facts) -> Finding:
    """For information: to enable it takes a visit in person, and gains nothing here."""
    unused = "Brigade's hops are TCP and do not use it"
    if facts.rdma == "enabled":
        return ok(
            Kind.RDMA, node.name, f"RDMA over Thunderbolt is enabled ({', '.join(facts.rdma_devices[:8])}); {unused}"
        )
    is_possible = _version(facts.system_version) >= _RDMA_MACOS and any(p.gbit >= _RDMA_GBIT for p in node.ports)
    if is_possible:
        return ok(Kind.RDMA, node.name, f"RDMA over Thunderbolt could be enabled in Recovery; {unused}")
    return ok(Kind.RDMA, node.name, f"no RDMA over Thunderbolt (macOS 26.2 and Thunderbolt 5 have it); {unused}")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal() and len(part) < 6)
