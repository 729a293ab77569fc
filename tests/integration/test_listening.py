"""Where a worker listens and who connects: several addresses, what goes unencrypted, limits, the end of servers."""

import asyncio
import io
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.cluster.peer import Peer
from protos.brigade_pb2 import AttachRequest, LoadProgress, LoadRequest, StatusRequest
from protos.brigade_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, RunningNode, serving
from tests.integration.many import until
from tests.integration.test_tls import shown_by
from tools.worker_process import free_port
from worker.config import load_cluster, split_address
from worker.errors import ConfigError, FrameError, StageLost
from worker.node import network as network_module
from worker.node import serve as listening_module
from worker.node import service as service_module
from worker.node.certificates import Role
from worker.node.hop import Link, results
from worker.node.log import worker_log
from worker.node.network import Network, hop_address
from worker.node.serve import listening, wait_last_calls
from worker.node.service import NodeService
from worker.platform.interfaces import is_taken
from worker.platform.threads import MlxThread


@asynccontextmanager
async def worker(*binds: str, network: Network = NETWORK) -> AsyncIterator[tuple[RunningNode, io.StringIO]]:
    """A worker called mini on these addresses, and what it says; it is reached at the first."""
    out = io.StringIO()
    with closing(MlxThread()) as thread:
        service = NodeService("mini", thread, network, log=worker_log("mini", out))
        async with listening(service, binds, network, service.log) as found:
            yield RunningNode("mini", found.addresses[0], service, thread, found), out


async def assert_takes_hops(address: str) -> None:
    """The node at this address refuses a hop, for it is part of no chain."""
    link = Link(NETWORK, "mini", address, 1, 0)
    with pytest.raises(FrameError, match=r"^worker mini: is not part of a chain"):
        await link.wait_open()
    await link.close()


@pytest.mark.parametrize("port_of", [str, hop_address], ids=["the port", "that of its hops"])
async def test_a_worker_listens_on_all_its_addresses_and_on_one_that_it_lacks_as_soon_as_it_has_it(
    monkeypatch: pytest.MonkeyPatch, port_of: Callable[[str], str]
) -> None:
    monkeypatch.setattr(listening_module, "AGAIN_S", 0.02)
    missing = f"127.0.0.1:{free_port()}"
    in_use = port_of(missing)
    lacking = socket.create_server(split_address(in_use))
    async with worker("127.0.0.1:0", missing, "127.0.0.2:0") as (node, out):
        addresses = node.listening.addresses
        assert len(addresses) == 2
        assert out.getvalue().startswith(f"worker mini: cannot listen on {in_use}: in use or not an address of this")
        lacking.close()
        await until(lambda: f"worker mini listens on {missing}\n" in out.getvalue())
        for address in (*addresses[:2], missing):
            peer = Peer("mini", [address], NETWORK)
            assert (await peer.hello()).node == "mini"
            await peer.close()
            await assert_takes_hops(address)
        with pytest.raises(ConfigError, match=f"^cannot listen on {missing}: in use"):
            async with worker(missing):
                pass


async def test_a_worker_whose_port_for_hops_is_in_use_says_so_and_leaves_the_other_one() -> None:
    address = f"127.0.0.1:{free_port()}"
    hops = hop_address(address)
    with (
        socket.create_server(split_address(hops)),
        pytest.raises(ConfigError, match=f"^cannot listen on {hops}: in use"),
    ):
        async with worker(address):
            pass
    async with worker(address) as (node, _):
        assert node.listening.addresses == [address]


def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], socket.socket]:
    """Let a wildcard and an address have the same port, as on macOS; return what opens such a listener."""
    monkeypatch.setattr(network_module, "SERVER_OPTIONS", [("grpc.so_reuseport", 1)])

    def listen(address: str) -> socket.socket:
        return socket.create_server(split_address(address), reuse_port=True)

    return listen


@pytest.mark.parametrize("port_of", [str, hop_address], ids=["the port", "that of its hops"])
async def test_a_port_is_in_use_also_where_only_one_of_its_listeners_is_for_all_addresses(
    monkeypatch: pytest.MonkeyPatch, port_of: Callable[[str], str]
) -> None:
    listen, port = beside(monkeypatch), free_port()
    for taken, wanted in (("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "127.0.0.1")):
        bind = port_of(f"{wanted}:{port}")
        with (
            listen(port_of(f"{taken}:{port}")),
            pytest.raises(ConfigError, match=f"^cannot listen on {bind}: in use"),
        ):
            async with worker(f"{wanted}:{port}", network=Network(insecure=True)):
                pass
    with listen(port_of(f"127.0.0.2:{port}")):  # another address is free, and so is one of which a listener has ended
        async with worker(f"127.0.0.1:{port}"):
            pass


def test_what_accepts_at_an_address_or_on_loopback_for_all_of_them_takes_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for host, expected in (
            *((host, True) for host in ("127.0.0.1", "localhost", "0.0.0.0", "::")),
            ("127.0.0.2", False),
            ("192.0.2.1", False),  # of no machine: it is not called
            ("no.such.name.invalid", False),
        ):
            assert is_taken(host, port) is expected, host
        assert not is_taken("127.0.0.1", 0)
    assert not is_taken("127.0.0.1", port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_what_accepts_by_ipv6_takes_its_port() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        assert is_taken("::1", port) and is_taken("::", port) and not is_taken("127.0.0.1", port)


async def test_a_closed_port_for_hops_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    link = Link(NETWORK, "mini", address, 1, 0)
    reports = partial(results, NETWORK, "mini", address, 1, "", lambda report, data: None, of_prompts=False)
    for opening in (link.wait_open, reports):
        with pytest.raises(
            StageLost, match=f"^worker mini: nothing answers at {hop_address(address)}, where frames go"
        ):
            await opening()
    await link.close()


async def test_a_worker_on_any_port_takes_one_whose_port_for_hops_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    network, tried = Network(), list[str]()
    listen = network.listen

    with ExitStack() as stack:

        def spoil(server: Any, bind: str) -> int:
            """Occupy the second port of the first choices."""
            port = listen(server, bind)
            if bind.endswith(":0"):
                tried.append(f"127.0.0.1:{port}")
                if len(tried) < 3:
                    stack.enter_context(closing(socket.create_server(split_address(hop_address(tried[-1])))))
            return port

        monkeypatch.setattr(network, "listen", spoil)
        async with worker("127.0.0.1:0", network=network) as (node, _):
            assert node.listening.addresses == tried[-1:] and len(tried) >= 3
            await assert_takes_hops(node.address)


async def test_a_worker_stops_though_its_mlx_thread_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "STOP_HOPS_S", 0.05)
    release = threading.Event()
    with closing(MlxThread()) as thread:
        service = NodeService("mini", thread, NETWORK)
        async with asyncio.timeout(30), listening(service, ["127.0.0.1:0"], NETWORK, service.log):
            stuck = thread.submit(partial(release.wait, 60))
        release.set()
        await stuck


async def test_an_address_that_is_not_allowed_is_said_once_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "AGAIN_S", 0.0)
    async with worker("127.0.0.1:0", "0.0.0.0:0") as (node, out):
        assert len(node.listening.addresses) == 1
        assert out.getvalue().startswith("worker mini: will not listen on 0.0.0.0:0: what is sent there is not encr")
        assert "trying again" not in out.getvalue()


async def test_an_unexpected_error_of_a_later_try_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "AGAIN_S", 0.0)
    network = Network()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with worker("127.0.0.1:0", f"127.0.0.1:{taken.getsockname()[1]}", network=network) as (_, out):
            monkeypatch.setattr(network, "listen", lambda server, bind: 1 // 0)
            await until(lambda: "internal error: ZeroDivisionError" in out.getvalue())


async def test_a_renewed_certificate_is_shown_at_every_address(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with worker("127.0.0.1:0", "127.0.0.1:0", network=certificates.network("mini")) as (node, _):
        addresses = [each for own in node.listening.addresses for each in (own, hop_address(own))]
        before = {await shown_by(node, certificates, address) for address in addresses}
        certificates.authority.issue("mini", Role.WORKER)
        after = {await shown_by(node, certificates, address) for address in addresses}
        assert len(before) == len(after) == 1 and before != after


class Slow(NodeServicer):
    """A node whose attachment closes only when it may."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.has_ended = False

    async def Attach(self, request: AttachRequest, context: grpc.aio.ServicerContext) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
            self.has_ended = True


def test_a_call_that_is_cut_off_ends_before_the_loop_and_without_a_trace(capfd: pytest.CaptureFixture[str]) -> None:
    async def serve() -> bool:
        server, node = grpc.aio.server(), Slow()
        add_NodeServicer_to_server(node, server)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        call: Any = NodeStub(channel).Attach(AttachRequest())
        await node.began.wait()
        await server.stop(None)
        await channel.close()
        node.may_end.set()  # in the very moment in which the server has stopped
        await wait_last_calls()
        assert call.done()
        return node.has_ended

    has_ended = asyncio.run(serve())
    assert "Traceback" not in capfd.readouterr().err
    assert has_ended


ELSEWHERE = ["0.0.0.0:0", "[::]:0", "192.168.1.7:50070", "mini.local:50070"]


@pytest.mark.parametrize("address", ELSEWHERE)
async def test_nothing_leaves_this_machine_unencrypted(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^will not listen on .*not encrypted.*`tls:`.*`insecure: true`"):
        NETWORK.listen(NETWORK.server(), address)
    with pytest.raises(ConfigError, match=r"^will not connect to mini at .*not encrypted.*`tls:`.*`insecure: true`"):
        NETWORK.channel("mini", address)


async def test_it_may_if_it_is_encrypted_or_the_user_trusts_the_network(tmp_path: Path) -> None:
    for network in (Certificates(tmp_path).network("mini"), Network(insecure=True)):
        server = network.server()
        assert network.listen(server, "0.0.0.0:0") > 0
        await server.stop(None)
        await network.channel("air", "192.168.1.7:50070").close()


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_no_address_is_a_socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool) -> None:
    monkeypatch.chdir(tmp_path)
    network = Certificates(tmp_path).network("mini") if is_encrypted else Network(insecure=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("50070")
        listening.listen()
        listening.setblocking(False)
        for address in (f"unix:{tmp_path}/50070", "unix:///50070", "ipv4:127.0.0.1:1", "dns:///mini:1"):
            with pytest.raises(ConfigError, match="expected HOST:PORT"):
                network.channel("air", address)
        async with network.channel("air", "unix:50070") as channel:  # gRPC's spelling of a path, and ours of a host
            with pytest.raises(grpc.RpcError, match="unix"):
                await NodeStub(channel).Status(StatusRequest(), timeout=5)
        with pytest.raises(BlockingIOError):
            listening.accept()


async def opened_raw(node: RunningNode, stack: AsyncExitStack) -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection(*node.address.split(":"))
    stack.callback(writer.close)
    return reader


async def wait_closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(60):
        while await reader.read(1024):
            pass


async def test_connections_beyond_the_limit_are_closed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(network_module.SERVER_OPTIONS)
    assert "grpc.max_allowed_incoming_connections" in options
    options["grpc.max_allowed_incoming_connections"] = 3
    monkeypatch.setattr(network_module, "SERVER_OPTIONS", list(options.items()))
    async with serving(1) as [node], AsyncExitStack() as stack:
        channel = await stack.enter_async_context(NETWORK.channel(node.name, node.address))
        assert (await NodeStub(channel).Status(StatusRequest())).node == node.name
        kept = [await opened_raw(node, stack) for _ in range(2)]
        for reader in kept:
            assert await reader.read(1)  # it is taken in
        for _ in range(20):
            await wait_closed(await opened_raw(node, stack))
        assert (await NodeStub(channel).Status(StatusRequest())).node == node.name
        assert not any(reader.at_eof() for reader in kept)


async def test_calls_beyond_the_limit_are_refused_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "MOST_CALLS", 3)

    async def report(progress: LoadProgress) -> None:
        pass

    async with serving(1) as [node], NETWORK.channel(node.name, node.address) as channel:
        stub = NodeStub(channel)
        async with node.service.worker.turn(report):  # so that others wait for theirs
            waiting = [stub.Load(LoadRequest()) for _ in range(3)]
            for call in waiting:
                assert (await call.read()).phase == "waiting"
            with pytest.raises(grpc.RpcError, match="Concurrent RPC limit exceeded"):
                await stub.Status(StatusRequest())
            assert [call.done() for call in waiting] == [False] * 3
            waiting.pop().cancel()
            async with asyncio.timeout(60):
                while True:  # until the server has heard of it
                    with suppress(grpc.RpcError):
                        await stub.Status(StatusRequest())
                        break
            for call in waiting:
                call.cancel()


async def test_hints_name_the_configuration_that_was_given_and_what_starts_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "home.yaml"
    path.write_text(
        "workers: [{name: mini, address: '127.0.0.1:1'}, {name: air, address: '127.0.0.1:2', ssh: anna@air}]\n"
    )
    network = Network.of(load_cluster(path))
    started = {"mini": f"there: brigade worker --config {path} --name mini",
               "air": f"from here: brigade launch air --config {path}"}  # fmt: skip
    for name, way in started.items():
        peer = Peer(name, ["127.0.0.1:1"], network)
        with pytest.raises(StageLost, match=rf"\. Start it {way}$"):
            await peer.hello(0.05)
        await peer.close()
    with pytest.raises(ConfigError, match=f"Set `tls:` in {path} "):
        network.channel("mini", "192.168.1.7:50070")


HOST = "mini.invalid"  # no name server knows one that ends so (RFC 6761)
LOOK_UP = f"""
import coordinator, grpc

with grpc.insecure_channel("{HOST}:1") as channel:
    channel.unary_unary("/a/b")(b"", timeout=10)
"""


def test_names_are_looked_up_as_the_system_does() -> None:
    """gRPC's own resolver would not find those of Bonjour; the system's fails in the words of `getaddrinfo`."""
    done = subprocess.run([sys.executable, "-c", LOOK_UP], capture_output=True, text=True)
    assert f"errors resolving {HOST}" in done.stderr and "getaddrinfo" in done.stderr


@pytest.mark.parametrize("method", ["Node/Status", "Node/Attach", "Node/Feed"], ids=["one reply", "many", "weights"])
async def test_a_call_that_never_sends_its_request_gives_its_place_back(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "MOST_CALLS", 3)
    for module in (network_module, service_module):
        monkeypatch.setattr(module, "REQUEST_S", 0.2)
    async with serving(1) as [node], NETWORK.channel(node.name, node.address) as channel:
        idle = [channel.stream_stream(f"/brigade.v1.{method}")() for _ in range(3)]
        for call in idle:
            with pytest.raises(grpc.RpcError, match=r"expected a request within|expected weights"):
                await asyncio.wait_for(call.read(), 20)
        assert (await NodeStub(channel).Status(StatusRequest())).node == node.name
