"""When something counts as unused."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.unit.virtual_time import VirtualTime
from worker.platform.tasks import Use

KEEP_S = 300.0


@pytest.fixture
def virtual() -> Iterator[VirtualTime]:
    virtual = VirtualTime()
    yield virtual
    assert not virtual.close()


def test_only_an_unbroken_time_without_use_counts(virtual: VirtualTime) -> None:
    use = Use()

    async def work() -> float:
        waiting = asyncio.create_task(use.wait_unused(KEEP_S))
        await asyncio.sleep(299)
        with use.using():
            await asyncio.sleep(1000)
            with use.using():
                await asyncio.sleep(1000)
            await asyncio.sleep(299)
        assert not waiting.done()
        ended = virtual.now
        await waiting
        return virtual.now - ended

    assert virtual.run(work()) == pytest.approx(KEEP_S)


def test_without_a_time_nothing_counts_as_unused(virtual: VirtualTime) -> None:
    use = Use()

    async def work() -> None:
        waiting = asyncio.create_task(use.wait_unused(None))
        await asyncio.sleep(1e6)
        with use.using():
            await asyncio.sleep(1)
        await asyncio.sleep(1e6)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])

    virtual.run(work())
