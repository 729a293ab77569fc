"""Measurements of links: the round trip of a few bytes to another node, and the bytes per second.

Plans use the speed of gRPC on a link (`measure_link`). Doctor also asks which interfaces the connection uses, and how
fast TCP, TLS and unencrypted gRPC are on the same path. For each of those the far node opens a port for one
conversation (`open_port`) and hands out a token; callers without the token get no answer.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from statistics import median

import grpc
import grpc.aio

from protos.brigade_pb2 import (
    TRANSPORT_GRPC,
    TRANSPORT_TLS,
    Line,
    LinkReply,
    LinkRequest,
    Listener,
    ListenRequest,
    ProbePart,
    ProbeReply,
    Way,
)
from protos.brigade_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from worker.config import join_address, split_address
from worker.errors import BrigadeError, FrameError, StageLost
from worker.node.framing import ENCRYPTED, Wire
from worker.node.network import Network, dial, grpc_target
from worker.node.rpc_errors import error_of
from worker.platform.threads import run_in_thread

NO_NAME = -1  # `Way.errno` of a host name without an address

_SMALL = bytes(64)
_LARGE_BYTES = 8 * 2**20
# of gRPC
_NUM_PARTS, _NUM_WARM_PARTS = 20, 4
_LARGE_PART_BYTES = 2**20
_MAX_PARTS = 96  # in one call
PROBE_S = 5.0
# of plain sockets
_NUM_ROUNDS, _NUM_WARM_ROUNDS = 40, 8
_PIECE_BYTES = 2**18
_TOKEN_BYTES = 32
_MAX_LISTENERS = 4
CONNECT_S = 3.0
ACCEPT_S = 15.0  # how long a port waits for its conversation
TALK_S = 5.0  # the longest conversation

_TOKEN_KEY = "brigade-token-bin"
_PLAIN_GRPC = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", 1),
    ("grpc.enable_http_proxy", 0),
]


async def measure_link(network: Network, request: LinkRequest) -> LinkReply:
    """Measure round trip and bytes per second to a node; if `examined` also its interfaces and listeners.

    Raises:
        StageLost: the node does not answer. If `examined` the reply's `way.error` says so instead.
        FrameError: the request has no address, or too many, or its listeners are malformed: only well-formed tokens are
            sent to the far node.
    """
    if len(request.listeners) > _MAX_LISTENERS or any(len(each.token) != _TOKEN_BYTES for each in request.listeners):
        raise FrameError(f"expected at most {_MAX_LISTENERS} listeners with tokens of {_TOKEN_BYTES} bytes")
    address = await dial(network, request.node, request.addresses)
    if not request.examined:
        return await _probe(network, request.node, address)
    way = await connect(address)
    if way.error:
        return LinkReply(way=way)
    host, way.remote = way.remote, _without_zone(way.remote)
    try:
        reply = await _probe(network, request.node, address)
    except BrigadeError as error:
        way.error = error.message
        return LinkReply(way=way)
    reply.way.CopyFrom(way)
    for listener in request.listeners:
        reply.lines.append(await measure_line(network, request.node, host, listener))
    return reply


async def connect(address: str) -> Way:
    """Connect to HOST:PORT and close again. `error` and `errno` give the reason of a failure.

    `remote` can be dialled from this machine: a link-local address has its zone (fe80::1%en0).
    """
    return await run_in_thread(partial(_connect, address))


def _connect(address: str) -> Way:
    try:
        with socket.create_connection(split_address(address), timeout=CONNECT_S) as connection:
            ends = connection.getsockname(), connection.getpeername()
        local, remote = (socket.getnameinfo(end, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0] for end in ends)
        return Way(address=address, local=_without_zone(local), remote=remote)
    except socket.gaierror as error:
        return Way(address=address, errno=NO_NAME, error=f"no address is known for this name ({error.strerror})")
    except TimeoutError:
        return Way(address=address, error=f"nothing answers within {CONNECT_S:.0f} s")
    except OSError as error:
        return Way(address=address, errno=error.errno or 0, error=error.strerror or str(error))


def _without_zone(host: str) -> str:
    return host.partition("%")[0]


async def _probe(network: Network, node: str, address: str) -> LinkReply:
    try:
        async with asyncio.timeout(PROBE_S):
            channel = network.channel(node, address)
            try:
                return await exchange(NodeStub(channel).Probe(), network.wire)
            finally:
                await channel.close(grace=None)
    except TimeoutError:
        raise StageLost(f"did not answer a probe within {PROBE_S:.0f} s", node=node) from None
    except grpc.RpcError as error:
        raise error_of(error, node) from error


async def exchange(call: grpc.aio.StreamStreamCall[ProbePart, ProbeReply], wire: Wire) -> LinkReply:
    """Measure with a call of Probe, with checksums in the parts where frames have them, since these cost time.

    Raises RpcError, or StageLost if the node ends it early.
    """
    small, large = ProbePart(data=_SMALL), ProbePart(data=bytes(_LARGE_PART_BYTES))
    tries_s = [await _send(call, [small]) for _ in range(_NUM_PARTS)]
    rtt_s = median(tries_s[_NUM_WARM_PARTS:])
    took_s = await _send(call, [large] * (_LARGE_BYTES // _LARGE_PART_BYTES), has_checksums=wire.has_checksums)
    await call.done_writing()
    return LinkReply(rtt_ms=1e3 * rtt_s, bytes_per_s=_LARGE_BYTES / max(took_s - rtt_s, 1e-6))


async def _send(
    call: grpc.aio.StreamStreamCall[ProbePart, ProbeReply], parts: Sequence[ProbePart], *, has_checksums: bool = False
) -> float:
    """Return the seconds until all parts are answered."""
    began = time.monotonic()
    with contextlib.suppress(asyncio.InvalidStateError):  # the call was refused: reading raises the reason
        for part in parts:
            if has_checksums:
                zlib.crc32(part.data)
            await call.write(part)
    for _ in parts:
        if await call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
            await call.code()
            raise StageLost("ended the probe early")
    return time.monotonic() - began


async def answer_probe(parts: AsyncIterator[ProbePart], *, has_checksums: bool = False) -> AsyncIterator[ProbeReply]:
    """Answer each part of a Probe. Raises FrameError for too many, too large or late ones.

    `has_checksums`: take the time of checking one, as for a part of a frame on such a link.
    """
    num_parts, until = 0, asyncio.get_running_loop().time() + PROBE_S
    while True:
        try:
            async with asyncio.timeout_at(until):
                part = await anext(parts, None)
        except TimeoutError:  # idle calls would use up those that this node serves at one time
            raise FrameError(f"expected a probe to end within {PROBE_S:.0f} s") from None
        if part is None:
            return
        num_parts += 1
        if num_parts > _MAX_PARTS or len(part.data) > _LARGE_PART_BYTES:
            raise FrameError(f"expected at most {_MAX_PARTS} parts of {_LARGE_PART_BYTES} bytes in a probe")
        if has_checksums:
            zlib.crc32(part.data)
        yield ProbeReply()


async def measure_line(network: Network, node: str, host: str, listener: Listener) -> Line:
    """Measure with a port that the node has opened on `host`. `error` gives the reason of a failure."""
    if listener.transport == TRANSPORT_GRPC:
        line = await _measure_plain_grpc(host, listener)
    else:
        context = network.tls_context(server=False) if listener.transport == TRANSPORT_TLS else None
        try:
            line = await run_in_thread(partial(_converse, host, listener, context, node))
        except OSError as error:
            line = Line(error=error.strerror or str(error))
    line.transport = listener.transport
    return line


def _shown_token(listener: Listener) -> bytes:
    """Return what a caller shows: no bytes of the coordinator's choice, which could mean something elsewhere."""
    return hashlib.blake2b(listener.token, digest_size=_TOKEN_BYTES).digest()


async def _measure_plain_grpc(host: str, listener: Listener) -> Line:
    target = grpc_target(join_address(host, listener.port))
    async with grpc.aio.insecure_channel(target, options=_PLAIN_GRPC) as channel:
        try:
            async with asyncio.timeout(PROBE_S):
                metadata = ((_TOKEN_KEY, _shown_token(listener)),)
                found = await exchange(NodeStub(channel).Probe(metadata=metadata), ENCRYPTED)
        except TimeoutError:
            return Line(error=f"took longer than {PROBE_S:.0f} s")
        except grpc.RpcError as error:
            return Line(error=error.details() or error.code().name)
        except BrigadeError as error:
            return Line(error=error.message)
    return Line(rtt_ms=found.rtt_ms, bytes_per_s=found.bytes_per_s)


@asynccontextmanager
async def open_port(network: Network, request: ListenRequest) -> AsyncIterator["_PlainGrpc | _PlainSocket"]:
    """Open a port for one conversation, on a host where this node listens anyway, until the context ends.

    Raises:
        FrameError: this node listens nowhere, has no certificate for an encrypted conversation, or its address is gone.
    """
    host = network.measuring_host(request.address)
    listener = Listener(transport=request.transport, token=secrets.token_bytes(_TOKEN_BYTES))
    if request.transport == TRANSPORT_GRPC:
        server = grpc.aio.server(options=_PLAIN_GRPC, maximum_concurrent_rpcs=2)
        servicer = _PlainGrpc(listener)
        add_NodeServicer_to_server(servicer, server)
        try:
            listener.port = server.add_insecure_port(join_address(host, 0))
        except RuntimeError as error:
            raise _not_opened(host, "gRPC cannot bind to it") from error
        await server.start()
        try:
            yield servicer
        finally:
            await server.stop(grace=None)
    else:
        context = network.tls_context(server=True) if request.transport == TRANSPORT_TLS else None
        try:
            places = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            family, _, _, _, place = places[0]
            takes_ipv4 = place[0] == "::" and socket.has_dualstack_ipv6()  # as gRPC's ports do
            opened = socket.create_server(place, family=family, backlog=1, dualstack_ipv6=takes_ipv4)
        except OSError as error:
            raise _not_opened(host, error.strerror or str(error)) from error
        with closing(opened) as port:
            port.setblocking(False)
            listener.port = port.getsockname()[1]
            yield _PlainSocket(listener, port, context)


def _not_opened(host: str, reason: str) -> FrameError:
    return FrameError(
        f"expected to open a port on {host} for a measurement, found: {reason}; check that this machine still has that "
        "address, or give another one, as `address:` in cluster.yaml or as --bind"
    )


class _PlainGrpc(NodeServicer):
    """A port that answers one call of Probe with the token, unencrypted. It transfers only zeros."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._is_taken = False
        self._is_over = asyncio.Event()

    async def answer(self) -> None:
        """Return after the conversation, or if no caller with the token comes in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), ACCEPT_S)

    async def Probe(
        self, parts: AsyncIterator[ProbePart], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ProbeReply]:
        given = dict(context.invocation_metadata() or ()).get(_TOKEN_KEY, b"")
        is_known = isinstance(given, bytes) and hmac.compare_digest(given, _shown_token(self.listener))
        if self._is_taken or not is_known:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "expected the token of this port, once")
        self._is_taken = True
        try:
            async for reply in answer_probe(parts):
                yield reply
        except BrigadeError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, error.message)
        finally:
            self._is_over.set()


class _PlainSocket:
    """A port that accepts one connection. Both ends use threads, so that no event loop is measured."""

    def __init__(self, listener: Listener, port: socket.socket, context: ssl.SSLContext | None) -> None:
        self.listener = listener
        self._port = port
        self._context = context

    async def answer(self) -> None:
        """Hold the conversation and return; return without if no caller comes in time."""
        loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._port, is_ready.set)
        try:
            async with asyncio.timeout(ACCEPT_S):
                await is_ready.wait()
            connection, _ = self._port.accept()  # no await before its thread has it, or a cancellation leaks it
        except OSError:  # no caller in time, or it left again
            return
        finally:
            loop.remove_reader(self._port)
        self._port.close()
        with contextlib.suppress(OSError):  # the caller left, stalled, or showed no certificate of this cluster
            await run_in_thread(partial(_answer, connection, self._context, _shown_token(self.listener)))


# A conversation: the token, small messages that are echoed one by one, then many bytes that one byte acknowledges.


def _converse(host: str, listener: Listener, context: ssl.SSLContext | None, node: str) -> Line:
    connection = socket.create_connection((host, listener.port), timeout=TALK_S)
    with _talking(connection, context, node.lower()) as talk:
        talk.send(_shown_token(listener))
        tries_s = []
        for _ in range(_NUM_ROUNDS):
            began = time.monotonic()
            talk.send(_SMALL)
            talk.receive(len(_SMALL))
            tries_s.append(time.monotonic() - began)
        rtt_s = median(tries_s[_NUM_WARM_ROUNDS:])
        began, piece = time.monotonic(), bytes(_PIECE_BYTES)
        for _ in range(_LARGE_BYTES // _PIECE_BYTES):
            talk.send(piece)
        talk.receive(1)
        took_s = time.monotonic() - began
    return Line(rtt_ms=1e3 * rtt_s, bytes_per_s=_LARGE_BYTES / max(took_s - rtt_s, 1e-6))


def _answer(connection: socket.socket, context: ssl.SSLContext | None, token: bytes) -> None:
    with _talking(connection, context) as talk:
        if not hmac.compare_digest(talk.receive(_TOKEN_BYTES), token):
            return
        for _ in range(_NUM_ROUNDS):
            talk.send(talk.receive(len(_SMALL)))
        for _ in range(_LARGE_BYTES // _PIECE_BYTES):
            talk.receive(_PIECE_BYTES)
        talk.send(b"!")


@contextmanager
def _talking(connection: socket.socket, context: ssl.SSLContext | None, name: str | None = None) -> Iterator["_Talk"]:
    """Talk over a connection and close it; encrypted if there is a `context`, as client if there is a server `name`."""
    with connection:
        connection.settimeout(TALK_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            yield _Talk(connection)
        else:
            with context.wrap_socket(connection, server_side=name is None, server_hostname=name) as secured:
                yield _Talk(secured)


class _Talk:
    """Whole messages over a connection. Raises TimeoutError once the conversation takes too long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + TALK_S

    def send(self, data: bytes) -> None:
        self._limit()
        self._connection.sendall(data)

    def receive(self, count: int) -> bytes:
        """Receive `count` bytes. Raises ConnectionResetError if the connection ends before that."""
        found = bytearray()
        while len(found) < count:
            self._limit()
            piece = self._connection.recv(min(count - len(found), _PIECE_BYTES))
            if not piece:
                raise ConnectionResetError("the connection was closed")
            found += piece
        return bytes(found)

    def _limit(self) -> None:
        if (left_s := self._until - time.monotonic()) <= 0:
            raise TimeoutError(f"took longer than {TALK_S:.0f} s")
        self._connection.settimeout(left_s)
