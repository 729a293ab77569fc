"""The port, TLS, and the bounds of a connection: uvicorn on the event loop of the process."""

import asyncio
import errno
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from worker.errors import ConfigError, InputError
from worker.platform.files import reading
from worker.platform.interfaces import is_taken

MAX_HEAD_BYTES = 64 << 10  # of the URL and the headers of a request
MAX_CONNECTIONS = 1024
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)  # to h2c, say: httptools would skip the body
HEAD_S = 60.0  # until the head of a request is whole
UNREAD_S = 30.0  # within which a client has to read all that was sent, or at least
_MIN_READ_BYTES = 48 << 10
_CLOSE_S = 2  # for connections to close, once all requests are answered
_BACKLOG = 512
_MOST_PIPELINED = 16  # requests that are read while an earlier one of their connection is answered
IDLE_S = 65  # of a connection between two requests: longer than clients and proxies keep theirs


@contextmanager
def listening_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Hold a listening socket. Raises ConfigError if the port cannot be taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            if is_taken(host, port):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            listener.bind((host, port))
        except OSError as error:
            reason = f"cannot listen on {host}:{port}: {error.strerror}; give another --port or --host"
            raise ConfigError(reason) from error
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener


def load_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """Return the context of an HTTPS server. Raises InputError if a file is unreadable, or the key does not match."""
    for field, path in (("tls_cert", cert), ("tls_key", key)):
        with reading(field, path):
            path.read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # otherwise OpenSSL would ask at the terminal
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = f"{cert} and {key} are not a certificate and its key, in PEM, without a passphrase"
        raise InputError("tls_cert", f"{reason} ({getattr(error, 'reason', None) or error})") from error
    return context


@asynccontextmanager
async def answering(
    app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator["asyncio.Task[None]"]:
    """Run uvicorn within this context, and yield its task. Closes the port at the end.

    If uvicorn ends by itself, the block is cancelled and its error is raised; the task is done then.
    """
    config = uvicorn.Config(
        app, http=BoundedProtocol, ws="none", log_config=None, log_level="error", access_log=False, lifespan="off",
        server_header=False, timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=_CLOSE_S,
        ssl_context_factory=(lambda config, default: tls) if tls else None,
    )  # fmt: skip
    server = _Uvicorn(config)
    running, block = asyncio.create_task(server.serve(sockets=[listener])), asyncio.current_task()
    assert block is not None
    running.add_done_callback(lambda _: None if server.should_exit else block.cancel())
    try:
        yield running
    finally:
        if running.done():
            block.uncancel()
        server.should_exit = True
        await running


class _Uvicorn(uvicorn.Server):
    """Leaves signal handling to the owner of the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class BoundedProtocol(HttpToolsProtocol):
    """A connection with limits that uvicorn lacks: on connections, on a request's head, and on unread answers.

    A client that does not read is cut off: closing the connection would wait forever for its bytes to be sent.
    """

    _running: Any = None  # uvicorn's record of the request that is answered; `cycle` is that of the latest one
    _is_in_body = False
    _line = b""  # the last one of a head, not yet complete
    _num_gathered = 0  # bytes that the parser keeps: of an incomplete head, part of a body, or request
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None  # runs while bytes are unread

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # writing pauses while anything is unread
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, b"retry-after: 5\r\n")
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_read_timer()
        self.cycle = self._running  # it is told that its client has left; later ones have not begun
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_read()

    def resume_writing(self) -> None:
        self._stop_read_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if not self._is_answering:
            self._start_head_timer()
        if not self._is_in_body:
            data = self._without_upgrade(self._line + data)
        self._num_gathered += len(data)
        super().data_received(data)
        if self._num_gathered + len(self._line) > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _without_upgrade(self, data: bytes) -> bytes:
        """Return what has come of a head, without the offer of another protocol and what may become one."""
        head, end, body = data.partition(b"\r\n\r\n")
        begin = -1 if end else head.rfind(b"\r\n")
        if begin < 0:  # the head is complete, or has come to the end of its first line at most
            begin = len(head) - (not end and head.endswith(b"\r"))
        self._line = head[begin:]
        return _UPGRADE.sub(b"", head[:begin]) + end + body

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._num_gathered = 0
        self._stop_head_timer()
        super().on_headers_complete()
        if len(self.pipeline) < _MOST_PIPELINED:
            # The end of a connection that is not read goes unnoticed; uvicorn reads 64 KiB of a body ahead of its turn.
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_gathered = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        self._num_gathered = 0
        super().on_message_complete()
        if not self._is_answering:  # the answer came before the body: the next request is waited for
            self._stop_head_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _check_read(self, before: int | None = None) -> None:
        """Cut the client off if it has read too little of the `before` unread bytes; else check again later."""
        num_unread = self.transport.get_write_buffer_size()
        if before is not None and before - num_unread < _MIN_READ_BYTES:
            self.transport.abort()
        else:
            self._read_timer = self.loop.call_later(UNREAD_S, self._check_read, num_unread)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _refuse(self, status: HTTPStatus, headers: bytes = b"") -> None:
        """Close the connection with this status, or without one in the middle of an answer."""
        self._stop_head_timer()
        if self._is_answering:
            self.transport.abort()
            return
        head = f"HTTP/1.1 {status} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n".encode()
        self.transport.write(head + headers + b"\r\n")
        self.transport.close()
