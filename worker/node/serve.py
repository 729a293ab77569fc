"""A worker process: binds, serves, drains on SIGTERM. Holds no decisions of the protocol."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from logging import Logger

import grpc.aio
import mlx.core as mx
import uvloop
from grpc_health.v1 import health, health_pb2_grpc

from worker.config import ClusterConfig
from worker.errors import ConfigError
from worker.node.announce import about, announcing
from worker.node.configuration import configuration_of
from worker.node.hop import add_node
from worker.node.log import log_failure, worker_log
from worker.node.model_sources import ModelSources
from worker.node.network import MOST_CONNECTIONS, AddressMissing, Network
from worker.node.service import NodeService
from worker.platform.dated import dated
from worker.platform.installation import running_code
from worker.platform.interrupts import INTERRUPTED
from worker.platform.machine import allow_connections, kept_awake
from worker.platform.threads import MlxThread

_DRAIN_S = 10.0  # how long sessions in progress may take to end
_LAST_CALLS_S = 10.0  # for calls that were cut off to give back what they hold: a piece of a load may take long
_AGAIN_S = 5.0  # between two tries of an address that cannot be had
_LAST_WORD_S = 1.0  # for what the coordinator of the drained sessions still reads and asks


def serve(
    name: str,
    binds: Sequence[str],
    network: Network,
    *,
    cluster: ClusterConfig | None,
    sources: ModelSources,
    memory_bytes: int | None,
    announces: bool,
    keep_alive_s: float | None = None,
    follow_parent: bool,
) -> None:
    """Serve as one node until SIGTERM or SIGINT; `binds` are HOST:PORT, port 0 takes a free one.

    With `follow_parent` the process also ends when its standard input closes, and says where it listens as one line
    of JSON on standard output, and nothing else: how the coordinator keeps workers of its own.

    Args:
        cluster: the node's own configuration, of which coordinators are told.
        sources: the models that they may have it load.
        keep_alive_s: how long an unused shard is held; None: for ever.
        announces: whether it tells its network that it is there; one that follows its parent does not.
    Raises:
        ConfigError: the network allows none of them, or none can be had.
    """
    sys.stderr = dated(sys.stderr)
    allow_connections(MOST_CONNECTIONS)
    running_code()  # its code as it is now
    thread = MlxThread()
    configuration = configuration_of(cluster) if cluster else None
    log = worker_log(name, None if follow_parent else sys.stderr)
    service = NodeService(name, thread, network, sources, memory_bytes, configuration, log)
    try:
        with kept_awake():
            serving = _serve(
                service,
                binds,
                network,
                announces=announces and not follow_parent,
                keep_alive_s=keep_alive_s,
                follow_parent=follow_parent,
            )
            uvloop.run(serving)
    finally:
        thread.close()
        mx.clear_streams()


async def _serve(
    service: NodeService,
    binds: Sequence[str],
    network: Network,
    *,
    announces: bool,
    keep_alive_s: float | None,
    follow_parent: bool,
) -> None:
    stop = _stop_event(follow_parent=follow_parent)
    async with listening(service, binds, network, service.log) as found:
        if follow_parent:
            print(json.dumps({"name": service.name, "address": found.addresses[0]}), flush=True)
        for address in found.addresses:
            service.log.info("listens on %s", address)
        async with service.worker.keep_alive(keep_alive_s), contextlib.AsyncExitStack() as stack:
            if announces:
                say = partial(about, service.name, network)
                await stack.enter_async_context(announcing(say, found.addresses, service.log))
            await stop.wait()
        await found.say_ending()
        if not follow_parent:
            await drain(service)
    await wait_last_calls()


async def drain(service: NodeService) -> None:
    """Let sessions in progress end, for `_DRAIN_S` at most; their coordinator is told."""
    if service.num_slots:
        what = "draining: %d sessions in progress or kept, at most %.0f s"
        service.log.info(what, service.num_slots, _DRAIN_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await service.worker.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.worker.wait_detached(), _LAST_WORD_S)
            await service.worker.wait_idle()  # a session may have been on its way here when the coordinator was told
    num_slots = service.num_slots
    service.log.info(f"ends with {num_slots} sessions in progress" if num_slots else "drained")


def _stop_event(*, follow_parent: bool) -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT, or when the parent is gone. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if follow_parent:
        loop.add_reader(sys.stdin.fileno(), on_input)
    return stop


class Listening:
    """A node's servers, one per address; `listening` makes it."""

    def __init__(self, service: NodeService, network: Network) -> None:
        self.addresses: list[str] = []  # with the ports that they have got
        self._service = service
        self._network = network
        self._checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._servers: list[grpc.aio.Server] = []

    async def add(self, bind: str) -> None:
        """Listen on HOST:PORT, too.

        Raises:
            AddressMissing: it cannot be had now. ConfigError: it cannot be had at all.
        """
        server = self._network.server()
        async with contextlib.AsyncExitStack() as unless_it_serves:
            unless_it_serves.push_async_callback(server.stop, grace=None)
            add_node(self._service, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._checks, server)
            port = self._network.listen(server, bind)
            await server.start()
            self._servers.append(server)
            unless_it_serves.pop_all()
        self.addresses.append(f"{bind.rpartition(':')[0]}:{port}")

    async def add_later(self, bind: str, log: Logger) -> None:
        """Try until it can be had. Raises ConfigError once it turns out that it cannot."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            with contextlib.suppress(AddressMissing):
                await self.add(bind)
                return log.info("listens on %s", bind)

    async def say_ending(self) -> None:
        """Have health checks say that nothing more is taken."""
        await self._checks.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Cut all calls off."""
        await asyncio.gather(*(server.stop(grace=None) for server in self._servers))


async def wait_last_calls() -> None:
    """Let the tasks of calls that were cut off end by themselves: gRPC does not wait for them.

    The end of the loop would cancel them once more; gRPC takes that for a failure of the call and prints its trace.
    """
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=_LAST_CALLS_S)


@contextlib.asynccontextmanager
async def listening(
    service: NodeService, binds: Sequence[str], network: Network, log: Logger
) -> AsyncIterator[Listening]:
    """Serve on the addresses that can be had, and on the others as soon as they can; the log says which cannot.

    Raises:
        ConfigError: none can be had.
    """
    found = Listening(service, network)
    refused: dict[str, ConfigError] = {}
    later: list[asyncio.Task[None]] = []
    try:
        for bind in binds:
            try:
                await found.add(bind)
            except ConfigError as error:
                refused[bind] = error
        if not found.addresses:
            raise next(iter(refused.values()))
        for bind, why_not in refused.items():
            if isinstance(why_not, AddressMissing):
                log.warning("%s; it is tried again and again", why_not.message)
                later.append(asyncio.create_task(found.add_later(bind, log)))
                later[-1].add_done_callback(partial(log_failure, log))
            else:
                log.warning("%s", why_not.message)
        yield found
    finally:
        for task in later:
            task.cancel()
        await asyncio.gather(*later, return_exceptions=True)
        await found.stop()
