"""What a node tells of its own cluster.yaml, so that a copy that differs from the coordinator's is noticed."""

from collections.abc import Iterator

from protos.brigade_pb2 import Configuration
from worker.config import Cluster
from worker.process.printable import printable

_MOST_SHOWN = 200  # characters of what another node says
_MOST_LAYERS = 64


def configuration_of(cluster: Cluster) -> Configuration:
    """What counts on a coordinator, as far as the file says it; addresses may be others from wherever one looks."""
    return Configuration(
        model=cluster.model or "",
        layers=cluster.layers or (),
        context=cluster.context or 0,
        others=dict(_others(cluster)),
    )


def differing(there: Configuration, here: Configuration) -> list[tuple[str, str, str]]:
    """What both say and not alike: key, what it is there, and here. A worker's copy may lack what is not about it."""
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


def _others(cluster: Cluster) -> Iterator[tuple[str, str]]:
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
