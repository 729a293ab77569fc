"""What `tools.load_serve` takes for three times a server's capacity, and for its latency."""

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.virtual_time import VirtualTime
from tools import load_serve
from tools.serve_client import Outcome


def test_the_rate_is_that_of_all_answers_and_no_percentile_exceeds_the_largest_value(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server answers sixteen requests at once within 0.5 s: 32 per second, and refuses two in the end."""
    numbers = count()
    num_at_capacity = 3 * 16  # of 1.2 s, the last of which end after 1.5 s

    async def stream(*given: Any) -> Outcome:
        refused_s = {num_at_capacity: 0.01, num_at_capacity + 1: 0.03}.get(next(numbers))
        await asyncio.sleep(refused_s or 0.5)
        return Outcome(429 if refused_s else 200, took_s=refused_s or 0.5)

    monkeypatch.setattr(load_serve, "stream", stream)
    client: Any = SimpleNamespace()
    assert virtual.run(load_serve.overload(client, [{}] * 16, 3.6)) == []
    told = capsys.readouterr().out
    assert "(96.0 requests/s)" in told and "429 within 29 ms" in told
