import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from coordinator.engine.one_at_a_time import OneAtATime
from coordinator.engine.stats import Stats
from worker.errors import WaitedTooLong


class Call:
    """Stays until it may end, and then fails."""

    def __init__(self) -> None:
        self.may_end, self.has_ended = threading.Event(), False

    def __call__(self) -> None:
        self.may_end.wait(20)
        self.has_ended = True
        raise ValueError


async def begun(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


async def test_a_call_waits_for_one_before_it_that_nobody_waits_for_any_more() -> None:
    aside, first = OneAtATime(), Call()
    left = await begun(aside.run(first))
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    second = await begun(aside.run(lambda: first.has_ended))
    first.may_end.set()
    assert await second


async def test_a_call_that_was_left_before_its_turn_is_not_run() -> None:
    aside, first, second = OneAtATime(), Call(), Call()
    running, left = await begun(aside.run(first)), await begun(aside.run(second))
    left.cancel()
    first.may_end.set()
    with pytest.raises(ValueError):
        await running
    assert await aside.run(lambda: second.has_ended) is False


async def test_a_call_waits_only_for_so_long_and_all_who_are_refused_are_counted() -> None:
    stats, first = Stats(), Call()
    aside = OneAtATime(max_wait_s=0.01, on_refused=stats.refuse)
    running, waiting = await begun(aside.run(first)), await begun(aside.run(Call()))
    with pytest.raises(WaitedTooLong):
        await waiting
    assert stats.counts("requests_rejected") == {"WaitedTooLong": 1}
    first.may_end.set()
    with pytest.raises(ValueError):
        await running
