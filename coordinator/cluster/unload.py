"""Has the workers of a configuration let go of what they hold, where nobody needs it now."""

import asyncio

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.peer import COORDINATOR_ID, Peer, peers_of
from coordinator.cluster.progress import say
from protos.brigade_pb2 import Coordinator
from worker.errors import BrigadeError
from worker.node.identity import Role
from worker.node.network import Network


async def unload_workers(options: ClusterOptions) -> None:
    """Ask all of them; one that does not is told of. Workers of our own have ended, and hold nothing."""
    if options.local is not None:
        return
    own = options.cluster.coordinator.name
    network = Network.of(options.cluster, own, Role.COORDINATOR)
    async with peers_of(options.cluster, network) as peers:
        await asyncio.gather(*(_unload(peer, Coordinator(id=COORDINATOR_ID, name=own)) for peer in peers))


async def _unload(peer: Peer, coordinator: Coordinator) -> None:
    try:
        await peer.hello()  # at whichever of its addresses it is
        await peer.unload(coordinator)
    except BrigadeError as error:
        say(f"{error}; what it holds stays there")
