"""Listening: a node's servers, one per address. One that cannot be had now (an unplugged cable) may be had later."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from worker.errors import ConfigError
from worker.node.log import Log
from worker.node.network import AddressMissing, Network
from worker.node.relay import add_node
from worker.node.service import NodeService

_LAST_CALLS_S = 10.0  # for calls that were cut off to give back what they hold: a piece of a load may take long
_AGAIN_S = 5.0  # between two tries


class Listening:
    """Use `listening` to make one."""

    def __init__(self, service: NodeService, network: Network) -> None:
        self.addresses: list[str] = []  # with the ports that they have got
        self._service = service
        self._network = network
        self._checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._servers: list[grpc.aio.Server] = []

    async def add(self, bind: str) -> None:
        """Listen on HOST:PORT, too.

        Raises:
            AddressMissing: that cannot be now. ConfigError: that cannot be.
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

    async def add_later(self, bind: str, log: Log) -> None:
        """Try until it can be. Raises ConfigError once it turns out that it cannot."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            with contextlib.suppress(AddressMissing):
                await self.add(bind)
                return log.listens(bind)

    async def say_ending(self) -> None:
        """Have health checks say that nothing more is taken."""
        await self._checks.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Cut all calls off."""
        await asyncio.gather(*(server.stop(grace=None) for server in self._servers))


async def wait_last_calls() -> None:
    """Let the tasks of calls that were cut off end by themselves, for which gRPC does not wait.

    The end of the loop would cancel them once more; gRPC takes that for a failure of the call and prints its trace.
    """
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=_LAST_CALLS_S)


@contextlib.asynccontextmanager
async def listening(service: NodeService, binds: Sequence[str], network: Network, log: Log) -> AsyncIterator[Listening]:
    """Serve on those of the addresses that can be had, and on the others as soon as they can; it is said which cannot.

    Raises:
        ConfigError: there is none.
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
                log.listens_later(why_not.message)
                later.append(asyncio.create_task(found.add_later(bind, log)))
                later[-1].add_done_callback(log.say_failed)
            else:
                log.failed(why_not.message)
        yield found
    finally:
        for task in later:
            task.cancel()
        await asyncio.gather(*later, return_exceptions=True)
        await found.stop()
