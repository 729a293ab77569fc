"""How long what was loaded waits for its coordinator."""

import asyncio
from collections.abc import Iterator

import pytest

from protos.brigade_pb2 import Coordinator
from tests.unit.virtual_time import VirtualTime
from worker.errors import NodeBusy
from worker.node.due import LONGEST_S, Due
from worker.process.use import Use

ONE, OTHER = Coordinator(id="one"), Coordinator(id="other")


@pytest.fixture
def virtual() -> Iterator[VirtualTime]:
    virtual = VirtualTime()
    yield virtual
    assert not virtual.close()


def test_it_waits_for_so_long_from_the_latest_load_and_then_is_anybodys(virtual: VirtualTime) -> None:
    use = Use()
    due = Due(use)

    async def work() -> None:
        for _ in range(2):
            with due.loading_for(ONE):
                assert use.is_used
            await asyncio.sleep(LONGEST_S - 10)
        assert use.is_used, "the first load's time is over, not that of the second"
        due.refuse_others(ONE)
        with pytest.raises(NodeBusy):
            due.refuse_others(OTHER)
        await asyncio.sleep(20)
        assert not use.is_used
        due.refuse_others(OTHER)

    virtual.run(work())


def test_it_waits_for_nobody_after_a_load_that_failed() -> None:
    use = Use()
    due = Due(use)
    with pytest.raises(ValueError, match="no memory"), due.loading_for(ONE):
        raise ValueError("no memory")
    assert not use.is_used
    due.refuse_others(OTHER)
