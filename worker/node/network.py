"""How nodes reach each other, encrypted or not: all ports and channels are made here.

The exception are the ports that links.py opens for one measurement each.
"""

import asyncio
import contextlib
import shlex
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio

from worker.config import MOST_ADDRESSES, ClusterConfig, hop_port, join_address, may_be_plaintext, split_address
from worker.errors import ConfigError, FrameError, StageLost
from worker.node.certificates import Identity, KeyFile, Role, expiry_warning
from worker.node.framing import ENCRYPTED, PLAIN, Wire
from worker.platform.interfaces import is_taken
from worker.platform.tasks import cancel_all

PROTOCOL_VERSION = 17  # raised with each field that an older node would wrongly ignore
UPDATE_BOTH = "install the same version of brigade on both, from the coordinator by: brigade launch --update"
ACCEPTED = (("brigade-accepted", "1"),)  # initial metadata of a stream that was not refused

MOST_CONNECTIONS = 1024  # to one server, from all callers together
MOST_CALLS = 64  # at one time; a node of a chain serves two, plus occasional ones
HEAD_START_S = 0.25  # a later address wins only if it is faster than an earlier one by this much
REACH_S = 3.0
REQUEST_S = 10.0  # for the request of a call; the largest have a few MB
_WHERE = "as `address:` in cluster.yaml or as --bind"
_MAX_MESSAGE_BYTES = 24 * 2**20  # a part of a hop has 15 MiB of rows, and may have grammars of 4 MiB in its header
_BOTH_ENDS = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),  # without it a stopped peer goes unnoticed for a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # or a second server on the port would start silently
    ("grpc.max_concurrent_streams", 16),  # of a connection
    ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 10_000),  # of a silent connection; gRPC's default is two minutes
]
_CHANNEL_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the limit of one attempt to a stopped process
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
]


Attempt = asyncio.Task[Any]


class _InTime(grpc.aio.ServerInterceptor):
    """Reads the request of a call that has one: gRPC would wait for it for ever, in one of the places for calls."""

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the call's handler, or one that reads its request within `REQUEST_S` first."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        answer = handler.unary_stream or handler.unary_unary

        async def read(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            try:
                async with asyncio.timeout(REQUEST_S):
                    request = await anext(requests)
            except (TimeoutError, StopAsyncIteration):
                found = f"expected a request within {REQUEST_S:g} s, got none"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, found)
            return await answer(request, context)

        made = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return made(read, handler.request_deserializer, handler.response_serializer)


def hop_address(address: str) -> str:
    """Return where a node whose address is HOST:PORT takes frames: the same host, another port."""
    host, port = split_address(address)
    return join_address(host, hop_port(port))


class AddressMissing(ConfigError):
    """An address is in use, or not one of this machine. It may become available later."""


class Network:
    """Servers and channels of one process."""

    def __init__(
        self,
        *,
        insecure: bool = False,
        keys: KeyFile | None = None,
        warn: Callable[[str], None] = lambda line: None,
        file: str = "cluster.yaml",
        launched: Collection[str] = (),
    ) -> None:
        """Make a network that is encrypted if there are `keys`, and else stays on this machine unless `insecure`.

        Args:
            insecure: the user trusts the network.
            keys: encrypt every link, also those on this machine.
            warn: gets lines about this node's certificate, for the user.
            file: the configuration, which messages name.
            launched: the workers that `brigade launch` can start from here.
        """
        self.file = file
        self._insecure = insecure
        self._keys = keys
        self._warn = warn
        self._launched = frozenset(launched)
        self._said = ""
        self._expires = 0
        self._hosts: dict[str, None] = {}  # on which it listens, in order

    @classmethod
    def of(
        cls, cluster: ClusterConfig, worker: str | None = None, warn: Callable[[str], None] = lambda line: None
    ) -> "Network":
        """Return the network that the configuration describes, for the worker of this name or else the coordinator."""
        name, role = (cluster.coordinator.name, Role.COORDINATOR) if worker is None else (worker, Role.WORKER)
        keys = KeyFile(Path(cluster.tls.keys), name, role) if cluster.tls else None
        launched = [worker.name for worker in cluster.workers if worker.ssh]
        return cls(insecure=cluster.insecure, keys=keys, warn=warn, file=cluster.file, launched=launched)

    @property
    def wire(self) -> Wire:
        """The format of frames on this network's links."""
        return ENCRYPTED if self._keys else PLAIN

    def start_hint(self, name: str) -> str:
        """Return the command that starts the worker of this name, and where to run it."""
        return self.launch_hint(name) or f"there: brigade worker --config {shlex.quote(self.file)} --name {name}"

    def launch_hint(self, name: str) -> str:
        """Return the command that also gives that worker this version, its part of the configuration and a certificate.

        Empty for a worker that is not launched from here.
        """
        return f"from here: brigade launch {name} --config {shlex.quote(self.file)}" if name in self._launched else ""

    @property
    def own(self) -> Identity | None:
        """The identity in this node's key file now, a new object once it has changed; None without encryption.

        Raises:
            ConfigError: the file is unusable.
        """
        return self._keys.read() if self._keys else None

    @property
    def expires(self) -> int:
        """When this node's certificate expires, in seconds since 1970; 0 without one.

        While its file cannot be used, as in the middle of a renewal, the last one counts, which connections use still.
        """
        with contextlib.suppress(ConfigError):
            self._expires = int(own.until.timestamp()) if (own := self.own) else 0
        return self._expires

    def server(self) -> grpc.aio.Server:
        """Return a server, which `listen` binds."""
        return grpc.aio.server(interceptors=(_InTime(),), options=SERVER_OPTIONS, maximum_concurrent_rpcs=MOST_CALLS)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Bind to HOST:PORT and return the port; port 0 takes a free one.

        Raises:
            AddressMissing: the address is not available now.
            ConfigError: it would need encryption, or this node's certificate is unusable.
        """
        if not self._may_use(bind):
            raise ConfigError(
                f"will not listen on {bind}: what is sent there is not encrypted. Use a loopback address, --keys with "
                "its certificate or a --config with `tls:` in it (see brigade keys init), or one with `insecure: true` "
                "if you trust this network"
            )
        if is_taken(*split_address(bind)):
            raise _missing(bind)
        try:
            if self._keys is None:
                port = server.add_insecure_port(bind)
            else:
                port = server.add_secure_port(bind, self._server_credentials(self._keys))
        except RuntimeError as error:
            raise _missing(bind) from error
        self._hosts[split_address(bind)[0]] = None
        return port

    def measuring_host(self, address: str) -> str:
        """Return this address's host if the node listens on it, else the first host: so nothing new is exposed.

        Raises:
            FrameError: the node listens nowhere.
        """
        if not self._hosts:
            raise FrameError("does not listen anywhere, so nothing can be measured there")
        host = split_address(address)[0]
        return host if host in self._hosts else next(iter(self._hosts))

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """Return the context that gives a plain socket the trust of the channels: mutual TLS 1.3.

        Raises:
            FrameError: links are not encrypted. ConfigError: this node's certificate is unusable.
        """
        if self._keys is None:
            raise FrameError("expected certificates for an encrypted connection, found none")
        own = self.checked(self._keys)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._keys.path)
        context.load_verify_locations(cadata=own.authority.decode())
        return context

    def channel(self, name: str, address: str, *, alone: bool = False) -> grpc.aio.Channel:
        """Return a channel to the node `name` at HOST:PORT; if encrypted, it opens only to a node of that name.

        Args:
            alone: use a separate connection, so that other calls do not queue behind its bytes.
        Raises:
            ConfigError: this is not HOST:PORT, it would need encryption, or this node's certificate is unusable.
        """
        target = grpc_target(address)
        options: list[tuple[str, Any]] = [*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", int(alone))]
        if self._keys is not None:
            own = self.checked(self._keys)
            credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
            options.append(("grpc.ssl_target_name_override", name.lower()))
            return grpc.aio.secure_channel(target, credentials, options=options)
        if not self._may_use(address):
            raise ConfigError(
                f"will not connect to {name} at {address}: what is sent there is not encrypted. "
                f"Set `tls:` in {self.file} (see brigade keys init), or `insecure: true` if you trust this network"
            )
        return grpc.aio.insecure_channel(target, options=options)

    def require_coordinator(self, context: grpc.aio.ServicerContext) -> None:
        """Raise ConfigError if links are encrypted and the caller's certificate is not a coordinator's."""
        if self._keys is None:
            return
        names, roles = _caller(context)
        if Role.COORDINATOR not in roles:
            raise ConfigError(
                f"expected a certificate with the role {Role.COORDINATOR}, got {_shown(names, roles)}; where the "
                "authority is: brigade keys issue NAME --coordinator"
            )

    def require_tls13(self, context: grpc.aio.ServicerContext) -> None:
        """Raise ConfigError if links are encrypted and the caller's connection is not TLS 1.3."""
        if self._keys is not None:
            _caller(context)

    def require_name(self, context: grpc.aio.ServicerContext, name: str) -> None:
        """Raise FrameError if links are encrypted and the caller's certificate does not carry this name."""
        if self._keys is None:
            return
        names, roles = _caller(context)
        if name.lower() not in names:
            raise FrameError(f"expected a hop from {name}, got one with {_shown(names, roles)}")

    def _may_use(self, address: str) -> bool:
        return self._keys is not None or may_be_plaintext(split_address(address)[0], insecure=self._insecure)

    def checked(self, keys: KeyFile) -> Identity:
        """Return this node's identity after all checks: a peer would just close the connection. Warn if it expires."""
        own = keys.read()
        if warning := expiry_warning(own.name, own.role, own.until):
            self._say(warning)
        return own

    def _say(self, line: str) -> None:
        """Warn the user, unless the last warning was the same."""
        if line != self._said:
            self._said = line
            self._warn(line)

    def _server_credentials(self, keys: KeyFile) -> grpc.ServerCredentials:
        """Return credentials that read the file at every connection, so that a renewed certificate is used."""
        served = self.checked(keys)  # per port

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Return a renewed certificate, or None. Called by gRPC on its own thread."""
            nonlocal served
            try:
                own = self.checked(keys)
            except ConfigError as error:
                self._say(str(error))
                return None
            if own is served:
                return None
            served = own
            return _configuration(own)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            renewed,  # type: ignore[arg-type] # it may return None, according to grpc's documentation
            require_client_authentication=True,
        )


def _missing(bind: str) -> AddressMissing:
    """Return the error for an address that a server cannot have, with what to do."""
    host, port = split_address(bind)
    why = "in use or not an address of this machine; give another one"
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        why = f"the name {host} does not resolve on this machine; give its IP address"
    return AddressMissing(f"cannot listen on {bind}: {why}, {_WHERE}")


def grpc_target(address: str) -> str:
    """Return HOST:PORT in a form that gRPC reads as nothing else: `unix:50070` is a valid host name of a peer."""
    split_address(address)
    return "dns:///" + quote(address, safe="[]:")


def _configuration(own: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], own.authority)


def _caller(context: grpc.aio.ServicerContext) -> tuple[list[str], list[str]]:
    """Return the names and roles in the caller's certificate, which the handshake has verified.

    Raises:
        ConfigError: the connection is not TLS 1.3, which grpcio cannot enforce earlier.
    """
    said = context.auth_context()
    [version] = said.get("ssl_tls_version", (b"none",))
    if version != b"TLSv1.3":
        raise ConfigError(f"expected a connection by TLSv1.3, got one by {version.decode()}")
    names, roles = ([text.decode() for text in said.get(key, ())] for key in ("peer_dns", "peer_uri"))
    return names, roles


def _shown(names: Sequence[str], roles: Sequence[str]) -> str:
    return f"the certificate of {', '.join(names) or 'no name'} ({', '.join(roles) or 'no role'})"


# Dialling a node with several addresses


async def dial(network: Network, node: str, addresses: Sequence[str]) -> str:
    """Return the node's best reachable address; the first one if none can be reached.

    All are tried at once. An earlier one wins if it is not much slower.

    Raises:
        FrameError: there is none, or there are too many.
    """
    if not 1 <= len(addresses) <= MOST_ADDRESSES:
        raise FrameError(f"expected 1 to {MOST_ADDRESSES} addresses of {node}, got {len(addresses)}")
    if len(addresses) == 1:
        return addresses[0]
    channels = [network.channel(node, address) for address in addresses]
    attempts = [asyncio.create_task(_connect(channel, node)) for channel in channels]
    try:
        await wait_head_start(attempts, REACH_S, lambda: is_settled(attempts))
        found = (address for address, attempt in zip(addresses, attempts, strict=True) if has_succeeded(attempt))
        return next(found, addresses[0])
    finally:
        await cancel_all(*attempts)
        await asyncio.gather(*(channel.close(grace=None) for channel in channels))


async def wait_head_start(
    attempts: Collection[Attempt], within_s: float, is_settled: Callable[[], bool] = lambda: False
) -> None:
    """Return once all attempts have ended, HEAD_START_S after the first success, or once `is_settled`.

    The attempts end by themselves `within_s`. Shortly before, a success waits for half of the remaining time.
    """
    loop, pending = asyncio.get_running_loop(), set(attempts)
    end, until = loop.time() + within_s, None
    while pending and not is_settled():
        left_s = None if until is None else max(0.0, until - loop.time())
        done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return
        if until is None and any(map(has_succeeded, done)):
            until = loop.time() + min(HEAD_START_S, (end - loop.time()) / 2)


def has_succeeded(attempt: Attempt) -> bool:
    return attempt.done() and not attempt.cancelled() and attempt.exception() is None


def is_settled(attempts: Sequence[Attempt]) -> bool:
    """Return whether the first attempt that has not failed has succeeded: no other one can be better."""
    best = next((attempt for attempt in attempts if not attempt.done() or has_succeeded(attempt)), None)
    return best is not None and best.done()


async def _connect(channel: grpc.aio.Channel, node: str) -> None:
    """Return once the node has answered the handshake. Raises StageLost at the first failure, or TimeoutError."""
    async with asyncio.timeout(REACH_S):
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise StageLost("cannot be reached", node=node)
            await channel.wait_for_state_change(state)
