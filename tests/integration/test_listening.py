"""A worker with several addresses of its own."""

import asyncio
import io
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.cluster.peer import Peer
from tests.integration.certificates import Certificates
from tests.integration.conftest import NETWORK, RunningNode
from tests.integration.many import until
from tests.integration.test_tls import shown_by
from worker.errors import ConfigError
from worker.node import serve as listening_module
from worker.node.identity import Role
from worker.node.log import worker_log
from worker.node.network import Network
from worker.node.serve import Listening, listening
from worker.node.service import NodeService
from worker.platform.threads import MlxThread


@pytest.fixture
def thread() -> Iterator[MlxThread]:
    thread = MlxThread()
    yield thread
    thread.close()


async def test_a_worker_listens_on_all_its_addresses_and_on_one_that_it_lacks_as_soon_as_it_has_it(
    monkeypatch: pytest.MonkeyPatch, thread: MlxThread
) -> None:
    monkeypatch.setattr(listening_module, "_AGAIN_S", 0.02)
    lacking, out = socket.create_server(("127.0.0.1", 0)), io.StringIO()
    missing = f"127.0.0.1:{lacking.getsockname()[1]}"
    log = worker_log("mini", out)
    service = NodeService("mini", thread, NETWORK, log=log)
    async with listening(service, ["127.0.0.1:0", missing, "127.0.0.2:0"], NETWORK, log) as found:
        assert len(found.addresses) == 2
        assert out.getvalue().startswith(f"worker mini: cannot listen on {missing}: in use or not an address of this")
        lacking.close()
        await until(lambda: f"worker mini listens on {missing}\n" in out.getvalue())
        for address in (*found.addresses[:2], missing):
            peer = Peer("mini", [address], NETWORK)
            assert (await peer.hello()).node == "mini"
            await peer.close()
        with pytest.raises(ConfigError, match=f"^cannot listen on {missing}: in use"):
            async with listening(service, [missing], NETWORK, log):
                pass


async def test_an_address_that_is_not_allowed_is_said_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, thread: MlxThread
) -> None:
    monkeypatch.setattr(listening_module, "_AGAIN_S", 0.0)
    out, network = io.StringIO(), Network()
    service = NodeService("mini", thread, network, log=worker_log("mini", out))
    async with listening(service, ["127.0.0.1:0", "0.0.0.0:0"], network, service.log) as found:
        assert len(found.addresses) == 1
        assert out.getvalue().startswith("worker mini: will not listen on 0.0.0.0:0: what is sent there is not encr")
        assert "tried again" not in out.getvalue()


async def test_an_unexpected_error_of_a_later_try_is_logged(monkeypatch: pytest.MonkeyPatch, thread: MlxThread) -> None:
    monkeypatch.setattr(listening_module, "_AGAIN_S", 0.0)
    out, network = io.StringIO(), Network()
    service = NodeService("mini", thread, network, log=worker_log("mini", out))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        missing = f"127.0.0.1:{taken.getsockname()[1]}"
        async with listening(service, ["127.0.0.1:0", missing], network, service.log):
            monkeypatch.setattr(network, "listen", lambda server, bind: 1 // 0)
            await until(lambda: "internal error: ZeroDivisionError" in out.getvalue())


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_a_server_that_does_not_serve_is_stopped(
    monkeypatch: pytest.MonkeyPatch, thread: MlxThread, how: str
) -> None:
    network, stopped = Network(), []
    server = network.server()
    stop, start = server.stop, server.start

    async def stopping(grace: float | None) -> None:
        stopped.append(grace)
        await stop(grace)

    async def starting() -> None:
        await start()
        raise asyncio.CancelledError

    monkeypatch.setattr(server, "stop", stopping)
    monkeypatch.setattr(server, "start", starting)
    monkeypatch.setattr(network, "server", lambda: server)
    found = Listening(NodeService("mini", thread, network), network)
    with pytest.raises(ConfigError if how == "refused" else asyncio.CancelledError):
        await found.add("0.0.0.0:0" if how == "refused" else "127.0.0.1:0")
    assert stopped == [None] and not found.addresses


async def test_a_renewed_certificate_is_shown_at_every_address(tmp_path: Path, thread: MlxThread) -> None:
    certificates = Certificates(tmp_path)
    network = certificates.network("mini")
    service = NodeService("mini", thread, network, log=worker_log("mini", None))
    async with listening(service, ["127.0.0.1:0", "127.0.0.1:0"], network, service.log) as found:
        nodes = [RunningNode("mini", address, service, thread, network.server()) for address in found.addresses]
        before = {await shown_by(node, certificates) for node in nodes}
        certificates.authority.issue("mini", Role.WORKER)
        after = {await shown_by(node, certificates) for node in nodes}
        assert len(before) == len(after) == 1 and before != after
