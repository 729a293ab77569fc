"""All findings that follow from what is known. Pure: the same facts, the same findings."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from coordinator.examine.finding import Finding, Kind, mend, note
from coordinator.examine.judge_hops import judge_chain, judge_hop
from coordinator.examine.judge_nodes import judge_node
from coordinator.examine.judge_plan import judge_plan
from coordinator.examine.judge_reach import judge_addresses, judge_unreached
from coordinator.examine.known import Known, KnownNode
from protos.brigade_pb2 import Facts
from worker.model.modelspec import ModelSpec
from worker.node.configuration import differing
from worker.node.identity import Role

_MOST_DIFFERENCES = 5  # of one worker that are told


@dataclass(frozen=True)
class Wanted:
    """What the nodes are for: the model, or why it cannot be read, and the plan's terms."""

    spec: ModelSpec | None = None
    refusal: str = ""
    context: int = 4096  # tokens
    layers: tuple[int, ...] | None = None

    @property
    def row_bytes(self) -> int:
        return self.spec.row_bytes if self.spec else 0


def judge(known: Known, wanted: Wanted, now: datetime) -> list[Finding]:
    """Node after node, hop after hop, then what concerns all of them."""
    return list(_judge(known, wanted, now))


def _judge(known: Known, wanted: Wanted, now: datetime) -> Iterator[Finding]:
    coordinator = known.nodes[0]
    for node in known.nodes:
        if node.facts is None:
            yield judge_unreached(node, coordinator)
            continue
        yield from judge_addresses(node, coordinator)
        if node.error is not None:  # the coordinator's own certificate: it can ask nobody
            fix = Role.COORDINATOR.way_to_issue(node.name)
            yield mend(Kind.CERTIFICATE, node.name, node.error.message, fix)
        yield from judge_node(node, now, is_coordinator=node is coordinator)
        if node is not coordinator and coordinator.facts is not None:
            yield from _versions(node, node.facts, coordinator.facts)
            yield from _configuration(node, node.facts, coordinator)
    for hop in known.hops:
        yield from judge_hop(hop, known, wanted.row_bytes)
    yield from judge_chain(known.hops, wanted.row_bytes)
    if wanted.refusal:
        yield mend(Kind.MODEL, coordinator.name, wanted.refusal, "correct --model, or `model:` in cluster.yaml")
    elif wanted.spec and all(node.facts and not node.error for node in known.nodes):
        yield from judge_plan(wanted.spec, known.nodes, wanted.context, wanted.layers)


def _versions(node: KnownNode, facts: Facts, own: Facts) -> Iterator[Finding]:
    """Where this node's versions are not the coordinator's."""
    theirs, ours = dict(facts.versions), dict(own.versions)
    if (found := theirs.get("brigade", "none")) != (expected := ours["brigade"]):
        text = f"has brigade {found}, the coordinator {expected}"
        yield mend(Kind.BRIGADE, node.name, text, "install the same version of Brigade on all nodes")
    elif facts.is_outdated:
        text = "runs code that was replaced since it was started"
        yield mend(Kind.BRIGADE, node.name, text, "start the worker again")
    elif facts.code != own.code:
        text = f"has brigade {found} like the coordinator, but other files of it ({facts.code}, there {own.code})"
        yield note(Kind.BRIGADE, node.name, text, "install Brigade from the same sources on all nodes")
    for package in ("mlx", "mlx-lm"):
        if (found := theirs.get(package, "none")) != (expected := ours[package]):
            text = f"has {package} {found}, the coordinator {expected}: tokens may differ from those of one Mac"
            yield note(
                Kind.MLX, node.name, text, f"there: pip install {package}=={expected}, or the same install on all"
            )
    if _minor(theirs.get("python", "none")) != _minor(ours["python"]):
        text = f"runs Python {theirs.get('python', 'none')}, the coordinator {ours['python']}"
        yield note(Kind.PYTHON, node.name, text, "it works; to have one thing less that differs, install the same")


def _configuration(node: KnownNode, facts: Facts, coordinator: KnownNode) -> Iterator[Finding]:
    """Where it has another name, or its cluster.yaml says something else. The coordinator's is what counts."""
    if node.configuration is None or coordinator.configuration is None:
        return
    if facts.node != node.name:
        text = f"calls itself {facts.node}: one of both has the wrong name or address"
        yield mend(
            Kind.CONFIGURATION, node.name, text, f"there: brigade worker --name {node.name}, or correct `address:`"
        )
    for key, there, here in differing(node.configuration, coordinator.configuration)[:_MOST_DIFFERENCES]:
        text = f"its cluster.yaml has `{key}: {there}`, the coordinator's {here}, which counts"
        yield note(Kind.CONFIGURATION, node.name, text, "copy the coordinator's cluster.yaml to it")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
