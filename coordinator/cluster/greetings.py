"""What the nodes say when they are asked who is there: who is missing, and where their set-up differs from ours."""

import asyncio
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from coordinator.cluster.peer import Peer
from protos.brigade_pb2 import HelloReply
from worker.config import Cluster
from worker.errors import BrigadeError, StageLost
from worker.node.configuration import configuration_of, differing
from worker.node.identity import Role, expiry_told, expiry_warning

_MOST_DIFFERENCES = 5  # of one worker's configuration that are told


async def greet(peers: Sequence[Peer]) -> list[HelloReply]:
    """Ask every worker.

    Raises:
        BrigadeError: of the one that cannot take part, or a line for each; a StageLost if any does not answer.
    """
    outcomes = await asyncio.gather(*(peer.hello() for peer in peers), return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    errors = [failure for failure in failures if isinstance(failure, BrigadeError)]
    if len(errors) < len(failures):
        raise next(failure for failure in failures if not isinstance(failure, BrigadeError))
    if len(errors) > 1:
        worst = next((error for error in errors if isinstance(error, StageLost)), errors[0])
        raise type(worst)("\n".join(map(str, errors)))
    if errors:
        raise errors[0]
    return [outcome for outcome in outcomes if isinstance(outcome, HelloReply)]


def differences(name: str, cluster: Cluster, greeting: HelloReply) -> Iterator[str]:
    """A line for each difference between this node and the worker `name` that may surprise somebody."""
    # other kernels may round otherwise: the likeliest reason for other tokens than on one Mac
    for package, theirs in (("mlx", greeting.mlx_version), ("mlx-lm", greeting.mlx_lm_version)):
        if theirs != (ours := version(package)):
            yield f"worker {name} has {package} {theirs}, this node {ours}"
    if until := expiry_told(greeting.certificate_expires):
        yield from filter(None, [expiry_warning(name, Role.WORKER, until)])
    if not greeting.HasField("configuration"):
        return
    if greeting.node != name:
        yield f"worker {name} calls itself {greeting.node}: one of both has the wrong name or address"
    found = differing(greeting.configuration, configuration_of(cluster))
    for key, there, here in found[:_MOST_DIFFERENCES]:
        yield f"worker {name} has another configuration: {key} is {there} there, {here} here"
    if more := found[_MOST_DIFFERENCES:]:
        yield f"worker {name} has another configuration: {len(more)} more keys differ"
