"""Network: how nodes reach each other, encrypted or not. The one place where ports and channels are made.

Except the ports that links.py opens to measure, for one connection each.
"""

import shlex
import socket
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio

from worker.config import ClusterConfig, may_be_plaintext, split_address
from worker.errors import ConfigError, FrameError
from worker.node.framing import ENCRYPTED, PLAIN, Wire
from worker.node.identity import Identity, KeyFile, Role

PROTOCOL_VERSION = 5  # one more with each field that an older node would ignore, and do something else than is asked
UPDATE_BOTH = "install the same version of brigade on both, from the coordinator by: brigade launch --update"
ACCEPTED = (("brigade-accepted", "1"),)  # initial metadata of a stream that was not refused

MOST_CONNECTIONS = 1024  # to one server, from all callers together
_MOST_CALLS = 64  # at one time: a node of a chain serves two, and other callers ask it now and then
_WHERE = "as `address:` in cluster.yaml or as --bind"
_MAX_MESSAGE_BYTES = 16 * 2**20  # gRPC takes them whole; the longest, headers of a large model, have a few MiB
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
_SERVER_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # or a second server on the port would start silently
    ("grpc.max_concurrent_streams", 16),  # of a connection
    ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 10_000),  # of a connection that says nothing; gRPC would wait for two minutes
]
_CHANNEL_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),  # that one attempt may take: a stopped node takes it and says nothing
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
]


class AddressMissing(ConfigError):
    """An address cannot be had now: it is in use, or no address of this machine. It may be had later."""


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
        """`keys` has every link encrypted, those on this machine too; without it, `insecure` lets bytes leave it.

        Args:
            insecure: the user trusts the network.
            warn: takes a line about this node's certificate, for the user.
            file: where the user says all that.
            launched: the workers that `brigade launch` reaches from here.
        """
        self.file = file
        self._insecure = insecure
        self._keys = keys
        self._warn = warn
        self._launched = frozenset(launched)
        self._said = ""
        self._hosts: dict[str, None] = {}  # on which it listens, in their order

    @classmethod
    def of(
        cls, cluster: ClusterConfig, name: str, role: Role, warn: Callable[[str], None] = lambda line: None
    ) -> "Network":
        """As the configuration says, for the node of this name."""
        keys = KeyFile(Path(cluster.tls.keys), name, role) if cluster.tls else None
        launched = [worker.name for worker in cluster.workers if worker.ssh]
        return cls(insecure=cluster.insecure, keys=keys, warn=warn, file=cluster.file, launched=launched)

    @property
    def wire(self) -> Wire:
        """How frames are framed on this network's links."""
        return ENCRYPTED if self._keys else PLAIN

    def way_to_start(self, name: str) -> str:
        """Return where and how the user starts the worker of this name."""
        file = shlex.quote(self.file)
        if name in self._launched:
            return f"from here: brigade launch {name} --config {file}"
        return f"there: brigade worker --config {file} --name {name}"

    @property
    def own(self) -> Identity | None:
        """Return what this node's file says now, another object once it has changed; None without encryption.

        Raises:
            ConfigError: it will not do.
        """
        return self._keys.read() if self._keys else None

    @property
    def expires(self) -> int:
        """When this node's certificate expires, in seconds since 1970; 0 without one."""
        own = self.own
        return int(own.until.timestamp()) if own else 0

    def server(self) -> grpc.aio.Server:
        """A server that `listen` binds."""
        return grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=_MOST_CALLS)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Bind to HOST:PORT; returns the port, which is a free one for port 0.

        Raises:
            AddressMissing: it cannot be had now.
            ConfigError: it may not be plaintext, or this node's certificate will not do.
        """
        if not self._may_use(bind):
            raise ConfigError(
                f"will not listen on {bind}: what is sent there is not encrypted. Use a loopback address, --keys with "
                "its certificate or a --config with `tls:` in it (see brigade keys init), or one with `insecure: true` "
                "if you trust this network"
            )
        try:
            if self._keys is None:
                port = server.add_insecure_port(bind)
            else:
                port = server.add_secure_port(bind, self._server_credentials(self._keys))
        except RuntimeError as error:
            raise AddressMissing(f"cannot listen on {bind}: {_why_not(bind)}") from error
        self._hosts[split_address(bind)[0]] = None
        return port

    def host_beside(self, address: str) -> str:
        """The host on which this node listens at this address, else the first one; none of them is a new exposure.

        Raises:
            FrameError: it listens nowhere.
        """
        if not self._hosts:
            raise FrameError("listens nowhere, so nothing can be measured there")
        host = split_address(address)[0]
        return host if host in self._hosts else next(iter(self._hosts))

    def tls_context(self, *, server: bool) -> ssl.SSLContext:
        """Return the trust of the channels for a plain socket: TLS 1.3, both sides show a certificate.

        Raises:
            FrameError: links are not encrypted. ConfigError: this node's certificate will not do.
        """
        if self._keys is None:
            raise FrameError("expected certificates for an encrypted connection, found none")
        own = self._checked(self._keys)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._keys.path)
        context.load_verify_locations(cadata=own.authority.decode())
        return context

    def channel(self, name: str, address: str, *, alone: bool = False) -> grpc.aio.Channel:
        """A channel to the node `name` at HOST:PORT; encrypted, it opens to a node with that name only.

        Args:
            alone: by a connection of its own, behind whose bytes no other call of this process queues.
        Raises:
            ConfigError: it is no HOST:PORT, may not be plaintext, or this node's certificate will not do.
        """
        target = _target(address)
        options: list[tuple[str, Any]] = [*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", int(alone))]
        if self._keys is not None:
            own = self._checked(self._keys)
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
        """Raise ConfigError if the links are encrypted and the caller's certificate is no coordinator's."""
        if self._keys is not None and Role.COORDINATOR not in (caller := Caller.of(context)).roles:
            raise ConfigError(
                f"expected a certificate with the role {Role.COORDINATOR}, got {caller}; where the authority is: "
                "brigade keys issue NAME --coordinator"
            )

    def require_name(self, context: grpc.aio.ServicerContext, name: str) -> None:
        """Raise FrameError if the links are encrypted and the caller's certificate does not carry this name."""
        if self._keys is not None and name.lower() not in (caller := Caller.of(context)).names:
            raise FrameError(f"expected frames of {name}, got a hop with {caller}")

    def _may_use(self, address: str) -> bool:
        return self._keys is not None or may_be_plaintext(split_address(address)[0], insecure=self._insecure)

    def _checked(self, keys: KeyFile) -> Identity:
        """Return this node's own, checked in every way possible here: a peer would only close the connection."""
        own = keys.read()
        if warning := own.warning():
            self._say(warning)
        return own

    def _say(self, line: str) -> None:
        """Warn the user, once per line."""
        if line != self._said:
            self._said = line
            self._warn(line)

    def _server_credentials(self, keys: KeyFile) -> grpc.ServerCredentials:
        """Return credentials that read the file again at every connection, so as to show a renewed one."""
        served = self._checked(keys)  # at this port: another one of this node asks for itself

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Is called by gRPC, on a thread of its own. An unusable new file leaves the one before in use."""
            nonlocal served
            try:
                own = self._checked(keys)
            except ConfigError as error:
                self._say(str(error))
                return None
            if own is served:
                return None
            served = own
            return _configuration(own)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            renewed,  # type: ignore[arg-type] # it may return None, says grpc's own documentation
            require_client_authentication=True,
        )


def _why_not(bind: str) -> str:
    """Say why a server cannot be bound there, and what to do."""
    host, port = split_address(bind)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # the latter of a label that is too long
        return f"the name {host} does not resolve on this machine; give its IP address, {_WHERE}"
    return f"in use or not an address of this machine; give another one, {_WHERE}"


def _target(address: str) -> str:
    """Return HOST:PORT as gRPC takes it for nothing else: a peer may call its successor `unix:50070`."""
    split_address(address)
    return "dns:///" + quote(address, safe="[]:")


def _configuration(own: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], own.authority)


@dataclass(frozen=True)
class Caller:
    """Names and roles in a certificate of our authority, which the handshake has checked."""

    names: tuple[str, ...]
    roles: tuple[str, ...]

    @classmethod
    def of(cls, context: grpc.aio.ServicerContext) -> "Caller":
        """Return the caller. Raises ConfigError unless it is TLS 1.3: grpcio cannot refuse it earlier."""
        said = context.auth_context()
        [version] = said.get("ssl_tls_version", (b"none",))
        if version != b"TLSv1.3":
            raise ConfigError(f"expected a connection by TLSv1.3, got one by {version.decode()}")
        names, roles = ([text.decode() for text in said.get(key, ())] for key in ("peer_dns", "peer_uri"))
        return cls(tuple(names), tuple(roles))

    def __str__(self) -> str:
        return f"the certificate of {', '.join(self.names) or 'nobody by name'} ({', '.join(self.roles) or 'no role'})"
