"""The receiving process of tools/bench_feed.py: a worker, and what takes bare TCP and bare gRPC, each at its port.

It prints its ports as JSON, and after each line on its standard input the seconds of processor time that it has taken.
"""

import asyncio
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from protos.brigade_pb2 import Credit
from protos.brigade_pb2_grpc import HopServicer
from worker.node.certificates import KeyFile, Role
from worker.node.hop import add_hops
from worker.node.model_sources import ModelSources
from worker.node.network import Network, split_address
from worker.node.serve import listening
from worker.node.service import NodeService
from worker.node.weights_cache import WeightsCache
from worker.platform.threads import MlxThread

NAME = "mini"
_READ_BYTES = 1 << 20


class Sink(HopServicer):
    """Drops what it gets, and says at the end that it has."""

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        async for _ in parts:
            pass
        yield Credit(frames=1)


async def serve(keys: Path, store: Path) -> None:
    """Until its standard input ends."""
    thread, ports = MlxThread(), {"tcp": _drop_tcp()}
    async with AsyncExitStack() as stack:
        for link, network in networks(keys, NAME, Role.WORKER).items():
            node = NodeService(NAME, thread, network, ModelSources(cache=WeightsCache(store)))
            found = await stack.enter_async_context(listening(node, ["127.0.0.1:0"], network, logging.getLogger(NAME)))
            ports[f"{link} feed"] = split_address(found.addresses[0])[1]
            sink = network.server()
            add_hops(Sink(), sink)
            ports[f"{link} grpc"] = network.listen(sink, "127.0.0.1:0")
            await sink.start()
            stack.push_async_callback(sink.stop, grace=None)
        await _answer_lines(ports)


async def _answer_lines(ports: dict[str, int]) -> None:
    print(json.dumps(ports), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(time.process_time(), flush=True)


def networks(keys: Path, name: str, role: Role) -> dict[str, Network]:
    return {"plaintext": Network(), "TLS": Network(keys=KeyFile(keys, name, role))}


def _drop_tcp() -> int:
    """Take connections in a thread, one after another, and answer the end of each with a byte; the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        buffer = bytearray(_READ_BYTES)
        while True:
            connection, _ = listener.accept()
            with connection:
                while connection.recv_into(buffer):
                    pass
                connection.send(b".")

    threading.Thread(target=work, daemon=True).start()
    return int(listener.getsockname()[1])
