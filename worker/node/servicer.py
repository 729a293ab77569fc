"""What all RPCs of a node have in common: a failure reaches the caller as a status that names the node."""

import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from protos.brigade_pb2_grpc import NodeServicer
from worker.errors import BrigadeError, InternalError, internal_error_text
from worker.node.log import Log
from worker.node.network import Network
from worker.node.status import abort

Context = grpc.aio.ServicerContext


class Servicer(NodeServicer):
    """A node that answers nothing yet."""

    def __init__(self, name: str, network: Network, log: Log) -> None:
        self.name = name
        self.log = log
        self._network = network

    @contextlib.asynccontextmanager
    async def _reporting(self, context: Context) -> AsyncIterator[None]:
        """Turn an exception into a status that names this node: one of the two places that may catch anything."""
        try:
            yield
        except BrigadeError as error:
            await abort(context, error.at(self.name))
        except Exception as error:
            text = internal_error_text(error)
            self.log.failed(text)
            await abort(context, InternalError(text, node=self.name))
