"""Hops: frames between stages, as messages of a stream with credit-based flow control, and the way of results back.

`pack` is the way of hidden states into messages, `pack_segments` and `unpack_segments` that of cache segments into and
out of them. Calls whose messages are bytes, weights too, are opened and registered here. The streams live on the MLX
threads' event loops, at both ends; reports of prompts alone come to the main loops.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from math import prod

import grpc
import grpc.aio
import mlx.core as mx

from protos.brigade_pb2 import DESCRIPTOR, Credit, DType, Frame, Held, Report, ResultsRequest, Segment, Segments, Tensor
from protos.brigade_pb2_grpc import HopServicer, NodeServicer, add_HopServicer_to_server, add_NodeServicer_to_server
from worker.compute.ahead import Placeholder
from worker.errors import FrameError, StageLost
from worker.memory.slot_caches import CacheSegment
from worker.model.describe import DTYPES
from worker.node.framing import MOST_SIZES, PLAIN, Wire, checksum_seed, cut, read_report, write_part, write_report
from worker.node.network import Network, hop_address
from worker.node.rpc_errors import error_of
from worker.platform.tasks import wait_set

CONNECT_TIMEOUT_S = 5.0
MOST_TENSORS = 1 << 14  # of the segments of a message or file, each of which counts, too: a million take seconds
_MOST_SIZE = 2**31 - 1  # that an array of MLX can have
_MOST_CREDIT = 1024  # frames in one grant: each takes an iteration of a loop, and a peer may name any number
_IN_ORDER_S = 2.0  # for the coordinator to detach this node too, if it has detached the next one

# Takes a report and its data; what it returns is awaited before the next one is read.
Deliver = Callable[[Report, memoryview], Awaitable[None] | None]
_NODE, _HOP = (DESCRIPTOR.services_by_name[name].full_name for name in ("Node", "Hop"))
_ENUMS = {dtype: enum for enum, dtype in DTYPES.items()}
_SEGMENT_DTYPES = {**DTYPES, DType.DTYPE_UINT32: mx.uint32}
_SEGMENT_ENUMS = {dtype: enum for enum, dtype in _SEGMENT_DTYPES.items()}


def pack(header: Frame, array: mx.array | None, wire: Wire = PLAIN) -> list[bytes]:
    """Return the messages of a frame. Call on the MLX thread; the array is copied once.

    This closes the header's last timing: do not change the header afterwards.

    Args:
        array: hidden states [1, sum L, D]; None if the frame has none.
    Raises:
        FrameError: the array's dtype cannot be sent.
    """
    payload = memoryview(b"")
    if array is not None:
        if array.dtype not in _ENUMS:
            expected = "expected float32, float16 or bfloat16"
            raise FrameError(f"hidden states of dtype {array.dtype} cannot be sent; {expected}")
        header.hidden.dtype = _ENUMS[array.dtype]
        header.hidden.shape.extend(array.shape)
        payload = bytes_of(array)
    first, *others = cut(payload, wire.part_bytes)
    seed, first_seed = (checksum_seed(n, header.step) if wire.has_checksums else None for n in (1, 0))
    rest = [write_part(number, b"", data, seed) for number, data in enumerate(others, start=1)]
    header.timings[-1].sent = time.monotonic_ns()
    return [write_part(0, header.SerializeToString(), first, first_seed), *rest]


def can_pack(array: mx.array) -> bool:
    """Return whether segments may hold arrays of this dtype."""
    return array.dtype in _SEGMENT_ENUMS


def pack_segments(epoch: int, step: int, slot: int, held: Sequence[CacheSegment]) -> bytes:
    """Return the report of segments whose arrays are evaluated; they are copied once. Call on the MLX thread."""
    segments = Segments(epoch=epoch, step=step, slot=slot, segments=map(segment_header, held))
    return write_report(Report(segments=segments), [bytes_of(array) for each in held for array in each.arrays])


def segment_header(held: CacheSegment) -> Segment:
    """Return what a segment says beside its bytes."""
    return Segment(
        base=held.base,
        cache=held.number,
        part=held.part,
        tensors=[Tensor(dtype=_SEGMENT_ENUMS[array.dtype], shape=array.shape) for array in held.arrays],
        is_output=held.is_output,
        num_keys=len(held.keys),
        length=held.length,
    )


def unpack_segments(segments: Iterable[Segment], data: memoryview) -> list[CacheSegment]:
    """Return received segments, whose data are copied once. Call on the MLX thread.

    Raises:
        FrameError: sizes and bytes do not fit together, or there are too many.
    """
    found, at, count = [], 0, 0
    for segment in segments:
        arrays = []
        if (count := count + 1 + len(segment.tensors)) > MOST_TENSORS:
            raise FrameError(f"expected at most {MOST_TENSORS} segments and tensors, got more")
        for tensor in segment.tensors:
            dtype = _SEGMENT_DTYPES.get(tensor.dtype)
            has_shape = len(tensor.shape) <= MOST_SIZES and max(tensor.shape, default=0) <= _MOST_SIZE
            end = at + dtype.size * prod(tensor.shape) if dtype and has_shape else at
            if dtype is None or not has_shape or end > len(data):
                raise FrameError(f"expected tensors in the {len(data)} bytes of segments, got one that is not")
            placeholder = Placeholder(tensor.shape, dtype)
            placeholder.fill([data[at:end]])
            arrays.append(placeholder.array)
            at = end
        keys, values = tuple(arrays[: segment.num_keys]), tuple(arrays[segment.num_keys :])
        place = segment.cache, segment.part, segment.base
        found.append(CacheSegment(*place, keys, values, segment.length, segment.is_output))
    if at < len(data):
        raise FrameError(f"expected {at} bytes of segments, got {len(data)}")
    return found


def bytes_of(array: mx.array) -> memoryview:
    """Return the array's own memory, or that of a contiguous copy."""
    if not array.size:
        return memoryview(b"")
    view = memoryview(array)  # type: ignore[arg-type]
    if not view.c_contiguous:
        view = memoryview(mx.contiguous(array))  # type: ignore[arg-type]
    return view.cast("B")


class Link:
    """A stream of frames to one node, opened once per epoch. Make and use it on the MLX thread's loop."""

    def __init__(self, network: Network, node: str, address: str, epoch: int, stage: int, sender: str = "") -> None:
        """`address` is that of the node, `stage` the sender's place in the chain, `sender` its own name."""
        self.node = node
        self._address = hop_address(address)
        self._channel = network.channel(node, self._address)
        self.call = open_relay(self._channel, epoch, stage, sender)
        self._credit = asyncio.Semaphore(0)
        self._is_open = asyncio.Event()
        self._reading = asyncio.create_task(self._read_credit())  # until the hop ends

    async def wait_open(self) -> None:
        """Return once the next stage accepts frames. Raises StageLost, or the refusal of the next stage."""
        if not await wait_set(self._is_open, self._reading, CONNECT_TIMEOUT_S):
            if not self._reading.done():
                raise StageLost(f"did not take the hop within {CONNECT_TIMEOUT_S:.0f} s", node=self.node)
            await self.wait_lost()

    async def send(self, parts: Sequence[bytes]) -> None:
        """Write one frame; wait while the receiver is behind. Raises as `wait_lost` if the hop is broken."""
        await self._credit.acquire()
        try:
            for part in parts:
                await self.call.write(part)
        except (grpc.RpcError, asyncio.InvalidStateError):
            await self.wait_lost()

    async def wait_lost(self) -> None:
        """Wait until the hop breaks, and raise the reason."""
        await asyncio.shield(self._reading)

    async def close(self) -> None:
        self.call.cancel()
        self._reading.cancel()
        try:
            await asyncio.gather(self._reading, return_exceptions=True)
        finally:
            await self._channel.close(grace=None)

    async def _read_credit(self) -> None:
        try:
            async for credit in self.call:
                if credit.frames > _MOST_CREDIT:
                    raise FrameError(
                        f"expected credit for at most {_MOST_CREDIT} frames, got {credit.frames}", node=self.node
                    )
                self._is_open.set()
                for _ in range(credit.frames):
                    self._credit.release()
        except grpc.RpcError as error:
            raise error_of(error, self.node, hops=self._address) from error
        await asyncio.sleep(_IN_ORDER_S)  # no failure if this link is closed meanwhile
        raise StageLost("ended the hop", node=self.node)


def open_relay(
    channel: grpc.aio.Channel, epoch: int, stage: int, sender: str
) -> grpc.aio.StreamStreamCall[bytes, Credit]:
    """Open a hop from `stage`, which is the node `sender`, to the node at the channel's end. Its messages are bytes."""
    call = channel.stream_stream(f"/{_HOP}/Relay", request_serializer=None, response_deserializer=Credit.FromString)
    metadata = (("epoch", str(epoch)), ("stage", str(stage)), ("node", sender))
    return call(metadata=metadata)  # type: ignore[call-arg]


def open_push(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[bytes, Held]:
    """Open a push of weights to the node at the channel's end. Its messages are bytes: see framing.py."""
    call = channel.stream_stream(f"/{_NODE}/Feed", request_serializer=None, response_deserializer=Held.FromString)
    return call()  # type: ignore[call-arg]


async def results(
    network: Network, node: str, address: str, epoch: int, coordinator_id: str, deliver: Deliver, *, of_prompts: bool
) -> None:
    """Deliver the reports of the node at this address until it is lost. Raises the reason.

    Those `of_prompts` come to the main loop, others to the MLX thread's.
    """
    method = f"/{_NODE}/Prompts" if of_prompts else f"/{_HOP}/Results"
    address = address if of_prompts else hop_address(address)
    async with network.channel(node, address, alone=of_prompts) as channel:
        request = ResultsRequest(epoch=epoch, coordinator_id=coordinator_id)
        try:
            call = channel.unary_stream(method, ResultsRequest.SerializeToString, None)
            async for message in call(request):
                if (until_taken := deliver(*read_report(message, node))) is not None:
                    await until_taken
        except grpc.RpcError as error:
            raise error_of(error, node, hops="" if of_prompts else address) from error
    raise StageLost("left the chain", node=node)


def add_node(service: NodeServicer, server: grpc.aio.Server) -> None:
    """Add this node to a server. Feed gets and Prompts sends bytes, which framing.py reads and writes."""
    add_NodeServicer_to_server(service, server)
    feed = grpc.stream_stream_rpc_method_handler(service.Feed, response_serializer=Held.SerializeToString)
    sent = grpc.unary_stream_rpc_method_handler(service.Prompts, request_deserializer=ResultsRequest.FromString)
    server.add_registered_method_handlers(_NODE, {"Feed": feed, "Prompts": sent})  # type: ignore[attr-defined]


def add_hops(service: HopServicer, server: grpc.aio.Server) -> None:
    """Add this node's hops to a server. Relay gets and Results sends bytes, which framing.py reads and writes."""
    add_HopServicer_to_server(service, server)
    relay = grpc.stream_stream_rpc_method_handler(service.Relay, response_serializer=Credit.SerializeToString)
    sent = grpc.unary_stream_rpc_method_handler(service.Results, request_deserializer=ResultsRequest.FromString)
    server.add_registered_method_handlers(_HOP, {"Relay": relay, "Results": sent})  # type: ignore[attr-defined]
