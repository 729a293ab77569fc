"""What a worker is asked to hold."""

from coordinator.cluster.deployment import Deployment
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from worker.model.checkpoint import DEMO, open_folder
from worker.model.describe import BACK, FRONT, describe


def test_a_worker_hears_of_the_digests_of_its_own_layers_only() -> None:
    checkpoint = open_folder(DEMO)
    spec = describe(checkpoint)
    nodes = [Node(name, 1 << 40) for name in ("studio", "mini", "air")]
    deployment = Deployment(checkpoint, spec, plan(spec, nodes, NO_SPEEDS, Objective(128, layers=(2, 3, 3))), [])
    known = {place: f"{place}" for place in (FRONT, BACK, *range(1, 8))}
    assert set(deployment.load_request(1, digests=known).digests) == {2, 3, 4}
    assert set(deployment.load_request(2, digests=known).digests) == {5, 6, 7, FRONT, BACK}
