"""Budgets: how many bytes weights and caches may take on each node."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Offer(NamedTuple):
    """What is known of a node's memory, bytes."""

    offered: int  # by the node itself
    configured: int | None  # which counts, where the configuration says so
    is_here: bool = False  # on the coordinator's machine


def budgets(coordinator: Offer, workers: Iterable[Offer]) -> Iterator[int]:
    """Of each, the coordinator first. Nodes of its machine get equal parts of what it offers there."""
    nodes = [coordinator._replace(is_here=True), *workers]
    share = coordinator.offered // sum(node.is_here for node in nodes)
    for node in nodes:
        yield node.configured or (share if node.is_here else node.offered)
