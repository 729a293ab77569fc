"""A worker with several addresses of its own, and the end of its servers."""

import asyncio
import io
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from coordinator.cluster.peer import Peer
from protos.brigade_pb2 import AttachRequest
from protos.brigade_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, RunningNode
from tests.integration.many import until
from tests.integration.test_tls import shown_by
from tools.worker_process import free_port
from worker.config import split_address
from worker.errors import ConfigError, FrameError
from worker.node import serve as listening_module
from worker.node.certificates import Role
from worker.node.hop import Link
from worker.node.log import worker_log
from worker.node.network import Network, hop_address
from worker.node.serve import listening, wait_last_calls
from worker.node.service import NodeService
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
    monkeypatch.setattr(listening_module, "_AGAIN_S", 0.02)
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
    monkeypatch.setattr(listening_module, "_STOP_HOPS_S", 0.05)
    release = threading.Event()
    with closing(MlxThread()) as thread:
        service = NodeService("mini", thread, NETWORK)
        async with asyncio.timeout(30), listening(service, ["127.0.0.1:0"], NETWORK, service.log):
            stuck = thread.submit(partial(release.wait, 60))
        release.set()
        await stuck


async def test_an_address_that_is_not_allowed_is_said_once_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "_AGAIN_S", 0.0)
    async with worker("127.0.0.1:0", "0.0.0.0:0") as (node, out):
        assert len(node.listening.addresses) == 1
        assert out.getvalue().startswith("worker mini: will not listen on 0.0.0.0:0: what is sent there is not encr")
        assert "trying again" not in out.getvalue()


async def test_an_unexpected_error_of_a_later_try_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_module, "_AGAIN_S", 0.0)
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
