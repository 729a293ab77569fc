"""Streams that wait for memory, by a clock that jumps: they say that they live, and in the end why it was in vain."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx2
import pytest

from coordinator.resident.channels import Delta
from tests.unit.shapes.scripted import ScriptedModel, connected, delta, last
from tests.unit.virtual_time import VirtualTime
from worker.errors import WaitedTooLong

LIVES = ": still at it"
HELLO = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
    "/v1/responses": {"input": "Hello"},
}


class Waiting(ScriptedModel):
    """Says nothing for a while, as a model that has no memory for another request."""

    def __init__(self, wait_s: float, script: list[Delta | Exception]) -> None:
        super().__init__(script)
        self.wait_s = wait_s

    async def stream(self, task: Any, *, traced: bool = False) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(self.wait_s)
        async for step in super().stream(task):
            yield step


@pytest.fixture
def clock() -> Iterator[VirtualTime]:
    clock = VirtualTime()
    yield clock
    clock.close()


def told(clock: VirtualTime, path: str, model: ScriptedModel, *, stream: bool = True) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        async with connected(model) as client:
            return await client.post(f"http://localhost{path}", json=ASKED[path] | {"stream": stream}, timeout=None)

    return clock.run(ask())


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_waits_says_that_it_lives(clock: VirtualTime, path: str) -> None:
    found = told(clock, path, Waiting(35.0, [delta("Hel"), delta("lo"), last()]))
    lines = found.text.splitlines()
    assert found.status_code == 200 and lines.count(LIVES) == 2  # after 20 s and 30 s; until 10 s it could be refused
    assert lines.index(LIVES) == 0 and "lo" in found.text


@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_has_waited_in_vain_ends_with_the_error(clock: VirtualTime, path: str) -> None:
    found = told(clock, path, Waiting(60.0, [WaitedTooLong("waited 60 s for memory")]))
    events = [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: {")]
    assert found.status_code == 200 and found.text.count(LIVES) == 5
    if path == "/v1/responses":
        kinds = ["response.created", "response.in_progress", "error", "response.failed"]
        assert [event["type"] for event in events] == kinds and events[2]["code"] == "queue_timeout"
    else:
        kind = {"/v1/messages": "overloaded_error", "/v1/chat/completions": "service_unavailable"}[path]
        assert [event["error"]["type"] for event in events] == [kind] and "[DONE]" not in found.text


@pytest.mark.parametrize(("wait_s", "stream"), [(9.0, True), (60.0, False)])
@pytest.mark.parametrize("path", ASKED)
def test_what_is_refused_before_anything_was_said_has_a_status(
    clock: VirtualTime, path: str, wait_s: float, stream: bool
) -> None:
    found = told(clock, path, Waiting(wait_s, [WaitedTooLong("waited for memory")]), stream=stream)
    assert (found.status_code, found.headers["retry-after"]) == (503, "5")
