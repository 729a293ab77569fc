"""The RPCs about a node's machine and its links. Models, shards and chains are none of their affair."""

import time
from collections.abc import AsyncIterator

from protos.brigade_pb2 import (
    TRANSPORT_GRPC,
    ExamineRequest,
    Facts,
    LinkReply,
    LinkRequest,
    ListenRequest,
    ProbePart,
    ProbeReply,
)
from worker.node.examine import examine
from worker.node.log import Log
from worker.node.network import Network
from worker.node.plain import listening_once
from worker.node.plain_grpc import probed_once
from worker.node.probe import answer_probe
from worker.node.servicer import Context, Servicer
from worker.node.way import measure_link


class Examinee(Servicer):
    """Tells what it is, and how fast bytes come to it and go from it."""

    def __init__(self, name: str, network: Network, log: Log, memory_bytes: int | None) -> None:
        """`memory_bytes` is what the node was told to offer."""
        super().__init__(name, network, log)
        self._memory_bytes = memory_bytes

    async def MeasureLink(self, request: LinkRequest, context: Context) -> LinkReply:
        async with self._reporting(context):
            self._network.require_coordinator(context)
            return await measure_link(self._network, request)

    async def Probe(self, parts: AsyncIterator[ProbePart], context: Context) -> AsyncIterator[ProbeReply]:
        async with self._reporting(context):
            async for reply in answer_probe(parts):
                yield reply

    async def Examine(self, request: ExamineRequest, context: Context) -> Facts:
        async with self._reporting(context):
            self._network.require_coordinator(context)
            if request.only_time:
                return Facts(node=self.name, time=time.time_ns())
            return await examine(self.name, self._network, self._memory_bytes)

    async def Listen(self, request: ListenRequest, context: Context) -> None:
        async with self._reporting(context):
            self._network.require_coordinator(context)
            once = probed_once if request.transport == TRANSPORT_GRPC else listening_once
            async with once(self._network, request) as port:
                await context.write(port.listener)
                await port.answer()
