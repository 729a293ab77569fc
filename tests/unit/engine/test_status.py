"""The state of a server, as `/cluster` tells it."""

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

from coordinator.engine.stats import Stats
from coordinator.engine.status import ClusterStatus
from coordinator.planning.plan import Assignment, Plan


class FakeEngine(SimpleNamespace):
    """Has what it was given, and takes weak references."""


def engine() -> Any:
    """One whose scheduler does not yet know the second node of its chain."""
    places = tuple(Assignment(name, 2 * i, 2 * i + 2, 1, 1, 9) for i, name in enumerate(("own", "mini")))
    chain = SimpleNamespace(plan=Plan(places, 100), own_status=None, epoch=2)
    cluster = SimpleNamespace(chain=chain, nodes=SimpleNamespace(workers={}), outside=[], trouble="")
    slots = SimpleNamespace(reserved=(7,))  # of the first chain, which had one node
    return FakeEngine(cluster=cluster, scheduler=SimpleNamespace(slots=slots), sessions=[])


def test_a_chain_with_more_nodes_than_the_last_one_is_told_before_the_engine_goes_on_with_it() -> None:
    found = asyncio.run(ClusterStatus(Stats()).look(engine()))
    assert [(node.name, node.cache_promised_bytes) for node in found.nodes] == [("own", 7), ("mini", 0)]


def test_an_engine_whose_status_was_asked_for_is_freed_once_it_is_dropped() -> None:
    status, model = ClusterStatus(Stats()), engine()
    asyncio.run(status.look(model))
    model = weakref.ref(model)
    assert model() is None
