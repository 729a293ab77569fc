"""A worker process: binds, serves, drains on SIGTERM. Holds no decisions of the protocol."""

import asyncio
import contextlib
import json
import os
import signal
import sys

import mlx.core as mx
import uvloop
from grpc_health.v1 import health, health_pb2_grpc

from worker.node.network import Network
from worker.node.relay import add_node
from worker.node.service import NodeService
from worker.process.mlx_thread import MlxThread
from worker.process.run import INTERRUPTED

_DRAIN_S = 10.0  # how long sessions in progress may take to end
_LAST_WORD_S = 1.0  # for what the coordinator of the drained sessions still reads and asks


def serve(
    name: str, bind: str, network: Network, *, model: str | None, memory_bytes: int | None, follow_parent: bool
) -> None:
    """Serve as one node until SIGTERM or SIGINT; `bind` is HOST:PORT, port 0 takes a free one.

    With `follow_parent` the process also ends when its standard input closes, and says where it listens as one line
    of JSON on standard output: how the coordinator keeps workers of its own.

    Raises:
        ConfigError: the network does not allow it, or the port is in use.
    """
    thread = MlxThread()
    service = NodeService(name, thread, network, model, memory_bytes)
    try:
        uvloop.run(_serve(service, bind, network, follow_parent=follow_parent))
    finally:
        thread.close()
        mx.clear_streams()


async def _serve(service: NodeService, bind: str, network: Network, *, follow_parent: bool) -> None:
    server = network.server()
    add_node(service, server)
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = network.listen(server, bind)
    stop = _stop_event(follow_parent=follow_parent)
    await server.start()
    address = f"{bind.rpartition(':')[0]}:{port}"
    if follow_parent:
        print(json.dumps({"name": service.name, "address": address}), flush=True)
    else:
        print(f"worker {service.name} listens on {address}", file=sys.stderr, flush=True)
    await stop.wait()
    await checks.enter_graceful_shutdown()
    if not follow_parent:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.drain(), _DRAIN_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.wait_detached(), _LAST_WORD_S)
    await server.stop(grace=None)


def _stop_event(*, follow_parent: bool) -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT, or when the parent is gone. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if follow_parent:
        loop.add_reader(sys.stdin.fileno(), lambda: stop.set() if not os.read(sys.stdin.fileno(), 1) else None)
    return stop
