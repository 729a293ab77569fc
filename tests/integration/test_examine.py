"""Doctor and smoke on real nodes: what they know, how hops are measured and tried, who may ask, what is left open."""

import asyncio
import contextlib
import hashlib
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest

from coordinator.cluster import deployment
from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.deploy import checks, doctor
from coordinator.deploy.checks import ModelInUse, check_cluster
from coordinator.deploy.doctor import Examination, collect_facts, num_steps, try_answer
from coordinator.deploy.findings import ExaminedCluster, Finding, Kind, Level, problem
from coordinator.deploy.trial import NUM_TOKENS, ChainTrial, try_cluster
from protos.brigade_pb2 import (
    TRANSPORT_GRPC,
    TRANSPORT_TCP,
    TRANSPORT_TLS,
    Facts,
    LinkRequest,
    Listener,
    ListenRequest,
    ProbePart,
    Transport,
)
from protos.brigade_pb2_grpc import NodeStub
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, Models, Whole, answer, opened, serving
from tests.unit.deploy import cases
from tests.unit.deploy.cases import said
from tools.proxy import proxy_to
from worker.compute import microbenchmark
from worker.config import ClusterConfig, TlsConfig, WorkerConfig, join_address, split_address
from worker.errors import ConfigError, FrameError, NodeBusy, StageLost
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.node import facts as facts_module
from worker.node import links, speed_cache
from worker.node.links import exchange, open_port
from worker.node.network import Network
from worker.node.service import NodeService
from worker.platform.commands import RunProgram
from worker.platform.installation import running_code

PATIENCE_S = 30.0  # the machine may be busy
REFUSED = "expected the token of this port, once"
CROSSED = "Internal error from Core"  # what gRPC says where a refusal crosses what is written
ALL: Sequence[Transport] = (TRANSPORT_TCP, TRANSPORT_TLS, TRANSPORT_GRPC)


@pytest.fixture(autouse=True)
def no_hop_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other tests: how fast one is, is no claim here."""
    monkeypatch.setattr(checks, "VERY_SLOW_MS", 10_000.0)
    for limit in ("PROBE_S", "TALK_S", "CONNECT_S"):
        monkeypatch.setattr(links, limit, PATIENCE_S)


def cluster_of(*addresses: str, keys: Path | None = None) -> ClusterConfig:
    """Workers node-1, node-2, ... at these addresses."""
    workers = tuple(WorkerConfig(name=f"node-{i}", address=each) for i, each in enumerate(addresses, 1))
    return ClusterConfig(workers=workers, tls=TlsConfig(keys=str(keys)) if keys else None)


def judged(known: ExaminedCluster) -> list[Finding]:
    return list(check_cluster(known, ModelInUse(), datetime.now(UTC)))


async def only_problem(*addresses: str, keys: Path | None = None) -> tuple[Finding, ExaminedCluster]:
    known = await collect_facts(cluster_of(*addresses, keys=keys))
    [found] = [each for each in judged(known) if each.level is Level.PROBLEM]
    return found, known


async def test_every_node_is_asked_and_every_hop_is_measured() -> None:
    begun: list[str] = []
    async with serving(2) as nodes:
        cluster = cluster_of(*(node.address for node in nodes))
        known = await collect_facts(cluster, begun.append)
    assert len(begun) == num_steps(cluster)
    assert [node.name for node in known.nodes] == ["coordinator", "node-1", "node-2"]
    for node in known.nodes:
        assert node.facts and node.facts.node == node.name and node.facts.memory_bytes > node.facts.budget_bytes > 0
        assert node.facts.versions["brigade"] and node.facts.free_disk_bytes and node.interface_with("127.0.0.1")
    assert [hop.about for hop in known.hops] == ["coordinator → node-1", "node-1 → node-2", "coordinator ← node-2"]
    for hop in known.hops:
        assert hop.reply and hop.reply.way.local == hop.reply.way.remote == "127.0.0.1" and not hop.reply.way.error
        [line] = hop.reply.lines
        assert line.transport == TRANSPORT_TCP and not line.error and line.rtt_ms > 0 and line.bytes_per_s > 0
    assert not [each for each in judged(known) if each.level is Level.PROBLEM]
    assert all(abs(node.clock_offset_s or 0.0) < 30.0 for node in known.nodes)


async def test_every_node_tells_how_fast_it_reads_the_layers_by_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an earlier measurement may have had no time for all rows
    monkeypatch.setattr(speed_cache, "measure_speed", partial(speed_cache.measure_speed, within_s=PATIENCE_S))
    monkeypatch.setattr(microbenchmark, "ROWS", (1, 8, 2))
    checkpoint, spec = await read_model("demo")
    async with serving(1, checkpoint.folder) as [node]:
        known = await collect_facts(cluster_of(node.address), checkpoint=checkpoint)
    findings = list(check_cluster(known, ModelInUse(spec), datetime.now(UTC)))
    for examined in known.nodes:
        assert examined.speed
        gbps = examined.speed.gbps_by_rows(spec)
        assert min(gbps) == 1 < len(gbps)
        layers_ms = 8 * dict(examined.speed.kinds[0])[1]
        assert gbps[1] == pytest.approx(sum(layer.read_bytes for layer in spec.layers) / layers_ms / 1e6)
        assert f"{gbps[1]:.2g} GB/s with 1 row" in said(findings, Kind.ROWS, examined.name).text


async def test_encrypted_hops_are_measured_without_encryption_too(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.coordinator()
    async with serving(2, network_of=certificates.network) as nodes:
        cluster = cluster_of(*(node.address for node in nodes), keys=certificates.authority.folder)
        known = await collect_facts(cluster)
    for hop in known.hops:
        assert hop.reply and hop.rtt_ms and not hop.reply.way.error
        found = [(line.transport, line.error) for line in hop.reply.lines]
        assert found == [(transport, "") for transport in ALL]
        assert all(line.rtt_ms > 0 and line.bytes_per_s > 0 for line in hop.reply.lines)
    certificate = [each for each in judged(known) if each.kind is Kind.CERTIFICATE]
    assert [each.about for each in certificate] == ["coordinator", "node-1", "node-2"]


async def test_a_delayed_hop_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "VERY_SLOW_MS", 40.0)
    async with serving(2) as [first, second]:
        with proxy_to(second.address, latency_s=0.03) as proxy:
            known = await collect_facts(cluster_of(first.address, proxy.address))
    findings = judged(known)
    for hop in known.hops[1:]:  # a busy machine may make the direct one slow, too
        assert hop.rtt_ms and hop.rtt_ms > 60
        assert said(findings, Kind.SPEED, hop.about).level is Level.PROBLEM
        assert said(findings, Kind.GRPC, hop.about).level is Level.NOTE  # TCP beside it does not go by the proxy


async def test_a_certificate_that_is_missing_or_of_another_authority_is_a_finding(tmp_path: Path) -> None:
    ours, theirs = Certificates(tmp_path / "ours"), Certificates(tmp_path / "theirs")
    async with serving(1, network_of=theirs.network) as [node]:
        missing, _ = await only_problem(node.address, keys=ours.authority.folder)
        ours.coordinator()
        other, _ = await only_problem(node.address, keys=ours.authority.folder)
    assert missing.kind is other.kind is Kind.CERTIFICATE
    assert "coordinator.pem cannot be read" in missing.text and "another authority" in other.text


async def test_a_worker_that_is_too_old_to_be_examined_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(NodeService, "Examine")
    async with serving(1) as [node]:
        found, _ = await only_problem(node.address)
    assert (found.kind, found.about) == (Kind.BRIGADE, "node-1") and "is an older Brigade" in found.text


async def test_only_a_coordinator_examines_and_has_ports_opened(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with serving(1, network_of=certificates.network) as [node]:
        async with node.reached(certificates.network("node-2")) as worker:
            for asked in (worker.examine(), worker.listening(TRANSPORT_TCP).__aenter__()):
                with pytest.raises(ConfigError, match="expected a certificate with the role brigade:coordinator"):
                    await asked
        async with node.reached(certificates.coordinator()) as coordinator:
            assert (await coordinator.examine(only_time=True)).time > 0


def connect(listener: Listener) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S)
    connection.settimeout(PATIENCE_S)
    return connection


def ask(connection: socket.socket, said: bytes) -> bytes:
    """What comes back for these bytes; nothing if the connection is closed."""
    connection.sendall(said)
    return connection.recv(64)


def shown(listener: Listener) -> bytes:
    """The token as callers show it."""
    return hashlib.blake2b(listener.token, digest_size=32).digest()


async def talk(listener: Listener, said: bytes) -> bytes:
    with await asyncio.to_thread(connect, listener) as connection:
        return await asyncio.to_thread(ask, connection, said)


async def test_a_port_takes_one_connection_and_answers_only_the_right_token() -> None:
    async with serving(1) as [node], node.reached() as peer:
        async with peer.listening(TRANSPORT_TCP) as listener:
            assert await talk(listener, shown(listener) + bytes(64)) == bytes(64)
            with pytest.raises(OSError, match=r"refused|reset"):
                await talk(listener, shown(listener))
        async with peer.listening(TRANSPORT_TCP) as listener:
            with await asyncio.to_thread(connect, listener) as first:
                await until_closed(listener)  # while the first one may still talk
                assert await asyncio.to_thread(ask, first, shown(listener) + bytes(64)) == bytes(64)
        for token in (bytes(32), None):  # None: as the coordinator chose it
            async with peer.listening(TRANSPORT_TCP) as listener:
                assert await talk(listener, token or listener.token) == b""


async def test_a_port_is_closed_with_its_call_or_when_it_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(1) as [node], node.reached() as peer:
        async with peer.listening(TRANSPORT_TCP) as listener:
            pass
        await until_closed(listener)
        monkeypatch.setattr(links, "TALK_S", 0.05)
        async with peer.listening(TRANSPORT_TCP) as listener:
            with contextlib.suppress(ConnectionError):  # it may be closed before that is sent
                assert await talk(listener, b"half a token") == b""
        monkeypatch.setattr(links, "ACCEPT_S", 0.05)
        async with peer.listening(TRANSPORT_TCP) as listener:
            await until_free(listener)


async def until_free(listener: Listener) -> None:
    """Nobody comes to the port, not even to see whether it is open."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", listener.port)):
                return
            await asyncio.sleep(0.01)


async def until_closed(listener: Listener) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(OSError):
            while True:
                (await asyncio.to_thread(connect, listener)).close()


async def test_an_encrypted_port_takes_the_clusters_certificates_only_by_its_name(tmp_path: Path) -> None:
    ours, theirs = Certificates(tmp_path / "ours"), Certificates(tmp_path / "theirs")
    server = ours.network("node-1")
    server.listen(server.server(), "127.0.0.1:0")
    for client, name, error in (
        (ours.coordinator(), "node-1", ""),
        (theirs.coordinator(), "node-1", "."),
        (ours.coordinator(), "node-2", "CERTIFICATE_VERIFY_FAILED"),
    ):
        async with open_port(server, ListenRequest(transport=TRANSPORT_TLS, address="127.0.0.1:1")) as port:
            answering = asyncio.create_task(port.answer())
            line = await links.measure_line(client, name, "127.0.0.1", port.listener)
            await answering
        assert (line.rtt_ms > 0, bool(line.error)) == (not error, bool(error))
        assert re.search(error, line.error)


async def test_a_port_for_plain_grpc_answers_probes_with_the_right_token_and_nothing_else() -> None:
    async with serving(1) as [node], node.reached() as peer:
        async with peer.listening(TRANSPORT_GRPC) as listener:
            wrong = Listener(transport=TRANSPORT_GRPC, port=listener.port, token=bytes(32))
            while (error := (await links.measure_line(NETWORK, "node-1", "127.0.0.1", wrong)).error) == CROSSED:
                pass
            assert error == REFUSED
        async with (
            peer.listening(TRANSPORT_GRPC) as listener,  # which takes one connection
            grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel,
        ):
            call = NodeStub(channel).Probe()
            await call.code()  # it has ended before anything is written
            with pytest.raises(grpc.RpcError) as refused:
                await exchange(call, NETWORK.wire)
            assert refused.value.details() == REFUSED
            for ask in (NodeStub(channel).Examine, NodeStub(channel).Status):
                with pytest.raises(grpc.RpcError) as unknown:
                    await ask(ProbePart())
                assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_ports_are_opened_only_where_the_node_listens_anyway() -> None:
    network = Network(insecure=True)
    with pytest.raises(FrameError, match="does not listen anywhere"):
        network.measuring_host("192.0.2.9:1")
    server = network.server()
    network.listen(server, "127.0.0.1:0")
    assert network.measuring_host("192.0.2.9:1") == network.measuring_host("0.0.0.0:1") == "127.0.0.1"
    network.listen(server, "[::1]:0")
    assert network.measuring_host("[::1]:7") == "::1" and network.measuring_host("host.local:7") == "127.0.0.1"
    with pytest.raises(FrameError, match="expected certificates"):
        network.tls_context(server=True)


def link_local() -> str:
    """A link-local IPv6 address of this machine with its zone; empty if there is none."""
    entries = (entry for each in psutil.net_if_addrs().values() for entry in each)
    return next((entry.address for entry in entries if entry.address.startswith("fe80::") and "%" in entry.address), "")


@pytest.mark.parametrize("transport", [TRANSPORT_TCP, TRANSPORT_GRPC])
@pytest.mark.parametrize(
    ("bind", "called"),
    [
        ("::", "127.0.0.1"),
        ("::", "::1"),
        pytest.param(
            link_local(), link_local(), id="link-local", marks=pytest.mark.skipif(not link_local(), reason="has none")
        ),
    ],
)
async def test_an_address_of_ipv6_is_measured_however_it_is_reached(
    bind: str, called: str, transport: Transport
) -> None:
    network = Network(insecure=True)
    async with serving(1, network_of=lambda name: network) as [node]:
        await node.listening.add(join_address(bind, 0))
        bound = node.listening.addresses[-1]
        async with open_port(network, ListenRequest(transport=transport, address=bound)) as port:
            answering = asyncio.create_task(port.answer())
            address = join_address(called, split_address(bound)[1])
            asked = LinkRequest(node=node.name, addresses=[address], examined=True, listeners=[port.listener])
            reply = await links.measure_link(network, asked)
            await answering
    [line] = reply.lines
    assert (line.error, line.rtt_ms > 0) == ("", True)
    assert reply.way.local == reply.way.remote == called.partition("%")[0]


@pytest.mark.parametrize("transport", [TRANSPORT_TCP, TRANSPORT_GRPC])
async def test_a_port_on_an_address_that_is_gone_is_refused(
    monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    monkeypatch.setattr(Network, "measuring_host", lambda *_: "192.0.2.9")
    with pytest.raises(FrameError, match="expected to open a port on 192"):
        async with open_port(NETWORK, ListenRequest(transport=transport)):
            pass


async def test_tokens_of_another_size_are_not_sent() -> None:
    async with serving(2) as [first, second], first.reached() as one, second.reached() as two:
        for listeners in ([Listener(port=1, token=b"GET / HTTP/1.1")], [Listener(port=1, token=bytes(32))] * 5):
            with pytest.raises(FrameError, match="expected at most 4 listeners with tokens of 32 bytes"):
                await one.measure_link(two, listeners, examined=True)


async def test_code_that_was_replaced_under_a_worker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    running_code()
    async with serving(1) as [node], node.reached() as peer:
        assert not (await peer.examine()).is_outdated
        monkeypatch.setattr(facts_module, "code_on_disk", lambda: "another")
        assert (await peer.examine()).is_outdated


async def test_the_event_loop_is_free_while_commands_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = threading.Event()

    def reading(ask: RunProgram) -> Facts:
        assert is_free.wait(PATIENCE_S), "the event loop waits for this"
        return Facts(chip="slow")

    monkeypatch.setattr(facts_module.linux, "READINGS", (reading,))
    monkeypatch.setattr(facts_module.mac, "READINGS", (reading,))
    async with serving(1) as [node], node.reached() as peer:
        examining = asyncio.create_task(peer.examine())
        assert (await peer.examine(only_time=True)).time > 0
        asyncio.get_running_loop().call_soon(is_free.set)
        assert (await examining).chip == "slow"


def options_of(folder: Path, *addresses: str, keys: Path | None = None) -> ClusterOptions:
    workers = tuple(WorkerConfig(name=f"node-{i}", address=each) for i, each in enumerate(addresses, 1))
    return ClusterOptions(
        ClusterConfig(workers=workers, tls=TlsConfig(keys=str(keys)) if keys else None), str(folder), None, 128
    )


async def test_the_tokens_are_the_models_and_every_hop_is_told_over_tls(models: Models, tmp_path: Path) -> None:
    whole, certificates = models("qwen3"), Certificates(tmp_path)
    certificates.coordinator()
    async with serving(2, network_of=certificates.network) as nodes:
        addresses = (node.address for node in nodes)
        trial = await try_cluster(options_of(whole.folder, *addresses, keys=certificates.authority.folder))
    assert trial.is_same and trial.first.tokens == whole.tokens(range(1, 9), NUM_TOKENS)
    assert [f"{hop.source} → {hop.target}" for hop in trial.hops] == [
        "coordinator → node-1", "node-1 → node-2", "node-2 → coordinator",
    ]  # fmt: skip
    rows = 8 + NUM_TOKENS - 1  # of the prompt, and each token but the last
    least = rows * describe(open_folder(whole.folder)).row_bytes
    assert all(least < hop.sent_bytes < least + 8192 for hop in trial.hops[:2]) and 0 < trial.hops[2].sent_bytes < 8192
    assert all(hop.frame_ms >= 0 for hop in trial.hops)


def examined(*findings: Finding) -> Examination:
    return Examination(ExaminedCluster([]), ModelInUse(), "toy", findings)


async def test_an_examination_ends_with_a_trial_unless_there_is_a_problem(models: Models) -> None:
    whole, wrong = models("qwen3"), problem(Kind.DISK, "node-1", "it is full", "free some space")
    async with serving(1) as nodes:
        options = options_of(whole.folder, nodes[0].address)
        found = await try_answer(options, examined())
        assert [(each.level, each.kind) for each in found.findings] == [(Level.OK, Kind.TRIAL)]
        assert found.trial and found.trial.is_same and found.as_json()["trial"] == found.trial.as_json()
        assert (await try_answer(options, examined(wrong))).findings == (wrong,)
    assert (await try_answer(options_of(whole.folder), examined())).findings == ()


async def test_memory_that_other_programs_hold_is_not_taken_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, spec = [cases.node("studio", cases.STUDIO), cases.node()], cases.model()
    found = Examination(ExaminedCluster(nodes), ModelInUse(spec), "big", ())
    half = cases.GIB // 2  # of the layer that the coordinator holds at least
    monkeypatch.setattr(doctor, "memory_budget", lambda: half)
    [finding] = (await try_answer(options_of(Path("nowhere"), "127.0.0.1:1"), found)).findings
    assert (finding.level, finding.kind, finding.about) == (Level.NOTE, Kind.TRIAL, "studio")
    assert "it may use 512.0 MiB" in finding.text
    small = replace(found, cluster=ExaminedCluster([nodes[0], replace(nodes[1], configured_bytes=cases.GIB // 2)]))
    assert await try_answer(options_of(Path("nowhere"), "127.0.0.1:1"), small) is small, "a plan leaves it out"


async def test_a_trial_that_fails_is_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(options: ClusterOptions) -> ChainTrial:
        raise StageLost("ended", node="node-1")

    monkeypatch.setattr(doctor, "try_cluster", fails)
    found = await try_answer(options_of(folder, "127.0.0.1:1"), examined())
    [finding] = found.findings
    assert (finding.level, finding.kind, found.is_healthy, found.trial) == (Level.PROBLEM, Kind.TRIAL, False, None)
    assert "node-1" in finding.text and finding.fix


async def test_a_trial_leaves_another_coordinators_worker_alone(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(1) as nodes, opened(whole.folder, (2, 2), nodes) as chain:
        monkeypatch.setattr(deployment, "COORDINATOR_ID", "another process")
        options = options_of(whole.folder, nodes[0].address)
        with pytest.raises(NodeBusy, match="already serves another coordinator"):
            await try_cluster(options)
        [finding] = (await try_answer(options, examined())).findings
        assert (finding.level, finding.kind) == (Level.NOTE, Kind.TRIAL) and "serves another" in finding.text
        monkeypatch.undo()
        assert (await answer(chain, [1, 2, 3], 4)).tokens == whole.tokens([1, 2, 3], 4)
