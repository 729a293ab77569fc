"""Nodes, hops and models for tests of what doctor says: in order, but for what a test changes."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from coordinator.deploy.checks import ModelInUse, check_cluster
from coordinator.deploy.findings import ExaminedCluster, ExaminedHop, ExaminedNode, Finding, Kind, Level
from coordinator.deploy.trial import ChainTrial, hops_of
from coordinator.planning.plan import Assignment, Plan
from coordinator.sessions.output import Answer, Token, Usage
from coordinator.sessions.waterfall import Leg, Moments, Passage, Route
from protos.brigade_pb2 import (
    DTYPE_BFLOAT16,
    MEDIUM_THUNDERBOLT,
    TRANSPORT_GRPC,
    TRANSPORT_TCP,
    TRANSPORT_TLS,
    Configuration,
    Facts,
    Interface,
    Line,
    LinkReply,
    Medium,
    Power,
    StatusReply,
    ThunderboltPort,
    Way,
)
from worker.model.model_spec import LayerSpec, ModelSpec

GIB = 2**30
NOW = datetime(2026, 11, 22, tzinfo=UTC)
STUDIO, MINI = "169.254.10.1", "169.254.10.2"  # their bridges
VERSIONS = {"python": "3.12.4", "mlx": "0.32.4", "mlx-lm": "0.32.2", "brigade": "0.1.0"}


def model(num_layers: int = 4, layer_bytes: int = GIB) -> ModelSpec:
    return ModelSpec(
        name="big", family="toy", layers=(LayerSpec(layer_bytes),) * num_layers, embed_bytes=0, head_bytes=0,
        tied=False, hidden_size=4096, vocab_size=100, context=8192, dtype=DTYPE_BFLOAT16,
    )  # fmt: skip


def bridge(address: str, medium: Medium = MEDIUM_THUNDERBOLT, mtu: int = 1500, name: str = "bridge0") -> Interface:
    return Interface(name=name, medium=medium, addresses=[address], mtu=mtu, is_active=True)


def mac(name: str, address: str, **changed: Any) -> Facts:
    """A Mac that nothing is to be said of."""
    facts: dict[str, Any] = {
        "node": name, "system": "Darwin", "system_version": "26.2", "chip": "Apple M4 Max", "memory_bytes": 64 * GIB,
        "budget_bytes": 45 * GIB, "working_set_bytes": 50 * GIB, "cache_folder": "cache", "free_disk_bytes": 200 * GIB,
        "versions": VERSIONS, "code": "abc", "certificate_expires": int((NOW + timedelta(days=300)).timestamp()),
        "power": Power(sleep_minutes=0, may_nap=False), "firewall": "off", "rdma": "disabled",
        "interfaces": [bridge(address)], "thunderbolt": [port(name, "mini" if name == "studio" else "studio")],
    }  # fmt: skip
    return Facts(**(facts | changed))


def port(own: str, peer: str, gbit: float = 80.0) -> ThunderboltPort:
    return ThunderboltPort(name="1", gbit=gbit, is_connected=True, id=own, peer=peer, peer_id=peer)


def node(name: str = "mini", address: str = MINI, **changed: Any) -> ExaminedNode:
    said = Configuration(model="big")
    return ExaminedNode(name, mac(name, address, **changed), clock_offset_s=0.01, configuration=said)


def hop(rtt_ms: float = 0.4, bytes_per_s: float = 3e9, **way: Any) -> ExaminedHop:
    """From studio to mini by their bridges."""
    taken = {"address": f"{MINI}:50070", "local": STUDIO, "remote": MINI} | way
    lines = [
        Line(transport=transport, rtt_ms=0.2, bytes_per_s=4e9)
        for transport in (TRANSPORT_TCP, TRANSPORT_TLS, TRANSPORT_GRPC)
    ]
    return ExaminedHop(
        "studio", "mini", LinkReply(rtt_ms=rtt_ms, bytes_per_s=bytes_per_s, way=Way(**taken), lines=lines)
    )


def known(
    *nodes: ExaminedNode, studio: ExaminedNode | None = None, hops: Sequence[ExaminedHop] = ()
) -> ExaminedCluster:
    first = studio or replace(node("studio", STUDIO), clock_offset_s=None)
    return ExaminedCluster([first, *nodes], hops)


def judged(found: ExaminedCluster, wanted: ModelInUse | None = None) -> list[Finding]:
    return list(check_cluster(found, wanted or ModelInUse(model()), NOW))


def said(findings: Sequence[Finding], kind: Kind, about: str = "") -> Finding:
    """The one finding of this kind, about this node or hop if several have one."""
    [found] = [each for each in findings if each.kind is kind and about in each.about]
    return found


def worse(findings: Sequence[Finding]) -> list[tuple[Level, Kind, str]]:
    """All but those that are in order."""
    return [(each.level, each.kind, each.about) for each in findings if each.level is not Level.OK]


MS = 1_000_000  # nanoseconds


def tried(first: Sequence[int] = (7, 8), second: Sequence[int] = (7, 8)) -> ChainTrial:
    """A frame through two nodes: 1 ms on the way to the second one, whose clock is 5 ms ahead, and 3 ms back."""
    plan = Plan((Assignment("studio", 0, 2, 0, 0, 0), Assignment("mini", 2, 4, 0, 0, 0)), 128)
    there, far = Moments(0, 0, 0, *[2 * MS] * 4), Moments(*[8 * MS] * 3, *[9 * MS] * 4)
    legs = [Leg(Route(plan.assignments, [0, 5 * MS]), [Passage([there, far], 7 * MS)])]
    status = [StatusReply(sent_bytes=100), StatusReply(sent_bytes=10)]
    hops = hops_of(legs, [StatusReply(), StatusReply(sent_bytes=4)], status)
    answers = [
        Answer(
            samples=[Token(token) for token in tokens],
            token_times=[7 * MS],
            statuses=status,
            usage=Usage(1, 0, 0, 1, 1, legs),
        )
        for tokens in (first, second)
    ]
    return ChainTrial("big", plan, answers[0], answers[1], hops, 1.0, 0.1)
