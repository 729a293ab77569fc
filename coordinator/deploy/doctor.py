"""`brigade doctor`: collects facts from all nodes, measures the hops, checks both, and tries an answer at the end."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer, peers_of
from coordinator.cluster.progress import Begin
from coordinator.cluster.survey import node_speeds
from coordinator.deploy.checks import MAX_VERSIONS, ModelInUse, check_cluster, ms_per_token, offers_of
from coordinator.deploy.findings import (
    ExaminedCluster,
    ExaminedHop,
    ExaminedNode,
    Finding,
    Kind,
    Level,
    measured,
    medium_name,
    note,
    ok,
    problem,
)
from coordinator.deploy.trial import ChainTrial, advice, try_cluster
from coordinator.planning.speeds import NodeSpeed
from protos.brigade_pb2 import TRANSPORT_GRPC, TRANSPORT_TCP, TRANSPORT_TLS, Transport
from worker.config import ClusterConfig, WorkerConfig, is_here
from worker.errors import BrigadeError, ConfigError, NodeBusy, StageLost
from worker.model.checkpoint import Checkpoint
from worker.model.model_spec import ModelSpec
from worker.node.configuration import configuration_of
from worker.node.facts import read_facts
from worker.node.links import connect
from worker.node.network import Network
from worker.platform.machine import memory_budget
from worker.platform.tasks import together
from worker.platform.text import format_bytes, printable

_CLOCK_TRIES = 3
# Measured beside gRPC, with their names in JSON: all of them where links are encrypted, else TCP.
_TRANSPORTS = {TRANSPORT_TCP: "tcp", TRANSPORT_TLS: "tls", TRANSPORT_GRPC: "grpc_without_tls"}


@dataclass(frozen=True)
class Examination:
    """What was collected, and the findings that follow; `trial` is None if no answer was tried or none came."""

    cluster: ExaminedCluster
    model: ModelInUse
    model_name: str
    findings: Sequence[Finding]
    trial: ChainTrial | None = None

    def count(self, level: Level) -> int:
        return sum(finding.level is level for finding in self.findings)

    @property
    def is_healthy(self) -> bool:
        return not self.count(Level.PROBLEM)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model_name,
            "must_be_mended": self.count(Level.PROBLEM),
            "notes": self.count(Level.NOTE),
            "findings": [asdict(finding) for finding in self.findings],
            "nodes": [_node_json(node, self.model.spec) for node in self.cluster.nodes],
            "hops": [_hop_json(hop, self.cluster, self.model.row_bytes) for hop in self.cluster.hops],
            "trial": self.trial.as_json() if self.trial else None,
        }


async def examine_cluster(options: ClusterOptions, begin: Begin = lambda step: None) -> Examination:
    """Collect and check. A node that cannot be asked, or a model that cannot be read, is a finding, not an error."""
    try:
        checkpoint, spec = await read_model(options.model, options.draft_model)
        model = ModelInUse(spec, objective=replace(options.objective_of(spec), goal="latency"))
    except BrigadeError as error:
        checkpoint, model = None, ModelInUse(refusal=error.message)
    cluster = await collect_facts(options.cluster, begin, checkpoint, feeds=options.feeds)
    return Examination(cluster, model, options.model, list(check_cluster(cluster, model, datetime.now(UTC))))


async def try_answer(options: ClusterOptions, found: Examination) -> Examination:
    """Add what a short answer through every node shows, unless there are no workers, or it cannot be tried yet.

    Running programs are left alone: a worker that serves another coordinator, or too little memory here, becomes a note
    instead. On macOS the memory is not what is free: files that the system caches count as used.
    """
    if not options.cluster.workers or not found.is_healthy:
        return found
    trial, about, needed, budget = None, "all nodes", 0, memory_budget()
    if found.model.spec is not None:
        plan = found.model.plan_over(offers_of(found.cluster.nodes))
        if not plan.fits or len(plan.names) < len(found.cluster.nodes):  # a finding tells of it
            return found
        needed = plan.assignments[0].needed_bytes
    if needed > budget:
        text = f"no answer was tried: this node's part takes {format_bytes(needed)}, it may use {format_bytes(budget)}"
        fix = "end programs that hold memory here, perhaps a server"
        return replace(found, findings=[*found.findings, note(Kind.TRIAL, found.cluster.nodes[0].name, text, fix)])
    try:
        trial = await try_cluster(options)
    except NodeBusy as error:
        finding = note(Kind.TRIAL, about, f"no answer was tried: {error}", advice(error, ""))
    except StageLost as error:
        fix = f"the log of worker {error.node} may tell why; run doctor again" if error.node else "run doctor again"
        finding = problem(Kind.TRIAL, about, str(error), fix)
    except BrigadeError as error:
        finding = problem(Kind.TRIAL, about, str(error), advice(error, ""))
    else:
        text = f"{len(trial.first.tokens)} tokens through every node, twice, in {trial.answered_s:.1f} s"
        if trial.is_same:
            finding = ok(Kind.TRIAL, about, f"{text}: the same tokens")
        else:
            text += f": other tokens the second time, {trial.first.tokens}, then {trial.second.tokens}"
            finding = problem(Kind.TRIAL, about, text, "install the same versions of all packages on all nodes")
    return replace(found, findings=[*found.findings, finding], trial=trial)


def num_steps(cluster: ClusterConfig) -> int:
    """Return how often `examine_cluster` calls `begin`."""
    return 2 + len(cluster.workers) + (len(cluster.workers) > 1)


async def collect_facts(
    cluster: ClusterConfig,
    begin: Begin = lambda step: None,
    checkpoint: Checkpoint | None = None,
    *,
    feeds: bool = False,
) -> ExaminedCluster:
    """Ask all nodes at once, then measure one hop after another, and the nodes' speeds at the model if one is given.

    Args:
        feeds: whether a node that lacks the model is sent its configuration, which is enough to measure.
    """
    own = cluster.coordinator
    begin("asking every node about itself")
    network = Network.of(cluster)
    async with AsyncExitStack() as stack:
        try:
            peers = await stack.enter_async_context(peers_of(cluster, network))
        except ConfigError as error:  # this node's own certificate, without which it can ask no other
            facts = await read_facts(own.name, Network())
            return ExaminedCluster([ExaminedNode(own.name, facts, error, configured_bytes=own.memory)])
        asking = [_ask(*pair, network) for pair in zip(peers, cluster.workers, strict=True)]
        found = ExaminedCluster(await together(_ask_here(cluster, network), *asking))
        hops = await _measure_hops(found, peers, begin, [*_TRANSPORTS] if cluster.tls else [TRANSPORT_TCP])
        begin("measuring how fast every node is at the model")
        speeds: dict[str, NodeSpeed] = {}
        if checkpoint:
            there = [peer for peer in peers if found.by_name[peer.name].facts]
            speeds = await node_speeds(checkpoint, own.name, there, measures_here=True, anew=False, feeds=feeds)
        return ExaminedCluster([replace(node, speed=speeds.get(node.name)) for node in found.nodes], hops)


async def _ask_here(cluster: ClusterConfig, network: Network) -> ExaminedNode:
    own = cluster.coordinator
    facts = await read_facts(own.name, network)
    return ExaminedNode(own.name, facts, configuration=configuration_of(cluster), configured_bytes=own.memory)


async def _ask(peer: Peer, worker: WorkerConfig, network: Network) -> ExaminedNode:
    ways = await asyncio.gather(*map(connect, worker.addresses))
    start, launch = network.start_hint(peer.name), network.launch_hint(peer.name)
    is_own, memory = is_here(worker.addresses[0]), worker.memory
    found = ExaminedNode(peer.name, ways=ways, configured_bytes=memory, is_here=is_own, start=start, launch=launch)
    if all(way.error for way in ways):  # gRPC would wait for the node to come up, and its error says less
        return replace(found, error=StageLost(f"{ways[0].address}: {ways[0].error}"))
    try:
        hello = await peer.hello()
        found = replace(found, configuration=hello.configuration)
        return replace(found, facts=await peer.examine(), clock_offset_s=await _clock_offset_s(peer))
    except BrigadeError as error:
        return replace(found, error=error)


async def _clock_offset_s(peer: Peer) -> float:
    """Return its time of day minus this node's, by the quickest of some exchanges."""
    found = []
    for _ in range(_CLOCK_TRIES):
        before, began = time.monotonic_ns(), time.time_ns()
        theirs = (await peer.examine(only_time=True)).time
        took = time.monotonic_ns() - before
        found.append((took, (theirs - began - took / 2) / 1e9))
    return min(found)[1]


async def _measure_hops(
    cluster: ExaminedCluster, peers: Sequence[Peer], begin: Begin, transports: Sequence[Transport]
) -> list[ExaminedHop]:
    """Measure from this node to the first worker, along the chain, and from this node to the last as the way back."""

    async def measure(sender: Peer | None, receiver: Peer) -> ExaminedHop:
        hop = ExaminedHop(sender.name if sender else cluster.nodes[0].name, receiver.name)
        begin(f"measuring {hop.about}")
        if any(cluster.by_name[name].facts is None for name in (hop.source, hop.target)):
            return hop
        async with AsyncExitStack() as stack:
            listeners = []
            for transport in transports:
                with suppress(BrigadeError):  # gRPC is measured without it
                    listeners.append(await stack.enter_async_context(receiver.listening(transport)))
            try:
                far = None if sender is None else receiver
                return replace(hop, reply=await (sender or receiver).measure_link(far, listeners, examined=True))
            except BrigadeError as error:
                return replace(hop, error=error)

    hops = [await measure(sender, receiver) for sender, receiver in zip([None, *peers], peers, strict=False)]
    if len(peers) > 1:
        hops.append(replace(await measure(None, peers[-1]), is_back=True))
    return hops


def _node_json(node: ExaminedNode, spec: ModelSpec | None) -> dict[str, Any]:
    """Return the node's facts; null if it could not be asked, or could not tell."""
    facts = node.facts
    versions = {name: facts.versions[name] for name in sorted(facts.versions)[:MAX_VERSIONS]} if facts else {}
    return {
        "node": node.name,
        "error": printable(node.error.message) if node.error else None,
        "chip": printable(facts.chip) if facts else None,
        "system": printable(f"{facts.system} {facts.system_version}") if facts else None,
        "memory_bytes": facts.memory_bytes if facts else None,
        "offered_bytes": facts.budget_bytes if facts else None,
        "free_disk_bytes": facts.free_disk_bytes if facts else None,
        "versions": {printable(name): printable(version) for name, version in versions.items()} if facts else None,
        "clock_offset_s": node.clock_offset_s,
        "speeds": [{"rows": rows, "gbps": gbps} for rows, gbps in node.speed.gbps_by_rows(spec).items()]
        if node.speed and spec
        else None,
    }


def _hop_json(hop: ExaminedHop, cluster: ExaminedCluster, row_bytes: int) -> dict[str, Any]:
    sender, receiver = cluster.by_name[hop.source], cluster.by_name[hop.target]
    way = hop.reply.way if hop.reply else None
    here = sender.interface_with(way.local) if way else None
    cable = sender.cable_to(receiver)
    speeds: dict[str, Any] = dict.fromkeys(_TRANSPORTS.values())
    for line in hop.reply.lines if hop.reply else ():
        if not line.error and line.transport in _TRANSPORTS:
            speed = {"rtt_ms": measured(line.rtt_ms), "bytes_per_s": measured(line.bytes_per_s)}
            speeds[_TRANSPORTS[line.transport]] = speed
    return {
        "source": hop.source,
        "target": hop.target,
        "is_back": hop.is_back,
        "address": printable(way.address) if way and way.address else None,
        "interface": printable(here.name) if here else None,
        "medium": medium_name(here.medium) if here else None,
        "mtu": here.mtu if here else None,
        "thunderbolt_gbit": measured(cable.gbit) if cable else None,
        "ms_per_token": ms_per_token(hop, row_bytes),
        "grpc": {"rtt_ms": hop.rtt_ms, "bytes_per_s": hop.bytes_per_s},
        **speeds,
    }
