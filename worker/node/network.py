"""Network: how nodes reach each other, and whether they may without encryption. The place where encryption will go."""

import grpc.aio

from worker.config import may_be_plaintext, split_address
from worker.errors import ConfigError

PROTOCOL_VERSION = 2
ACCEPTED = (("brigade-accepted", "1"),)  # initial metadata of a stream that was not refused

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
    ("grpc.max_concurrent_streams", 16),
]
_CHANNEL_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),  # that one attempt may take: a stopped node takes it and says nothing
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
]


class Network:
    """Servers and channels of one process."""

    def __init__(self, *, insecure: bool = False) -> None:
        """`insecure`: the user trusts the network, so that what is not encrypted may leave this machine."""
        self._insecure = insecure

    def server(self) -> grpc.aio.Server:
        """A server that `listen` binds."""
        return grpc.aio.server(options=_SERVER_OPTIONS)

    def listen(self, server: grpc.aio.Server, bind: str) -> int:
        """Bind to HOST:PORT; returns the port, which is a free one for port 0.

        Raises:
            ConfigError: it may not be plaintext, or is in use.
        """
        if not self._may_use(bind):
            raise ConfigError(
                f"will not listen on {bind}: links between nodes are not encrypted yet. "
                "Use a loopback address, or a --config with `insecure: true` in it if you trust this network"
            )
        try:
            return server.add_insecure_port(bind)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {bind}: in use or not an address of this machine; try --bind"
            ) from error

    def channel(self, name: str, address: str) -> grpc.aio.Channel:
        """A channel to the node `name` at HOST:PORT. Raises ConfigError if it may not be plaintext."""
        if not self._may_use(address):
            raise ConfigError(
                f"will not connect to {name} at {address}: links between nodes are not encrypted yet. "
                "Set `insecure: true` in cluster.yaml if you trust this network"
            )
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)

    def _may_use(self, address: str) -> bool:
        return may_be_plaintext(split_address(address)[0], insecure=self._insecure)
