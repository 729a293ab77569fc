"""What the workers of a configuration say where no server runs: asked by Hello and Status; nothing is loaded."""

import asyncio
from pathlib import Path
from typing import Any

from coordinator.cluster.options import cluster_options
from coordinator.cluster.peer import Peer, peers_of
from coordinator.cluster.progress import say
from worker.errors import BrigadeError
from worker.node.identity import Role
from worker.node.network import Network

_WITHIN_S = 1.0


async def ask_workers(config: Path) -> dict[str, Any]:
    """What each holds, in the words of `/cluster` as far as they go; a reason for each that does not answer."""
    cluster = cluster_options(config, None, None, None, None).cluster
    network = Network.of(cluster, cluster.coordinator.name, Role.COORDINATOR, lambda line: say(f"warning: {line}"))
    async with peers_of(cluster, network) as peers:
        nodes = await asyncio.gather(*map(_ask, peers))
    return {"standing": {"state": "no server", "why": f"the workers of {config.name}"}, "nodes": list(nodes)}


async def _ask(peer: Peer) -> dict[str, Any]:
    place = {"name": peer.name, "address": peer.address}
    try:
        hello, status = await peer.hello(_WITHIN_S), await peer.status(_WITHIN_S)
    except BrigadeError as error:
        return place | {"state": "lost", "why": error.message}
    return place | {
        "state": "active" if status.slots else "idle",
        "memory_bytes": hello.memory_bytes,
        "weight_bytes": status.weight_bytes,
        "cache_held_bytes": status.cache_bytes,
        "peak_memory_bytes": status.peak_memory_bytes,
        "active_memory_bytes": status.active_memory_bytes,
        "cached_memory_bytes": status.cached_memory_bytes,
        "slots": status.slots,
        "versions": {"mlx": hello.mlx_version, "mlx-lm": hello.mlx_lm_version},
    }
