"""A chain by a plan that exists already, for measurements and tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.cluster.chain import Chain
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.deployment import Deployment, OwnNode
from coordinator.cluster.nodes import Nodes
from coordinator.cluster.open import NO_RECOVERY
from worker.config import ClusterConfig, CoordinatorConfig


@asynccontextmanager
async def joined(deployment: Deployment) -> AsyncIterator[Chain]:
    """Open one chain, whose loss is final."""
    coordinator = CoordinatorConfig(name=deployment.plan.assignments[0].name)
    nodes = Nodes(deployment.peers, ClusterConfig(coordinator=coordinator))
    async with OwnNode() as own, nodes, Cluster(own, nodes, deployment, NO_RECOVERY) as cluster:
        yield await cluster.open()
