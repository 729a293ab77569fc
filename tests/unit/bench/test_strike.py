"""Losing a worker in the middle of an answer that has no middle."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.bench.failover import CASES, _strike
from coordinator.sessions.request import Request
from worker.errors import BrigadeError


class Ended:
    """An engine whose answer ends at once."""

    async def generate(self, request: Request) -> AsyncIterator[Any]:
        for _ in ():
            yield


def test_an_answer_that_ended_before_the_worker_was_struck_is_an_error() -> None:
    engine: Any = Ended()
    worker: Any = SimpleNamespace(send_signal=pytest.fail)
    with pytest.raises(BrigadeError, match="expected an answer of 16 tokens, it ended after 0"):
        asyncio.run(_strike(engine, Request((1,), 16), worker, CASES[0]))
