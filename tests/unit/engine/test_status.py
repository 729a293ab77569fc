"""The state of a server, as `/cluster` tells it."""

import asyncio
from types import SimpleNamespace
from typing import Any

from coordinator.engine.stats import Stats
from coordinator.engine.status import ClusterStatus
from coordinator.planning.plan import Assignment, Plan


def test_a_chain_with_more_nodes_than_the_last_one_is_told_before_the_engine_goes_on_with_it() -> None:
    places = tuple(Assignment(name, 2 * i, 2 * i + 2, 1, 1, 9) for i, name in enumerate(("own", "mini")))
    chain = SimpleNamespace(plan=Plan(places, 100), own_status=None, epoch=2)
    cluster = SimpleNamespace(chain=chain, nodes=SimpleNamespace(workers={}), outside=[], trouble="")
    slots = SimpleNamespace(promised=(7,))  # of the first chain, which had one node
    model: Any = SimpleNamespace(cluster=cluster, scheduler=SimpleNamespace(slots=slots), sessions=[])
    found = asyncio.run(ClusterStatus(Stats()).look(model))
    assert [(node.name, node.cache_promised_bytes) for node in found.nodes] == [("own", 7), ("mini", 0)]
