"""From a configuration to a server that answers until it is told to stop. HTTP and gRPC share one event loop."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.http.app import make_app
from coordinator.http.keys import Keys
from coordinator.http.served import Limits, Served
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import open_resident
from worker.config import is_loopback
from worker.errors import ConfigError, InputError, StageLost

_REOPEN_S = 5.0  # after no chain could be opened for as long as a recovery may take
_LEAVE_S = 2  # for connections, once all is answered
_BACKLOG = 512


@dataclass(frozen=True)
class Serving:
    """How the server listens, and whom it lets in."""

    host: str
    port: int
    keys: Keys | None
    insecure: bool = False
    names: Sequence[str] = ()
    max_waiting: int = 256
    queue_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    limits: Limits = field(default_factory=Limits)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # for requests that do not say; above the model's own

    @property
    def is_wide(self) -> bool:
        """Whether other machines can reach it."""
        return not is_loopback(self.host)


async def serve(options: ClusterOptions, serving: Serving) -> None:
    """Answer until cancelled, then end what is under way.

    Raises:
        ConfigError: the port is taken. ModelError, InputError: the model cannot be served.
        BrigadeError: the first chain could not be opened.
    """
    frontend = await Frontend.read(options.model, trust_remote_code=options.trust_remote_code)
    frontend.defaults |= serving.sampling
    names = serving.names or (frontend.checkpoint.name,)
    served = Served(frontend, names, int(time.time()), serving.limits)
    hosts = () if serving.is_wide else ("localhost", "127.0.0.1", "::1", serving.host)
    with _listening(serving) as listener:
        async with _http(make_app(served, keys=serving.keys, hosts=hosts), listener, serving):
            await _keep_serving(options, serving, served, _url(listener, serving))


async def _keep_serving(options: ClusterOptions, serving: Serving, served: Served, url: str) -> None:
    """Load the model, and anew whenever its cluster has failed for good. Returns once it was told to stop."""
    was_open = False
    while True:
        try:
            async with open_resident(
                served.frontend, options, options.context,
                max_waiting=serving.max_waiting, max_wait_s=serving.queue_timeout_s,
            ) as model:  # fmt: skip
                served.model, was_open = model, True
                say(f"serving {', '.join(served.names)} at {url}, up to {model.context} tokens")
                try:
                    await model.wait_failed()
                except asyncio.CancelledError:
                    say("stopping: what is under way may end; again to stop at once")
                    await model.drain(serving.shutdown_timeout_s)
                    return
        except StageLost as error:
            if not was_open:
                raise
            say(f"{error}; trying again in {_REOPEN_S:g} s")
            served.why_not = str(error)
        finally:
            served.model = None
        await asyncio.sleep(_REOPEN_S)


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def _http(app: ASGIApp, listener: socket.socket, serving: Serving) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", server_header=False,
        timeout_graceful_shutdown=_LEAVE_S,
        ssl_certfile=serving.tls_cert, ssl_keyfile=serving.tls_key,
    )  # fmt: skip
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(running, return_exceptions=True)


@contextmanager
def _listening(serving: Serving) -> Iterator[socket.socket]:
    """The port, taken before anything is loaded. Raises ConfigError if it cannot be."""
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((serving.host, serving.port))
        except OSError as error:
            place = f"{serving.host}:{serving.port}"
            raise ConfigError(f"cannot listen on {place}: {error.strerror}; give another --port or --host") from error
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener


def _url(listener: socket.socket, serving: Serving) -> str:
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    return f"{'https' if serving.tls_cert else 'http'}://{host}:{listener.getsockname()[1]}"


def require_guarded(serving: Serving) -> None:
    """Raises InputError for a server that anybody in the network could use."""
    if serving.is_wide and serving.keys is None and not serving.insecure:
        raise InputError(
            "host", f"{serving.host} can be reached by others: expected --api-key-file with it, or --insecure"
        )
    if (serving.tls_cert is None) != (serving.tls_key is None):
        raise InputError("tls_cert", "expected with --tls-key, both or neither")
    if serving.is_wide and serving.tls_cert is None:
        say("warning: prompts, answers and keys travel in clear; give --tls-cert and --tls-key to encrypt them")
