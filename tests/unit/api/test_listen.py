import asyncio
import socket
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from coordinator.api import listen as protocol_module
from coordinator.api.listen import MAX_CONNECTIONS, MAX_HEAD_BYTES, BoundedProtocol, answering, listening_socket
from tests.unit.api.fakes import app as real_app
from tests.unit.virtual_time import VirtualTime
from worker.errors import ConfigError


class Transport(MagicMock):
    """Keeps what is written until it is closed."""

    def __init__(self) -> None:
        super().__init__(spec=asyncio.Transport)
        self.written, self.is_closed = b"", False
        self.get_extra_info.return_value = None
        self.is_closing.side_effect = lambda: self.is_closed
        self.write.side_effect = self._write
        self.close.side_effect = self.abort.side_effect = self._close

    def _write(self, data: bytes) -> None:
        self.written += data

    def _close(self) -> None:
        self.is_closed = True

    def _get_child_mock(self, /, **kwargs: Any) -> MagicMock:
        return MagicMock(**kwargs)


async def app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.get_running_loop().create_future()


def connected(state: ServerState, answer: ASGIApp = app) -> tuple[BoundedProtocol, Transport]:
    idle_s = protocol_module.IDLE_S
    config = uvicorn.Config(
        answer, http=BoundedProtocol, ws="none", log_config=None, lifespan="off", timeout_keep_alive=idle_s
    )
    config.load()
    protocol, transport = BoundedProtocol(config, state, {}), Transport()
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.parametrize("size", [1, 50, 1000])
async def test_a_client_that_offers_another_protocol_is_answered_in_this_one(size: int) -> None:
    """Java's client offers h2c with every request; httptools would take the body for that protocol."""
    bodies: list[bytes] = []

    async def read(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        bodies.append(body)
        await Response("done")(scope, receive, send)

    protocol, transport = connected(ServerState(), read)
    body = b'{"prompt": "\r\nUpgrade: h2c"}'
    head = b"POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    sent = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for at in range(0, len(sent), size):
        protocol.data_received(sent[at : at + size])
    for number in (1, 2):
        while len(bodies) < number or b"done" not in transport.written:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        transport.written = b""
        if number == 1:
            protocol.data_received(sent)  # on the same connection
    assert bodies == [body, body]


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"GET /", b"a" * 1000),
        (b"GET / HTTP/1.1\r\na: ", b"a" * 1000),
        (b"GET / HTTP/1.1\r\n", b"a: " + b"b" * 1000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\n", b"a" * 1000),
        (b"", b"\r\n" * 500),
    ],
)
async def test_a_head_without_an_end_is_refused_before_there_is_a_request(first: bytes, again: bytes) -> None:
    state = ServerState()
    protocol, transport = connected(state)
    protocol.data_received(first)
    num_sent = 0
    while not transport.is_closed and num_sent < 2 * MAX_HEAD_BYTES:
        protocol.data_received(again)
        num_sent += len(again)
    assert transport.is_closed and not state.tasks
    protocol.connection_lost(None)
    assert transport.written[9:12] == b"431"


async def test_a_client_has_so_long_to_say_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_module, "HEAD_S", 0.0)
    (_, silent), (whole, served) = connected(ServerState()), connected(ServerState())
    whole.data_received(b"GET / HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    [task] = whole.tasks
    task.cancel()
    await asyncio.wait([task])
    assert (silent.is_closed, served.abort.called) == (True, False)


async def test_one_connection_too_many_is_told_to_come_again() -> None:
    state = ServerState()
    state.connections |= set(range(MAX_CONNECTIONS - 1))
    (_, last), (_, refused) = connected(state), connected(state)
    assert last.written == b""
    assert refused.written.startswith(b"HTTP/1.1 503") and b"retry-after" in refused.written


@pytest.mark.parametrize(("taken", "wanted"), [("", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "127.0.0.1")])
def test_a_port_is_taken_also_where_only_one_of_its_listeners_is_for_all_addresses(
    monkeypatch: pytest.MonkeyPatch, taken: str, wanted: str
) -> None:
    monkeypatch.setattr(socket, "SO_REUSEADDR", socket.SO_REUSEPORT)  # it allows both, as that of macOS does
    with listening_socket(wanted, 0) as listener:
        port = listener.getsockname()[1]
    with (
        socket.create_server((taken, port), reuse_port=True),
        pytest.raises(ConfigError, match=rf"^cannot listen on {wanted}:{port}: Address already in use; give another"),
        listening_socket(wanted, port),
    ):
        pass
    with listening_socket(wanted, port):  # as soon as it is free
        pass


async def test_a_client_that_sends_far_too_much_is_told_so_once_it_listens() -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with listening_socket("127.0.0.1", 0) as listener:
        async with answering(real_app(), listener, None):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(f"{head}Content-Length: {8 << 20}\r\n\r\n".encode() + bytes(8 << 20))
            await writer.drain()
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.close()


def test_a_connection_waits_for_the_next_request_after_a_body_that_came_later_than_its_answer(
    virtual: VirtualTime,
) -> None:
    async def talk() -> None:
        protocol, transport = connected(ServerState(), Response(b"no"))
        for number in (1, 2):
            protocol.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n")
            while transport.written.count(b"\r\n\r\nno") < number:  # noqa: ASYNC110 - a few turns of the loop
                await asyncio.sleep(0)
            protocol.data_received(b"body")
            await asyncio.sleep((protocol_module.HEAD_S + protocol_module.IDLE_S) / 2)
            assert not transport.is_closed
        written = transport.written
        await asyncio.sleep(protocol_module.IDLE_S)
        assert transport.is_closed and transport.written == written, "it is closed without a word"
        protocol.connection_lost(None)

    virtual.run(talk())


async def test_an_answer_that_nobody_reads_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a connection that is kept: tests/unit/api/test_streams.py."""
    monkeypatch.setattr(protocol_module, "UNREAD_S", 0.05)
    lost, end = asyncio.Event(), BoundedProtocol.connection_lost
    monkeypatch.setattr(BoundedProtocol, "connection_lost", lambda self, exc: (end(self, exc), lost.set()))
    with listening_socket("127.0.0.1", 0) as listener:
        async with answering(Response(bytes(32 << 20)), listener, None):
            with socket.create_connection(listener.getsockname()) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                await lost.wait()


def test_a_client_is_cut_off_only_once_it_reads_next_to_nothing() -> None:
    time = VirtualTime()

    async def talked() -> list[bool]:
        protocol, transport = connected(ServerState())
        protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
        found = []
        transport.get_write_buffer_size.return_value = 1000
        protocol.pause_writing()
        protocol.resume_writing()  # it has read everything in time
        await asyncio.sleep(2 * protocol_module.UNREAD_S)
        found.append(transport.is_closed)
        transport.get_write_buffer_size.return_value = 200_000
        protocol.pause_writing()
        for num_unread in (150_000, 100_000, 99_000):
            transport.get_write_buffer_size.return_value = num_unread
            await asyncio.sleep(protocol_module.UNREAD_S)
            found.append(transport.is_closed)
        protocol.connection_lost(None)
        return found

    assert time.run(talked()) == [False, False, False, True]
    time.close()


async def test_a_client_that_leaves_after_further_requests_is_noticed_by_the_one_that_is_answered() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        begun.set()
        if (await receive())["type"] == "http.disconnect":
            left.set()

    with listening_socket("127.0.0.1", 0) as listener:
        async with answering(answer, listener, None):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                await begun.wait()
            writer.close()
            async with asyncio.timeout(10):
                await left.wait()


async def test_a_server_whose_listening_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failed(self: uvicorn.Server, sockets: Any = None) -> None:
        raise OSError("no more files")

    monkeypatch.setattr(uvicorn.Server, "serve", failed)
    with listening_socket("127.0.0.1", 0) as listener, pytest.raises(OSError, match="no more files"):
        async with answering(app, listener, None):
            await asyncio.get_running_loop().create_future()
