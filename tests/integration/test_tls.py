"""Encrypted links: right certificates make the same tokens, and every other peer is refused with a reason."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from coordinator.cluster.open import open_cluster
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import Peer
from coordinator.deploy import cluster_file
from coordinator.deploy.authority import Authority
from coordinator.deploy.cluster_file import coordinator_in, unproven
from coordinator.deploy.discovery import Endpoint, FoundNode
from coordinator.planning.recovery import Limits
from protos.brigade_pb2 import MEDIUM_LOOPBACK, Coordinator, MeasureRequest
from tests.integration.certificates import Certificates, Shown
from tests.integration.conftest import RunningNode, Whole, answer, load_request, opened, serving
from tests.integration.upstream import attach_request
from tests.tiny import VOCAB
from worker.config import ClusterConfig, TlsConfig, WorkerConfig
from worker.errors import BrigadeError, CallerRefused, ConfigError, FrameError, StageLost
from worker.model.checkpoint import open_folder
from worker.node.certificates import Identity, KeyFile, Role, split_pem
from worker.node.hop import Link
from worker.node.network import Network

PROMPT = tuple((5 * i + 3) % VOCAB for i in range(20))
EXPECTS_TLS = r"it expects TLS, and cluster\.yaml here has no `tls:`; set it, .*"
REFUSED = r"closed the connection before any reply: it refused our certificate, expects TLS, or has ended"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def short_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long: a peer that does not answer here never will."""
    monkeypatch.setattr(Peer.hello, "__defaults__", (0.3,))


async def test_nodes_with_certificates_make_the_whole_models_tokens(whole: Whole, certificates: Certificates) -> None:
    async with (
        serving(2, network_of=certificates.network) as nodes,
        opened(whole.folder, (1, 1, 2), nodes, certificates.coordinator()) as chain,
    ):
        assert (await answer(chain, PROMPT, 12)).tokens == whole.tokens(PROMPT, 12)


@pytest.mark.parametrize("how", ["none", "foreign", "expired", "plaintext"])
async def test_uncertified_coordinators_are_refused(how: str, certificates: Certificates, short_hello: None) -> None:
    async with serving(1, network_of=certificates.network) as [node]:
        async with node.reached(certificates.wrong(how, "coordinator", Role.COORDINATOR)) as peer:
            reason = EXPECTS_TLS if how == "plaintext" else REFUSED
            with pytest.raises(StageLost, match=f"^worker node-1: {reason}$"):
                await peer.hello()
        async with node.reached(certificates.coordinator()) as peer:
            assert (await peer.hello(60)).node == "node-1"


OF_ANOTHER = r"its certificate is of another authority; .*brigade keys issue node-1, and copy the file to it"
REFUSES = r"it refuses this node's certificate, .*; .*brigade keys issue coordinator --coordinator$"


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ("foreign", ConfigError, OF_ANOTHER),
        ("expired", ConfigError, r"its certificate has expired; where the authority is: brigade keys issue node-1"),
        (
            "plaintext",
            ConfigError,
            r"it does not encrypt, and this node has `tls:`; start it with a copy of this cluster.yaml and .*--keys",
        ),
        ("another name", ConfigError, r"its certificate carries another name"),
        ("trusts another", CallerRefused, REFUSES),
    ],
)
async def test_a_worker_that_is_not_trusted_or_does_not_trust_this_node_is_refused_at_once_with_the_reason(
    how: str, kind: type[BrigadeError], reason: str, certificates: Certificates, tmp_path: Path
) -> None:
    """Whatever its address."""

    def network_of(name: str) -> Network:
        if how == "another name":
            return certificates.network("node-2")
        if how == "trusts another":
            other = read(Authority.make(tmp_path / "another"), name, Role.WORKER).authority
            return Network(keys=Shown(replace(read(certificates.authority, name, Role.WORKER), authority=other)))
        return certificates.wrong(how, name, Role.WORKER)

    async with (
        serving(1, network_of=network_of) as [node],
        node.reached(certificates.coordinator()) as peer,
        asyncio.timeout(60),
    ):
        with pytest.raises(kind, match=f"^worker node-1: {reason}"):
            await peer.hello(3600)


@pytest.mark.parametrize(
    ("how", "reason"), [("foreign", "is of another authority"), ("plaintext", "this node has `tls:`")]
)
async def test_a_launched_worker_that_is_not_trusted_is_to_be_launched(
    how: str, reason: str, certificates: Certificates
) -> None:
    """That sends it a certificate and its configuration, and it reads the latter only when it starts."""
    keys = KeyFile(certificates.authority.folder, "coordinator", Role.COORDINATOR)
    certificates.coordinator()
    network = Network(keys=keys, launched=["node-1"])
    async with (
        serving(1, network_of=lambda name: certificates.wrong(how, name, Role.WORKER)) as [node],
        node.reached(network) as peer,
    ):
        with pytest.raises(ConfigError, match=rf"{reason}; from here: brigade launch node-1 --config cluster\.yaml$"):
            await peer.hello(60)


async def test_only_a_coordinator_may_ask_load_attach_and_measure(folder: Path, certificates: Certificates) -> None:
    async with (
        serving(1, network_of=certificates.network) as [node],
        node.reached(certificates.network("mini")) as peer,
    ):
        calls = (
            peer.hello(),
            peer.load(load_request(folder, 2, 4), lambda report: None),
            peer.attach(attach_request(folder)),
            peer.status(1.0),
            peer.digests(),
            peer.unload(Coordinator()),
            peer.results(1, lambda report, data: None),
            peer.results(1, lambda report, data: None, of_prompts=True),
            peer.measure(MeasureRequest(model=load_request(folder, 2, 4))),
            peer.measure_link(peer),
        )
        for call in calls:
            with pytest.raises(
                ConfigError, match=r"^worker node-1: expected .* role brigade:coordinator, got .* mini "
            ):
                await call
        assert node.service.worker.shard is None


async def test_frames_come_from_the_predecessor_of_the_plan_only(folder: Path, certificates: Certificates) -> None:
    async with serving(1, network_of=certificates.network) as [node], node.reached(certificates.coordinator()) as peer:
        request = attach_request(folder)
        request.predecessor_name = "Studio"
        await peer.load(request.loaded, lambda report: None)
        await peer.attach(request)
        for name in ("mini", "coordinator"):
            with pytest.raises(FrameError, match=rf"^worker node-1: expected a hop from Studio, got .* of {name} "):
                await hop(certificates.of(name), node)
        await hop(certificates.network("Studio"), node)


async def hop(network: Network, node: RunningNode) -> None:
    """Open a hop to the node from studio as stage 0 of epoch 1, and end it."""
    link = Link(network, node.name, node.address, 1, 0, "studio")
    try:
        await link.wait_open()
    finally:
        await link.close()


async def test_a_worker_sends_to_the_successor_of_the_plan_only(folder: Path, certificates: Certificates) -> None:
    async with (
        serving(2, network_of=certificates.network) as [first, second],
        first.reached(certificates.coordinator()) as peer,
    ):
        request = attach_request(folder)
        request.loaded.start, request.loaded.end, request.num_stages = 1, 2, 3
        request.successor, request.successor_name = second.address, "node-3"
        await peer.load(request.loaded, lambda report: None)
        with pytest.raises(ConfigError, match=r"^worker node-3: its certificate carries another name"):
            await peer.attach(request)


async def test_an_older_version_of_tls_is_refused(certificates: Certificates) -> None:
    context = tls_context(certificates.authority.issue("coordinator", Role.COORDINATOR))
    context.set_alpn_protocols(["h2"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with (
        serving(1, network_of=certificates.network) as [node],
        encrypting(node, context) as address,
        node.reached(address=address) as peer,
    ):
        with pytest.raises(ConfigError, match=r"^worker node-1: expected .* TLSv1\.3, got one by TLSv1\.2"):
            await peer.hello()
        with pytest.raises(ConfigError, match=r"^worker node-1: expected .* TLSv1\.3, got one by TLSv1\.2"):
            await peer.measure_link()
    own = certificates.network("node-1").tls_context(server=True)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=own)
    with closing(server):
        connect = partial(asyncio.open_connection, *server.sockets[0].getsockname(), server_hostname="node-1")
        with pytest.raises(OSError):
            await connect(ssl=context)
        context.maximum_version = ssl.TLSVersion.TLSv1_3
        _, writer = await connect(ssl=context)
        writer.close()


def tls_context(path: Path) -> ssl.SSLContext:
    """That of a client with this node's file."""
    _, _, authority = split_pem(path.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.decode())
    context.load_cert_chain(path)
    return context


@asynccontextmanager
async def encrypting(node: RunningNode, context: ssl.SSLContext) -> AsyncIterator[str]:
    """The address of a proxy that takes plaintext and speaks to the node as `context` says."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = node.address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=node.name)
        with closing(writer), closing(back):
            await asyncio.gather(carry(reader, back), carry(there, writer), return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_renewed_certificate_is_shown_beside_a_running_chain(whole: Whole, certificates: Certificates) -> None:
    soon = datetime.now(UTC) + timedelta(days=10)
    async with serving(1, network_of=certificates.network) as [node]:
        certificates.authority.issue("node-1", Role.WORKER, until=soon)
        async with opened(whole.folder, (2, 2), [node], certificates.coordinator()) as chain:
            before = await shown_by(node, certificates)
            assert (await chain.peers[0].hello()).certificate_expires == int(soon.timestamp())
            certificates.authority.issue("node-1", Role.WORKER)
            after = await shown_by(node, certificates)
            assert after != before and after == await shown_by(node, certificates)
            renewed = (await chain.peers[0].hello()).certificate_expires
            assert renewed > int(soon.timestamp())
            (certificates.authority.folder / "node-1.pem").chmod(0o644)  # in the middle of another renewal
            assert (await chain.peers[0].hello()).certificate_expires == renewed
            assert (await answer(chain, PROMPT, 6)).tokens == whole.tokens(PROMPT, 6)


async def test_a_renewal_that_will_not_do_leaves_the_certificate_before_in_use(certificates: Certificates) -> None:
    told: list[str] = []
    path = certificates.authority.issue("node-1", Role.WORKER)
    network = Network(keys=KeyFile(path.parent, "node-1", Role.WORKER), warn=told.append)
    async with serving(1, network_of=lambda name: network) as [node]:
        before = await shown_by(node, certificates)
        certificates.authority.issue("node-2", Role.WORKER).replace(path)
        assert [await shown_by(node, certificates) for _ in range(2)] == [before, before]
        assert [line.partition(": ")[2][:55] for line in told] == [
            "expected a certificate of node-1, found one of node-2; "
        ]


async def shown_by(node: RunningNode, certificates: Certificates, address: str = "") -> bytes:
    """The certificate that the node shows a new caller, at its own address or another."""
    context = tls_context(certificates.authority.issue("studio", Role.COORDINATOR))
    host, _, port = (address or node.address).rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=node.name)
    with closing(writer):
        return bytes(writer.get_extra_info("ssl_object").getpeercert(True))


async def test_nodes_of_a_replaced_authority_are_shut_out(certificates: Certificates, short_hello: None) -> None:
    async with serving(1, network_of=certificates.network) as [node]:
        lost = read(certificates.authority, "lost", Role.COORDINATOR)
        async with node.reached(Network(keys=Shown(lost))) as peer:
            assert await peer.hello()
        renewed = Authority.make(certificates.authority.folder, replace=True)
        renewed.issue("node-1", Role.WORKER)
        async with node.reached(Network(keys=Shown(lost))) as peer:
            with pytest.raises(ConfigError, match=r"^worker node-1: its certificate is of another authority"):
                await peer.hello()
        ours = read(renewed, "coordinator", Role.COORDINATOR)
        careless = Shown(replace(lost, authority=ours.authority))  # it does not even look at who answers
        async with node.reached(Network(keys=careless)) as peer:
            with pytest.raises(StageLost, match=REFUSED):
                await peer.hello()
        async with node.reached(Network(keys=Shown(ours))) as peer:
            assert await peer.hello()


def read(authority: Authority, name: str, role: Role) -> Identity:
    return KeyFile(authority.issue(name, role).parent, name, role).read()


async def test_names_in_capitals_are_names(certificates: Certificates) -> None:
    async with (
        serving(1, network_of=lambda name: certificates.network(name.upper())) as [node],
        node.reached(certificates.coordinator(), name="Node-1") as peer,
    ):
        assert (await peer.hello()).node == "node-1"


# --- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_encrypted", "kind", "why"),
    [(True, ConfigError, OF_ANOTHER), (False, CallerRefused, r"expects TLS, and cluster\.yaml here has no `tls:`")],
    ids=["of another authority", "no tls here"],
)
async def test_a_worker_that_one_side_does_not_trust_is_reported_while_another_one_is_awaited(
    folder: Path, certificates: Certificates, is_encrypted: bool, kind: type[BrigadeError], why: str
) -> None:
    """And not counted as missing."""
    certificates.coordinator()
    checkpoint = open_folder(folder)
    tls = TlsConfig(keys=str(certificates.authority.folder)) if is_encrypted else None
    of_others = partial(certificates.wrong, "foreign", role=Role.WORKER)
    async with (
        serving(1, network_of=of_others if is_encrypted else certificates.network) as [node],
        asyncio.timeout(60),
    ):
        addresses = {node.name: node.address, "ghost": "127.0.0.1:1"}
        workers = tuple(WorkerConfig(name=name, address=(address,)) for name, address in addresses.items())
        limits = Limits(arrival_s=3600)
        options = ClusterOptions(ClusterConfig(workers=workers, tls=tls), checkpoint.name, None, 128, limits=limits)
        with pytest.raises(kind, match=why) as caught:
            async with open_cluster(options, checkpoint):
                pass
    assert caught.value.node == node.name


def chosen(address: str, names: Sequence[str]) -> list[FoundNode]:
    endpoints = [Endpoint(address, "lo", MEDIUM_LOOPBACK)]
    return [FoundNode(name, "0.1.0", "ab" * 32, True, None, endpoints) for name in names]


async def test_a_worker_has_the_name_of_its_certificate_and_no_other(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(1, network_of=certificates.network) as [node]:
        workers = chosen(node.address, ("node-1", "air"))
        monkeypatch.setattr(cluster_file, "HELLO_S", 30.0)  # however busy the machine is
        [(name, why)] = (await unproven(workers, certificates.coordinator())).items()
        assert name == "air" and "certificate carries another name" in why
        stranger = certificates.wrong("foreign", "coordinator", Role.COORDINATOR)
        monkeypatch.setattr(cluster_file, "HELLO_S", 0.3)  # which the next one waits for
        assert list(await unproven(workers, stranger)) == ["node-1", "air"]


async def test_without_certificates_a_worker_is_at_least_one_of_that_name() -> None:
    async with serving(1) as [node]:
        whys = await unproven(chosen(node.address, ("node-1", "air")), Network())
        assert whys == {"air": f"the worker at {node.address} has another name"}


def test_the_coordinator_is_whose_certificate_is_there(certificates: Certificates) -> None:
    folder = certificates.authority.folder
    certificates.authority.issue("mini", Role.WORKER)
    (folder / "notes.pem").write_text("no certificate")
    assert coordinator_in(folder) is None and coordinator_in(folder / "nowhere") is None
    certificates.authority.issue("studio", Role.COORDINATOR)
    assert coordinator_in(folder) == "studio"
    certificates.authority.issue("laptop", Role.COORDINATOR)
    assert coordinator_in(folder) is None
