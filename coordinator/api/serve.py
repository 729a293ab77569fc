"""`brigade serve`: its options, and the life of its engine. HTTP and gRPC share one event loop."""

import asyncio
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.api.app import make_app
from coordinator.api.auth import Key, is_address
from coordinator.api.listen import answering, listening_socket
from coordinator.api.server import RequestLimits, Server
from coordinator.api.sse import unless
from coordinator.cluster.open import unload_workers
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.engine.engine import Engine, ServerState, open_engine
from coordinator.engine.inputs import InputProcessor
from coordinator.engine.one_at_a_time import OneAtATime
from coordinator.engine.stats import Stats
from coordinator.engine.status import StatusLog, log_request
from coordinator.sessions.request import PoolingKind
from worker.config import is_loopback
from worker.errors import InputError, error_text
from worker.platform.machine import thaw_heap
from worker.platform.mlx_memory import give_back
from worker.platform.tasks import background

_HOST_NAME = r"[\w.-]+"  # without a scheme and a port
_ORIGIN = r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+"  # lower case, without a path or a final slash


@dataclass(frozen=True)
class ServeOptions:
    """How a server listens, which clients it accepts, and how long anything may take."""

    host: str
    port: int
    keys: Sequence[Key] | None = None
    insecure: bool = False
    allowed_hosts: Sequence[str] = ()  # names by which clients may call it, beyond those of this machine
    cors_origins: Sequence[str] = ()  # of web pages that may use it
    names: Sequence[str] = ()  # of the model
    pooling: PoolingKind | None = None  # of embeddings; None: as the model's files say
    max_waiting: int = 256
    shutdown_timeout_s: float = 30.0
    reopen_s: float = 5.0  # between two attempts to open a chain, each as long as a recovery may take
    keep_alive_s: float | None = None  # an idle model is unloaded after this time; None: never
    tls: ssl.SSLContext | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of requests, in the place of the model's own

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        return not is_loopback(self.host)

    @property
    def hosts(self) -> Sequence[str]:
        """Host names that requests may give beside addresses; none: any name.

        A web page can give its own name this server's address (DNS rebinding), but it has no key.
        """
        if self.is_public and self.keys is not None and not self.allowed_hosts:
            return ()
        own = socket.gethostname().lower().partition(".")[0]
        known = ("localhost", socket.gethostname(), own, f"{own}.local", self.host, *self.allowed_hosts)
        return tuple(name.lower().removesuffix(".") for name in known)

    def url(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{port}"

    def check(self) -> None:
        """Raise InputError for names, hosts and origins no request can have, and for a public server without keys."""
        if "" in [name.strip() for name in self.names]:
            raise InputError("served_model_name", "expected a name, found none")
        for host in self.allowed_hosts:
            if not (re.fullmatch(_HOST_NAME, host) or is_address(host.strip("[]"))):
                raise InputError("allowed_host", f"expected a host name such as llm.example.org, got {host!r}")
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not re.fullmatch(_ORIGIN, origin):
                expected = "expected an origin as browsers write it, such as https://example.org:8080"
                raise InputError("cors_origin", f"{expected}, got {origin!r}")
        if self.is_public and self.keys is None and not self.insecure:
            expected = "expected --api-key-file with it (or BRIGADE_API_KEY), or --insecure"
            raise InputError("host", f"{self.host} can be reached by others: {expected}")
        if self.is_public and self.tls is None:
            what = "prompts, answers and keys" if self.keys else "prompts and answers"
            say(f"warning: {what} travel in clear; give --tls-cert and --tls-key to encrypt them")


async def serve(options: ClusterOptions, serving: ServeOptions) -> None:
    """Answer requests until cancelled, then let the answers in progress end.

    Raises:
        ConfigError: the port is taken. ModelError, InputError: the model cannot be served.
        BrigadeError: the first chain could not be opened.
    """
    stats = Stats(log_request)
    inputs = await InputProcessor.read(
        options,
        sampling=serving.sampling,
        max_tokens=serving.limits.max_tokens,
        encoding=OneAtATime(max_wait_s=serving.limits.queue_timeout_s, on_refused=stats.refuse),
    )
    folder = inputs.checkpoint.name  # clients see only its last part
    names = serving.names or (Path(folder).name if Path(folder).is_absolute() else folder,)
    server = Server(
        inputs,
        names,
        serving.limits,
        answers_any_name=not serving.names,
        stats=stats,
        max_waking=serving.max_waiting,
        pooling=serving.pooling,
    )
    app = make_app(server, keys=serving.keys, hosts=serving.hosts, origins=serving.cors_origins)
    with listening_socket(serving.host, serving.port) as listener:
        url = serving.url(listener.getsockname()[1])
        logging = StatusLog(stats, server.status, lambda: server.engine)
        async with background(logging.run()), answering(app, listener, serving.tls) as answers:
            try:
                await keep_open(server, options, serving, url, answers)
            finally:  # refuses requests that wait for the model before connections are closed
                server.stop()


async def keep_open(
    server: Server, options: ClusterOptions, serving: ServeOptions, url: str, answers: "asyncio.Task[None]"
) -> None:
    """Open an engine, and the next one when its cluster has failed for good or a request comes while it is asleep.

    Returns after a cancellation, once the answers in progress have ended.

    Args:
        answers: the task that answers clients; a cancellation that follows from its end is passed on at once.
    Raises:
        BrigadeError: the first chain could not be opened.
    """
    server_task = asyncio.current_task()
    assert server_task is not None
    while True:
        failure = ""
        try:
            if await open_once(server, options, serving, url, answers):
                return
            await unload_workers(options)
        except Exception as error:  # bugs too: open a new engine
            if server.state is ServerState.LOADING or server_task.cancelling():
                raise
            failure = error_text(error)
            say(f"{failure}; trying again in {serving.reopen_s:g} s")
            server.fail(failure)
        await asyncio.sleep(0)  # let pending callbacks drop their references to ended tasks
        thaw_heap()
        give_back()
        if failure:
            await asyncio.sleep(serving.reopen_s)
        else:
            await server.wait_wanted()
            say(server.why)


async def open_once(
    server: Server, options: ClusterOptions, serving: ServeOptions, url: str, answers: "asyncio.Task[None]"
) -> bool:
    """Answer by one engine until it is asleep; return whether the server was told to stop. Raises its failure."""
    async with open_engine(
        server.inputs,
        # as many tokens as fit in memory, unless a number is given
        options if options.given_context else replace(options, max_context=server.inputs.spec.context),
        max_waiting=serving.max_waiting,
        max_wait_s=serving.limits.queue_timeout_s,
        stats=server.stats,
    ) as engine:
        await engine.expect_grammars()
        server.open(engine)
        say(f"serving {', '.join(server.names)} at {url}, up to {engine.context} tokens per request")
        try:
            await _sleep_when_unused(server, engine, serving.keep_alive_s)
            return False
        except Exception as error:
            server.fail(error_text(error))  # before the cluster is closed, which takes a while
            raise
        except asyncio.CancelledError:
            if answers.done():
                raise
            say("stopping: answers in progress may end; interrupt again to stop at once")
            try:
                if not await engine.drain(serving.shutdown_timeout_s):
                    say(f"some answers have not ended within {serving.shutdown_timeout_s:g} s, and are cut off")
            except asyncio.CancelledError:
                say("interrupted again: answers in progress are cut off")
            server.stop()  # before the cluster is closed, which takes a while
            return True


async def _sleep_when_unused(server: Server, engine: Engine, keep_alive_s: float | None) -> None:
    """Return once the engine was unused for this time and the server is asleep; None: never. Raises its failure."""
    while True:
        await unless(engine.wait_failed(), engine.use.wait_unused(keep_alive_s))
        async with server.probing:
            if not engine.use.is_used:  # a request may have come during a probe
                server.sleep(f"no request came for {keep_alive_s:g} s; the next one has the model loaded again")
                say(f"asleep: {server.why}")
                return
