"""A node's report on its name and cluster.yaml, to find what differs from the coordinator's."""

from collections.abc import Iterator

from protos.brigade_pb2 import Configuration
from worker.config import ClusterConfig
from worker.platform.text import printable

_MOST_SHOWN = 200  # characters of another node's value
_MOST_LAYERS = 64


def configuration_of(cluster: ClusterConfig, name: str = "") -> Configuration:
    """Return the keys of the file that the coordinator uses, and the node's name if the user gave it one.

    Addresses are left out: they may differ between nodes.
    """
    return Configuration(
        model=cluster.model or "",
        layers=cluster.layers or (),
        context=cluster.context or 0,
        others=dict(_others(cluster)),
        name=name,
    )


def differing(there: Configuration, here: Configuration) -> list[tuple[str, str, str]]:
    """Return (key, value there, value here) for each key that both have with different values."""
    pairs = (
        ("model", there.model, here.model),
        ("layers", list(there.layers[:_MOST_LAYERS]), list(here.layers)),
        ("context", there.context, here.context),
        *((key, there.others[key], here.others[key]) for key in sorted({*there.others} & {*here.others})),
    )
    return [
        (key, printable(str(theirs), _MOST_SHOWN), str(ours))
        for key, theirs, ours in pairs
        if theirs and ours and theirs != ours
    ]


def _others(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    if "order" in cluster.model_fields_set:
        yield "order", cluster.order
    own = cluster.coordinator
    if "name" in own.model_fields_set:
        yield "coordinator.name", own.name
    if own.memory is not None:
        yield "coordinator.memory", str(own.memory)
    for worker in cluster.workers:
        if worker.memory is not None:
            yield f"workers[{worker.name}].memory", str(worker.memory)
