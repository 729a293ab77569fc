"""Plain sockets beside gRPC: what the way to another node gives without it, bare and encrypted.

A conversation is a token, some small messages each sent back, and many bytes that are answered by one. Both ends block,
on threads of their own, since an event loop would be measured with it; every wait has a deadline.
"""

import asyncio
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from statistics import median

from protos.brigade_pb2 import TRANSPORT_TLS, Line, Listener, ListenRequest
from worker.node.network import Network
from worker.process.call_thread import run_aside

TOKEN_BYTES = 32
_SMALL = bytes(64)
_NUM_SMALL, _NUM_WARM = 32, 8
_LARGE_BYTES, _PIECE_BYTES = 8 * 2**20, 2**18
_ACCEPTED_S = 15.0  # for whoever is to come
_TALK_S = 5.0


class Talk:
    """A connection that sends and receives whole messages until a moment after which it raises TimeoutError."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until

    def send(self, data: bytes) -> None:
        self._connection.settimeout(self._left_s())
        self._connection.sendall(data)

    def receive(self, count: int) -> bytes:
        """So many bytes. Raises ConnectionResetError if there are less."""
        found = bytearray()
        while len(found) < count:
            self._connection.settimeout(self._left_s())
            piece = self._connection.recv(min(count - len(found), _PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("the connection was closed")
            found += piece
        return bytes(found)

    def _left_s(self) -> float:
        if (left_s := self._until - time.monotonic()) <= 0:
            raise TimeoutError(f"took longer than {_TALK_S:.0f} s")
        return left_s


def ask(talk: Talk, token: bytes) -> Line:
    """The side that measures."""
    talk.send(token)
    tries_s = [_there_and_back(talk) for _ in range(_NUM_WARM + _NUM_SMALL)]
    rtt_s = median(tries_s[_NUM_WARM:])
    began, piece = time.monotonic(), bytes(_PIECE_BYTES)
    for _ in range(_LARGE_BYTES // _PIECE_BYTES):
        talk.send(piece)
    talk.receive(1)
    took_s = time.monotonic() - began
    return Line(rtt_ms=1e3 * rtt_s, bytes_per_s=_LARGE_BYTES / max(took_s - rtt_s, 1e-6))


def answer(talk: Talk, token: bytes) -> None:
    """The other side. Who does not know the token gets nothing."""
    if not hmac.compare_digest(talk.receive(TOKEN_BYTES), token):
        return
    for _ in range(_NUM_WARM + _NUM_SMALL):
        talk.send(talk.receive(len(_SMALL)))
    for _ in range(_LARGE_BYTES // _PIECE_BYTES):
        talk.receive(_PIECE_BYTES)
    talk.send(b"!")


async def measure_line(network: Network, node: str, host: str, listener: Listener) -> Line:
    """What a conversation with this listener shows, or why there was none."""
    context = network.tls_context(server=False) if listener.transport == TRANSPORT_TLS else None
    try:
        return await run_aside(partial(_call, host, listener, context, node))
    except OSError as error:
        return Line(error=error.strerror or str(error))


@asynccontextmanager
async def listening_once(network: Network, request: ListenRequest) -> AsyncIterator["Once"]:
    """A port for one conversation, where this node listens anyway; closed once somebody has come, or with the context.

    Raises:
        FrameError: this node listens nowhere, or has no certificate for an encrypted one.
    """
    context = network.tls_context(server=True) if request.transport == TRANSPORT_TLS else None
    host = network.host_beside(request.address)
    places = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    family, _, _, _, place = places[0]
    with closing(socket.create_server(place[:2], family=family, backlog=1)) as port:
        port.setblocking(False)
        token = secrets.token_bytes(TOKEN_BYTES)
        yield Once(port, Listener(transport=request.transport, port=port.getsockname()[1], token=token), context)


class Once:
    """An open port, and what whoever comes there needs to know."""

    def __init__(self, port: socket.socket, listener: Listener, context: ssl.SSLContext | None) -> None:
        self.listener = listener
        self._port = port
        self._context = context

    async def answer(self) -> None:
        """Wait for one connection, close the port, and have the conversation if it is the right one."""
        try:
            async with asyncio.timeout(_ACCEPTED_S):
                await _wait_readable(self._port)
            connection, _ = self._port.accept()  # and to its thread at once: a cancelled task would leave it open
            self._port.close()
            await run_aside(partial(_answer, connection, self._context, self.listener.token))
        except OSError:  # nobody came, or who came left, stood still, or showed no certificate of ours
            return


async def _wait_readable(port: socket.socket) -> None:
    loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(port, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(port)


def _answer(connection: socket.socket, context: ssl.SSLContext | None, token: bytes) -> None:
    with connection:
        connection.settimeout(_TALK_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with context.wrap_socket(connection, server_side=True) if context else connection as secured:
            answer(Talk(secured, time.monotonic() + _TALK_S), token)


def _call(host: str, listener: Listener, context: ssl.SSLContext | None, node: str) -> Line:
    with socket.create_connection((host, listener.port), timeout=_TALK_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = node.lower()
        with context.wrap_socket(connection, server_hostname=name) if context else connection as secured:
            return ask(Talk(secured, time.monotonic() + _TALK_S), listener.token)


def _there_and_back(talk: Talk) -> float:
    began = time.monotonic()
    talk.send(_SMALL)
    talk.receive(len(_SMALL))
    return time.monotonic() - began
