"""Listen: the port, TLS, and uvicorn on the event loop that there is."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from coordinator.http.protocol import BoundedProtocol
from worker.errors import ConfigError, InputError

_LEAVE_S = 2  # for connections, once all is answered
_BACKLOG = 512
_IDLE_S = 65  # of a connection between two requests: longer than clients and proxies keep theirs


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """The port, taken before anything is loaded. Raises ConfigError if it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            said = f"cannot listen on {host}:{port}: {error.strerror}; give another --port or --host"
            raise ConfigError(said) from error
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener


def load_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """What HTTPS is served with. Raises InputError if it cannot be read, or the key is another certificate's."""
    for field, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise InputError(field, f"{path} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")  # rather than be asked for one
    except (ssl.SSLError, OSError, ValueError) as error:
        said = f"{cert} and {key} are no certificate and its key, in PEM, without a passphrase"
        raise InputError("tls_cert", f"{said} ({getattr(error, 'reason', None) or error})") from error
    return context


@asynccontextmanager
async def answering(
    app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator["asyncio.Task[None]"]:
    """Let the application answer what comes in at the port, which is closed in the end.

    The block is cancelled, and left with the error, if nothing can be answered any more: the task, which is what
    answers, is done then.
    """
    config = uvicorn.Config(
        app, http=BoundedProtocol, ws="none", log_config=None, access_log=False, lifespan="off", server_header=False,
        timeout_keep_alive=_IDLE_S, timeout_graceful_shutdown=_LEAVE_S,
        ssl_context_factory=(lambda config, default: tls) if tls else None,
    )  # fmt: skip
    server = _Server(config)
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


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
