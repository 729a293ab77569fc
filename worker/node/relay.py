"""Relay and Feed at both ends: the calls whose messages pass gRPC as bytes that are written and read by hand."""

import grpc
import grpc.aio

from protos.brigade_pb2 import DESCRIPTOR, Credit, Held
from protos.brigade_pb2_grpc import NodeServicer, add_NodeServicer_to_server

_SERVICE = DESCRIPTOR.services_by_name["Node"].full_name


def open_relay(
    channel: grpc.aio.Channel, epoch: int, stage: int, sender: str
) -> grpc.aio.StreamStreamCall[bytes, Credit]:
    """A hop from `stage` of this epoch, which is the node `sender`, to whoever the channel leads to."""
    call = channel.stream_stream(f"/{_SERVICE}/Relay", request_serializer=None, response_deserializer=Credit.FromString)
    metadata = (("epoch", str(epoch)), ("stage", str(stage)), ("node", sender))
    return call(metadata=metadata)  # type: ignore[call-arg]


def open_feed(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[bytes, Held]:
    """Feeding whoever the channel leads to, by messages that are serialised."""
    call = channel.stream_stream(f"/{_SERVICE}/Feed", request_serializer=None, response_deserializer=Held.FromString)
    return call()  # type: ignore[call-arg]


def add_node(service: NodeServicer, server: grpc.aio.Server) -> None:
    """Have the server answer for this node."""
    add_NodeServicer_to_server(service, server)
    relay = grpc.stream_stream_rpc_method_handler(service.Relay, response_serializer=Credit.SerializeToString)
    feed = grpc.stream_stream_rpc_method_handler(service.Feed, response_serializer=Held.SerializeToString)
    server.add_registered_method_handlers(_SERVICE, {"Relay": relay, "Feed": feed})  # type: ignore[attr-defined]
