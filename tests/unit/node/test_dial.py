"""Which of several attempts to connect counts, and which port hops go to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from worker.errors import ConfigError
from worker.node import network
from worker.node.network import Attempt, has_succeeded, hop_address, wait_head_start
from worker.platform.tasks import cancel_all

FAR = 20.0


@asynccontextmanager
async def attempting() -> AsyncIterator[tuple[list["asyncio.Future[None]"], list[Attempt]]]:
    """Three attempts, of which each ends with its future."""

    async def attempt(end: "asyncio.Future[None]") -> None:
        await end

    ends = [asyncio.get_running_loop().create_future() for _ in range(3)]
    attempts = [asyncio.create_task(attempt(end)) for end in ends]
    try:
        yield ends, attempts
    finally:
        await cancel_all(*attempts)


def first(attempts: list[Attempt]) -> int:
    return [has_succeeded(attempt) for attempt in attempts].index(True)


@pytest.fixture
def long_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HEAD_START_S", FAR)


@pytest.mark.usefixtures("long_head_start")
async def test_one_that_is_somewhat_slower_than_a_later_one_still_counts() -> None:
    async with attempting() as (ends, attempts):
        waiting = asyncio.create_task(wait_head_start(attempts, FAR, lambda: network.is_settled(attempts)))
        ends[2].set_result(None)
        await asyncio.wait([attempts[2]])
        assert not waiting.done()
        ends[0].set_result(None)
        await waiting
        assert first(attempts) == 0 and not attempts[1].done(), "the one between was not waited for"


@pytest.mark.usefixtures("long_head_start")
async def test_one_that_has_failed_is_not_waited_for() -> None:
    async with attempting() as (ends, attempts):
        ends[0].set_exception(OSError())
        ends[1].set_result(None)
        await wait_head_start(attempts, FAR, lambda: network.is_settled(attempts))
        assert first(attempts) == 1 and not attempts[2].done()


async def test_if_all_fail_it_is_over() -> None:
    async with attempting() as (ends, attempts):
        for end in ends:
            end.set_exception(OSError())
        await wait_head_start(attempts, FAR)
        assert all(attempt.done() for attempt in attempts) and not any(map(has_succeeded, attempts))


@pytest.mark.parametrize(("head_start_s", "within_s"), [(0.02, FAR), (FAR, 0.04)])
async def test_one_that_answers_waits_for_earlier_ones_no_longer_than_the_head_start_and_the_deadline(
    monkeypatch: pytest.MonkeyPatch, head_start_s: float, within_s: float
) -> None:
    monkeypatch.setattr(network, "HEAD_START_S", head_start_s)
    async with attempting() as (ends, attempts):
        ends[1].set_result(None)
        await wait_head_start(attempts, within_s)
        assert first(attempts) == 1 and not attempts[0].done()


@pytest.mark.parametrize(
    ("address", "hops"),
    [
        ("127.0.0.1:50070", "127.0.0.1:60070"),
        ("[::1]:50070", "[::1]:60070"),
        ("mini:55535", "mini:65535"),
        ("mini:55536", "mini:45536"),
    ],
)
def test_hops_come_to_a_port_10000_higher_or_lower_where_there_is_none(address: str, hops: str) -> None:
    assert hop_address(address) == hops
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        hop_address("mini")
