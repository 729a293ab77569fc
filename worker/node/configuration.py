"""A node's report on its name and cluster.yaml, to find what differs from the coordinator's."""

from collections.abc import Iterator

from protos.brigade_pb2 import Configuration
from worker.config import ClusterConfig
from worker.platform.text import format_bytes, printable

MOST_DIFFERENCES = 5  # that are told of one node
_MOST_SHOWN = 200  # characters of another node's value
_MOST_LAYERS = 64
_USUAL = ClusterConfig()
_DEFAULTS = {"order": _USUAL.order, "objective": _USUAL.objective, "coordinator.name": _USUAL.coordinator.name}


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
    """Return (key, value there, value here) for each key that is set there and has another value, or none, here.

    The node's own model and memory count where none is set here.
    """
    theirs, own = _values(there), ("model", f"workers[{there.name}].memory")
    ours = {key: theirs[key] for key in own if key in theirs} | _DEFAULTS | _values(here)
    return [
        (printable(key, _MOST_SHOWN), printable(value, _MOST_SHOWN), ours.get(key, "unset"))
        for key, value in theirs.items()
        if value != ours.get(key)
    ]


def _values(configuration: Configuration) -> dict[str, str]:
    layers = list(configuration.layers[:_MOST_LAYERS])
    own = {"model": configuration.model, "layers": layers, "context": configuration.context}
    return {key: str(value) for key, value in own.items() if value} | dict(sorted(configuration.others.items()))


def _others(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    own = cluster.coordinator
    if "order" in cluster.model_fields_set:
        yield "order", cluster.order
    if "objective" in cluster.model_fields_set:
        yield "objective", cluster.objective
    if "name" in own.model_fields_set:
        yield "coordinator.name", own.name
    if own.memory is not None:
        yield "coordinator.memory", format_bytes(own.memory)
    for worker in cluster.workers:
        if worker.memory is not None:
            yield f"workers[{worker.name}].memory", format_bytes(worker.memory)
