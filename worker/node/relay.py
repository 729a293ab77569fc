"""Relay at both ends: the one call whose messages pass gRPC as the bytes that worker/node/parts.py writes and reads."""

import grpc
import grpc.aio

from protos.brigade_pb2 import DESCRIPTOR, Credit
from protos.brigade_pb2_grpc import NodeServicer, add_NodeServicer_to_server

_SERVICE = DESCRIPTOR.services_by_name["Node"].full_name


def open_relay(
    channel: grpc.aio.Channel, epoch: int, stage: int, sender: str
) -> grpc.aio.StreamStreamCall[bytes, Credit]:
    """A hop from `stage` of this epoch, which is the node `sender`, to whoever the channel leads to."""
    call = channel.stream_stream(f"/{_SERVICE}/Relay", request_serializer=None, response_deserializer=Credit.FromString)
    metadata = (("epoch", str(epoch)), ("stage", str(stage)), ("node", sender))
    return call(metadata=metadata)  # type: ignore[call-arg]


def add_node(service: NodeServicer, server: grpc.aio.Server) -> None:
    """Have the server answer for this node."""
    add_NodeServicer_to_server(service, server)
    relay = grpc.stream_stream_rpc_method_handler(service.Relay, response_serializer=Credit.SerializeToString)
    server.add_registered_method_handlers(_SERVICE, {"Relay": relay})  # type: ignore[attr-defined]
