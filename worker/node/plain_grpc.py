"""Probe over a connection that is not encrypted, to know what encryption costs. It carries nothing but zeros."""

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from protos.brigade_pb2 import Line, Listener, ListenRequest, ProbePart, ProbeReply
from protos.brigade_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from worker.config import join_address
from worker.errors import BrigadeError
from worker.node.network import Network
from worker.node.plain import TOKEN_BYTES
from worker.node.probe import answer_probe, exchange

_TOKEN = "brigade-token-bin"
_WITHIN_S = 15.0  # for the whole of it
_ASKED_S = 5.0
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", 1),
    ("grpc.enable_http_proxy", 0),
]


class OneProbe(NodeServicer):
    """Answers one call of Probe, by whoever knows the token, and nothing else."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._is_over = asyncio.Event()
        self._is_taken = False

    async def answer(self) -> None:
        """Return once it was asked, or nobody has come for long enough."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), _WITHIN_S)

    async def Probe(
        self, parts: AsyncIterator[ProbePart], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ProbeReply]:
        given = dict(context.invocation_metadata() or ()).get(_TOKEN, b"")
        is_known = isinstance(given, bytes) and hmac.compare_digest(given, self.listener.token)
        if self._is_taken or not is_known:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "expected the token of this port, once")
        self._is_taken = True
        try:
            async for reply in answer_probe(parts):
                yield reply
        except BrigadeError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, error.message)
        finally:
            self._is_over.set()


@asynccontextmanager
async def probed_once(network: Network, request: ListenRequest) -> AsyncIterator[OneProbe]:
    """A port for one such call, where this node listens anyway; closed with the context.

    Raises:
        FrameError: this node listens nowhere.
    """
    host = network.host_beside(request.address)
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=2)
    probe = OneProbe(Listener(transport=request.transport, token=secrets.token_bytes(TOKEN_BYTES)))
    add_NodeServicer_to_server(probe, server)
    probe.listener.port = server.add_insecure_port(join_address(host, 0))
    await server.start()
    try:
        yield probe
    finally:
        await server.stop(grace=None)


async def measure_plain_grpc(host: str, listener: Listener) -> Line:
    """What one call of Probe there shows, or why there was none."""
    async with grpc.aio.insecure_channel(join_address(host, listener.port), options=_OPTIONS) as channel:
        try:
            async with asyncio.timeout(_ASKED_S):
                found = await exchange(NodeStub(channel).Probe(metadata=((_TOKEN, listener.token),)))
        except TimeoutError:
            return Line(error=f"took longer than {_ASKED_S:.0f} s")
        except grpc.RpcError as error:
            return Line(error=error.details() or error.code().name)
        except BrigadeError as error:
            return Line(error=error.message)
    return Line(rtt_ms=found.rtt_ms, bytes_per_s=found.bytes_per_s)
