"""The end of a worker's server: calls that it cuts off give back what they hold, and leave no traceback."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from protos.brigade_pb2 import AttachRequest
from protos.brigade_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from worker.node.serve import wait_last_calls


class Slow(NodeServicer):
    """A node whose attachment closes only when it may."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.has_ended = False

    async def Attach(self, request: AttachRequest, context: grpc.aio.ServicerContext) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
            self.has_ended = True


def test_a_call_that_is_cut_off_ends_before_the_loop_and_without_a_trace(capfd: pytest.CaptureFixture[str]) -> None:
    async def serve() -> bool:
        server, node = grpc.aio.server(), Slow()
        add_NodeServicer_to_server(node, server)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        call: Any = NodeStub(channel).Attach(AttachRequest())
        await node.began.wait()
        await server.stop(None)
        await channel.close()
        node.may_end.set()  # in the very moment in which the server has stopped
        await wait_last_calls()
        assert call.done()
        return node.has_ended

    has_ended = asyncio.run(serve())
    assert "Traceback" not in capfd.readouterr().err
    assert has_ended
