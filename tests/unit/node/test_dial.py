"""Which of several attempts to connect counts, and which port hops go to."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from worker.errors import ConfigError
from worker.node import network
from worker.node.network import Attempt, give_up, has_succeeded, hop_address, wait_head_start

FAR = 20.0
Ends = list["asyncio.Future[None]"]


def trying(claim: Callable[[Ends, list[Attempt]], Coroutine[Any, Any, None]], count: int = 3) -> None:
    """Run a claim about attempts, of which each ends with its future."""

    async def run() -> None:
        ends: Ends = [asyncio.get_running_loop().create_future() for _ in range(count)]
        attempts = [asyncio.create_task(_until(end)) for end in ends]
        try:
            async with asyncio.timeout(FAR):
                await claim(ends, attempts)
        finally:
            await give_up(attempts)

    asyncio.run(run())


async def _until(end: "asyncio.Future[None]") -> None:
    await end


def first(attempts: list[Attempt]) -> int:
    return [has_succeeded(attempt) for attempt in attempts].index(True)


def test_one_that_is_somewhat_slower_than_a_later_one_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HEAD_START_S", FAR)

    async def claim(ends: Ends, attempts: list[Attempt]) -> None:
        waiting = asyncio.create_task(wait_head_start(attempts, FAR, lambda: network._is_settled(attempts)))
        ends[2].set_result(None)
        await asyncio.wait([attempts[2]])
        assert not waiting.done()
        ends[0].set_result(None)
        await waiting
        assert first(attempts) == 0 and not attempts[1].done(), "the one between was not waited for"

    trying(claim)


def test_one_that_has_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HEAD_START_S", FAR)

    async def claim(ends: Ends, attempts: list[Attempt]) -> None:
        ends[0].set_exception(OSError())
        ends[1].set_result(None)
        await wait_head_start(attempts, FAR, lambda: network._is_settled(attempts))
        assert first(attempts) == 1 and not attempts[2].done()

    trying(claim)


def test_if_all_fail_it_is_over() -> None:
    async def fail(ends: Ends, attempts: list[Attempt]) -> None:
        for end in ends:
            end.set_exception(OSError())
        await wait_head_start(attempts, FAR)
        assert all(attempt.done() for attempt in attempts) and not any(map(has_succeeded, attempts))

    trying(fail)


@pytest.mark.parametrize(("head_start_s", "within_s"), [(0.02, FAR), (FAR, 0.04)])
def test_one_that_answers_waits_for_earlier_ones_no_longer_than_the_head_start_and_the_deadline(
    monkeypatch: pytest.MonkeyPatch, head_start_s: float, within_s: float
) -> None:
    monkeypatch.setattr(network, "HEAD_START_S", head_start_s)

    async def claim(ends: Ends, attempts: list[Attempt]) -> None:
        ends[1].set_result(None)
        await wait_head_start(attempts, within_s)
        assert first(attempts) == 1 and not attempts[0].done()

    trying(claim)


@pytest.mark.parametrize(
    ("address", "hops"),
    [
        ("127.0.0.1:50070", "127.0.0.1:60070"),
        ("mini.local:1", "mini.local:10001"),
        ("[::1]:50070", "[::1]:60070"),
        ("mini:55535", "mini:65535"),
        ("mini:55536", "mini:45536"),
        ("mini:65535", "mini:55535"),
    ],
)
def test_hops_come_to_a_port_10000_higher_or_lower_where_there_is_none(address: str, hops: str) -> None:
    assert hop_address(address) == hops


def test_an_address_without_a_port_has_none_for_hops() -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        hop_address("mini")
