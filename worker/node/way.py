"""Way: which way a connection to another node takes, and what is measured on it."""

import socket
from collections.abc import Sequence
from functools import partial

from protos.brigade_pb2 import TRANSPORT_GRPC, LinkReply, LinkRequest, Way
from worker.config import split_address
from worker.errors import BrigadeError, FrameError
from worker.node.network import Network
from worker.node.plain import TOKEN_BYTES, measure_line
from worker.node.plain_grpc import measure_plain_grpc
from worker.node.probe import probe
from worker.node.reach import reachable
from worker.process.call_thread import run_aside

NO_NAME = -1

_CONNECT_S = 3.0
_MOST_LISTENERS = 4


async def measure_link(network: Network, request: LinkRequest) -> LinkReply:
    """As `probe`, and for a request that wants the link examined all that can be found out about it.

    Raises:
        StageLost: the node does not answer, unless the link is to be examined: the reply says so then.
        FrameError: these are no listeners; their tokens are sent as they are.
    """
    if len(request.listeners) > _MOST_LISTENERS or any(len(each.token) != TOKEN_BYTES for each in request.listeners):
        raise FrameError(f"expected at most {_MOST_LISTENERS} listeners with tokens of {TOKEN_BYTES} bytes")
    if not request.examined:
        return await probe(network, request.node, request.addresses)
    address = await reachable(network, request.node, request.addresses)
    way = await way_to(address)
    if way.error:
        return LinkReply(way=way)
    try:
        reply = await probe(network, request.node, [address])
    except BrigadeError as error:
        way.error = error.message
        return LinkReply(way=way)
    reply.way.CopyFrom(way)
    for listener in request.listeners:
        if listener.transport == TRANSPORT_GRPC:
            line = await measure_plain_grpc(way.remote, listener)
        else:
            line = await measure_line(network, request.node, way.remote, listener)
        line.transport = listener.transport
        reply.lines.append(line)
    return reply


async def way_to(address: str) -> Way:
    """Connect to HOST:PORT and leave again."""
    return await run_aside(partial(_connect, address))


def _connect(address: str) -> Way:
    try:
        with socket.create_connection(split_address(address), timeout=_CONNECT_S) as connection:
            local, remote = connection.getsockname(), connection.getpeername()
            return Way(address=address, local=_ip(local), remote=_ip(remote))
    except socket.gaierror as error:
        return Way(address=address, errno=NO_NAME, error=f"no address is known for this name ({error.strerror})")
    except TimeoutError:
        return Way(address=address, error=f"nothing answers within {_CONNECT_S:.0f} s")
    except OSError as error:
        return Way(address=address, errno=error.errno or 0, error=error.strerror or str(error))


def _ip(name: Sequence[object]) -> str:
    return str(name[0]).partition("%")[0]
