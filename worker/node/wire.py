"""How nodes reach each other: gRPC options and channels."""

import grpc.aio

PROTOCOL_VERSION = 1
ACCEPTED = (("brigade-accepted", "1"),)  # initial metadata of a stream that was not refused

_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_BOTH_ENDS = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),  # without it a stopped peer goes unnoticed for a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # or a second server on the port would start silently
    ("grpc.max_concurrent_streams", 16),
]
CHANNEL_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_retries", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to HOST:PORT with this project's options."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
