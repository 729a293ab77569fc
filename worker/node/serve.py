"""A worker process: it binds, serves, and drains on SIGTERM."""

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
from grpc_health.v1.health_pb2 import HealthCheckRequest

from worker.config import ClusterConfig, split_address
from worker.errors import ConfigError
from worker.node.announce import about, announcing
from worker.node.hop import add_hops, add_node
from worker.node.log import dated, log_failure, worker_log
from worker.node.model_sources import ModelSources
from worker.node.network import MOST_CONNECTIONS, AddressMissing, Network, hop_address
from worker.node.service import HopService, NodeService
from worker.platform.installation import running_code
from worker.platform.interrupts import end_interrupted
from worker.platform.machine import allow_connections, kept_awake, older_twin
from worker.platform.tasks import cancel_all
from worker.platform.text import counted
from worker.platform.threads import MlxThread

_DRAIN_S = 10.0  # how long sessions in progress may take to end
_LAST_CALLS_S = 10.0  # for cancelled calls to release what they hold: one step of a load may take long
AGAIN_S = 5.0  # between two tries of an address that is not available
STOP_HOPS_S = 2.0
_FREE_PORT_TRIES = 20
LAST_WORD_S = 1.0  # for the last calls and reads of the coordinator whose sessions were drained


def serve(
    name: str,
    binds: Sequence[str],
    network: Network,
    *,
    cluster: ClusterConfig,
    given_name: str,
    sources: ModelSources,
    memory_bytes: int | None,
    announces: bool,
    keep_alive_s: float | None = None,
    follow_parent: bool,
) -> None:
    """Serve as one node until SIGTERM or SIGINT; `binds` are HOST:PORT, port 0 takes a free one.

    With `follow_parent` the process also ends when its standard input closes, and prints its address as one line of
    JSON on standard output and nothing else. The coordinator starts workers of its own this way.

    Args:
        cluster: the node's own configuration, which it reports to coordinators.
        given_name: its name, if that is no default; likewise.
        sources: the models that coordinators may load.
        keep_alive_s: how long an unused shard is kept; None: for ever.
        announces: announce the node on its network; ignored with `follow_parent`.
    Raises:
        ConfigError: the network allows none of the addresses, or none is available.
    """

    async def run() -> None:
        stop = _stop_event(follow_parent=follow_parent)
        async with listening(service, binds, network, log) as found:
            if follow_parent:
                print(json.dumps({"name": name, "address": found.addresses[0]}), flush=True)
            for address in found.addresses:
                log.info("listens on %s", address)
            async with service.worker.keep_alive(keep_alive_s), contextlib.AsyncExitStack() as stack:
                if announces and not follow_parent:
                    announcement = announcing(partial(about, name, network), found.addresses, log)
                    await stack.enter_async_context(announcement)
                await stop.wait()
            await found.say_ending()
            if not follow_parent:
                await drain(service)
        await wait_last_calls()

    sys.stderr = dated(sys.stderr)
    allow_connections(MOST_CONNECTIONS)
    running_code()  # records the code as it is now
    thread = MlxThread()
    log = worker_log(name, None if follow_parent else sys.stderr)
    service = NodeService(name, thread, network, sources, memory_bytes, cluster, given_name, log)
    try:
        with kept_awake():
            uvloop.run(run())
    except AddressMissing as error:
        # launchd may load an agent for each session of its user, and would start this one again every ten seconds
        if os.environ.get("XPC_SERVICE_NAME") == f"brigade.worker.{name}" and (twin := older_twin()):
            log.warning("%s; waits until process %d, which is this worker too, has ended", error.message, twin.pid)
            twin.wait()
        raise
    finally:
        thread.close()
        mx.clear_streams()


async def drain(service: NodeService) -> None:
    """Tell the coordinator and let sessions in progress end, for at most `_DRAIN_S`."""
    if service.num_slots:
        what = "draining: sessions in progress or kept: %d, at most %.0f s"
        service.log.info(what, service.num_slots, _DRAIN_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await service.worker.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.worker.wait_detached(), LAST_WORD_S)
            await service.worker.wait_idle()  # a session may have been in flight when the coordinator was told
    num_slots = service.num_slots
    service.log.info(f"ends with {counted(num_slots, 'session')} in progress" if num_slots else "drained")


def _stop_event(*, follow_parent: bool) -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT or the end of the parent sets. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            end_interrupted()
        stop.set()

    def on_input() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())  # it would be called again and again
            stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if follow_parent:
        loop.add_reader(sys.stdin.fileno(), on_input)
    return stop


class _Checks(health.aio.HealthServicer):  # type: ignore[name-defined]
    """gRPC's health service without Watch, which never ends: any client could use up the limit of calls."""

    async def Watch(self, request: HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "expected Check: this server has no Watch")


class Listening:
    """A node's servers, two per address: one on this loop, and that of its hops on the MLX thread's.

    Use `listening` to make it.
    """

    def __init__(self, service: NodeService, network: Network) -> None:
        self.addresses: list[str] = []  # with their real ports
        self._service = service
        self._network = network
        self._checks = _Checks()
        self._servers: list[grpc.aio.Server] = []
        self._hops: list[grpc.aio.Server] = []

    async def add(self, bind: str) -> None:
        """Also listen on HOST:PORT.

        Raises:
            AddressMissing: it is not available now. ConfigError: it is not allowed.
        """
        tries = _FREE_PORT_TRIES if split_address(bind)[1] == 0 else 1
        for tries_left in reversed(range(tries)):
            server = self._network.server()
            async with contextlib.AsyncExitStack() as unless_it_serves:
                unless_it_serves.push_async_callback(server.stop, grace=None)
                add_node(self._service, server)
                health_pb2_grpc.add_HealthServicer_to_server(self._checks, server)
                address = f"{bind.rpartition(':')[0]}:{self._network.listen(server, bind)}"
                await server.start()  # gRPC frees the port only of a server that was started
                try:
                    hops = await self._service.thread.call(self._serve_hops(hop_address(address)))
                except AddressMissing as error:
                    if tries_left:
                        continue  # the port that belongs to the one that was free is not
                    raise AddressMissing(f"{error.message} (frames to {address} go there)") from error
                self._servers.append(server)
                self._hops.append(hops)
                unless_it_serves.pop_all()
            self.addresses.append(address)
            return

    async def _serve_hops(self, address: str) -> grpc.aio.Server:
        """Return the server of hops. Runs on the MLX thread's loop. Raises as `add`."""
        server = self._network.server()
        add_hops(HopService(self._service), server)
        async with contextlib.AsyncExitStack() as unless_it_serves:
            unless_it_serves.push_async_callback(server.stop, grace=None)
            self._network.listen(server, address)
            await server.start()
            unless_it_serves.pop_all()
        return server

    async def add_later(self, bind: str, log: Logger) -> None:
        """Retry until the address is available. Raises ConfigError if it turns out not to be allowed."""
        while True:
            await asyncio.sleep(AGAIN_S)
            with contextlib.suppress(AddressMissing):
                await self.add(bind)
                return log.info("listens on %s", bind)

    async def say_ending(self) -> None:
        """Let health checks report that the node takes no more work."""
        await self._checks.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Cancel all calls; do not wait for an MLX thread that is stuck."""
        await asyncio.gather(*(server.stop(grace=None) for server in self._servers))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_HOPS_S):
                await self._service.thread.call(_stop(self._hops))


async def _stop(servers: Sequence[grpc.aio.Server]) -> None:
    await asyncio.gather(*(server.stop(grace=None) for server in servers))


async def wait_last_calls() -> None:
    """Wait for the tasks of cancelled calls, which gRPC does not do.

    The end of the loop would cancel them again; gRPC takes that for a failure of the call and prints a traceback.
    """
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=_LAST_CALLS_S)


@contextlib.asynccontextmanager
async def listening(
    service: NodeService, binds: Sequence[str], network: Network, log: Logger
) -> AsyncIterator[Listening]:
    """Serve on the available addresses, and on the others once they become available; the log names those.

    Raises:
        ConfigError: no address is available.
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
                log.warning("%s; trying again until it is available", why_not.message)
                later.append(asyncio.create_task(found.add_later(bind, log)))
                later[-1].add_done_callback(partial(log_failure, log))
            else:
                log.warning("%s", why_not.message)
        yield found
    finally:
        await cancel_all(*later)
        await found.stop()
