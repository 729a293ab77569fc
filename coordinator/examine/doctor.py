"""`brigade doctor`: what is known and what follows from it, as lines and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.examine.collect import Begin, collect
from coordinator.examine.finding import Finding, Level
from coordinator.examine.judge import Wanted, judge
from coordinator.examine.judge_hops import ms_per_token
from coordinator.examine.judge_nodes import MOST_VERSIONS
from coordinator.examine.judge_way import cable_between
from coordinator.examine.known import Known, KnownHop, KnownNode, figure
from protos.brigade_pb2 import TRANSPORT_GRPC, TRANSPORT_TCP, TRANSPORT_TLS, Facts, Medium
from worker.errors import BrigadeError
from worker.process.printable import printable

_LINES = {TRANSPORT_TCP: "tcp", TRANSPORT_TLS: "tls", TRANSPORT_GRPC: "grpc_without_tls"}


@dataclass(frozen=True)
class Examination:
    """All of it."""

    known: Known
    wanted: Wanted
    model: str
    findings: Sequence[Finding]

    def count(self, level: Level) -> int:
        return sum(finding.level is level for finding in self.findings)

    @property
    def is_healthy(self) -> bool:
        return not self.count(Level.MEND)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "must_be_mended": self.count(Level.MEND),
            "notes": self.count(Level.NOTE),
            "findings": [asdict(finding) for finding in self.findings],
            "nodes": [_node(node) for node in self.known.nodes],
            "hops": [_hop(hop, self.known, self.wanted.row_bytes) for hop in self.known.hops],
        }


async def examine_cluster(options: ClusterOptions, begin: Begin = lambda step: None) -> Examination:
    """Ask and judge. What cannot be asked or read is a finding; it raises only for what it cannot go on without."""
    wanted = await _wanted(options)
    known = await collect(options.cluster, begin)
    return Examination(known, wanted, options.model, judge(known, wanted, datetime.now(UTC)))


async def _wanted(options: ClusterOptions) -> Wanted:
    try:
        _, spec = await read_model(options.model)
    except BrigadeError as error:
        return Wanted(refusal=error.message)
    return Wanted(spec, context=min(options.context, spec.context), layers=options.cluster.layers)


def _node(node: KnownNode) -> dict[str, Any]:
    """Null where it could not be asked, or could not tell."""
    facts = node.facts
    return {
        "node": node.name,
        "error": printable(node.error.message) if node.error else None,
        "chip": printable(facts.chip) if facts else None,
        "system": printable(f"{facts.system} {facts.system_version}") if facts else None,
        "memory_bytes": facts.memory_bytes if facts else None,
        "offered_bytes": facts.budget_bytes if facts else None,
        "free_disk_bytes": facts.free_disk_bytes if facts else None,
        "versions": _versions(facts) if facts else None,
        "clock_offset_s": node.clock_offset_s,
    }


def _versions(facts: Facts) -> dict[str, str]:
    return {printable(name): printable(facts.versions[name]) for name in sorted(facts.versions)[:MOST_VERSIONS]}


def _hop(hop: KnownHop, known: Known, row_bytes: int) -> dict[str, Any]:
    sender, receiver = known.by_name[hop.source], known.by_name[hop.target]
    way = hop.reply.way if hop.reply else None
    here = sender.interface_with(way.local) if way else None
    cable = cable_between(sender, receiver)
    lines = {line.transport: line for line in hop.reply.lines if not line.error} if hop.reply else {}
    figures = {
        kind: {"rtt_ms": figure(line.rtt_ms), "bytes_per_s": figure(line.bytes_per_s)} for kind, line in lines.items()
    }
    return {
        "source": hop.source,
        "target": hop.target,
        "is_back": hop.is_back,
        "address": printable(way.address) if way and way.address else None,
        "interface": printable(here.name) if here else None,
        "medium": _medium(here.medium) if here else None,
        "mtu": here.mtu if here else None,
        "thunderbolt_gbit": figure(cable.gbit) if cable else None,
        "ms_per_token": ms_per_token(hop, row_bytes),
        "grpc": {"rtt_ms": hop.rtt_ms, "bytes_per_s": hop.bytes_per_s},
    } | {name: figures.get(kind) for kind, name in _LINES.items()}


def _medium(medium: int) -> str:
    known = medium in Medium.values()
    return Medium.Name(Medium.ValueType(medium)).removeprefix("MEDIUM_").lower() if known else "unspecified"
