"""What may go unencrypted: this machine's own, and everything if the user says so; and how much a server takes."""

import asyncio
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import pytest

from coordinator.cluster.peer import Peer
from protos.brigade_pb2 import LoadProgress, LoadRequest, StatusRequest
from protos.brigade_pb2_grpc import NodeStub
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, RunningNode, serving
from worker.config import load_cluster
from worker.errors import ConfigError, StageLost
from worker.node import network as network_module
from worker.node.network import Network

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
    options = dict(network_module._SERVER_OPTIONS)
    assert "grpc.max_allowed_incoming_connections" in options
    options["grpc.max_allowed_incoming_connections"] = 3
    monkeypatch.setattr(network_module, "_SERVER_OPTIONS", list(options.items()))
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
    monkeypatch.setattr(network_module, "_MOST_CALLS", 3)

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


HOST = f"{'x' * 64}.invalid"  # a label longer than any: no name server is asked
LOOK_UP = f"""
import coordinator, grpc

with grpc.insecure_channel("{HOST}:1") as channel:
    channel.unary_unary("/a/b")(b"", timeout=10)
"""


def test_names_are_looked_up_as_the_system_does() -> None:
    """gRPC's own resolver would not find those of Bonjour; the system's fails in the words of `getaddrinfo`."""
    done = subprocess.run([sys.executable, "-c", LOOK_UP], capture_output=True, text=True)
    assert f"errors resolving {HOST}" in done.stderr and "getaddrinfo" in done.stderr


@pytest.mark.parametrize("method", ["Node/Status", "Node/Attach"], ids=["one reply", "many"])
async def test_a_call_that_never_sends_its_request_gives_its_place_back(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_module, "_MOST_CALLS", 3)
    monkeypatch.setattr(network_module, "_REQUEST_S", 0.2)
    async with serving(1) as [node], NETWORK.channel(node.name, node.address) as channel:
        idle = [channel.stream_stream(f"/brigade.v1.{method}")() for _ in range(3)]
        for call in idle:
            with pytest.raises(grpc.RpcError, match="expected a request within"):
                await call.read()
        assert (await NodeStub(channel).Status(StatusRequest())).node == node.name
