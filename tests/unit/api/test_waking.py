"""Streams of a model that is asleep: they have begun before it is there."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import Message

from coordinator.api.app import make_app
from coordinator.api.server import Server
from coordinator.engine.engine import ServerState
from coordinator.sessions.output import Output
from coordinator.sessions.request import Request, RequestSpec
from tests.unit.api.fakes import FakeEngine, only, served
from tests.unit.virtual_time import VirtualTime

LIVES = b": still at it\n\n"
HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
}


class Awake(FakeEngine):
    """Says one thing to each request, none of which keeps to a keyword of its schema."""

    async def make_request(self, ask: RequestSpec) -> Any:
        return Request((1,), 1, not_enforced=("schema.not",))

    async def generate(self, request: Any, *, traced: bool = False) -> AsyncGenerator[Output, None]:
        yield only(num_reused=0)


async def asked(path: str, then: Callable[[Server], None] | None, *, after: int) -> tuple[int, list[bytes]]:
    """Status and bodies of a stream for which something happens after so many messages, or its client leaves."""
    shared = served(model=Awake(), heartbeat_s=10)
    shared.sleep("nobody asked")
    body, sent = json.dumps(BODIES[path] | {"stream": True}).encode(), list[Message]()
    coming = asyncio.Queue[Message]()
    coming.put_nowait({"type": "http.request", "body": body, "more_body": False})

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == after and then is None:
            coming.put_nowait({"type": "http.disconnect"})
        elif len(sent) == after and then:
            then(shared)

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    if not after and then:
        asyncio.get_running_loop().call_later(5, then, shared)
    await make_app(shared)(scope, coming.get, send)
    assert shared.state is not ServerState.ASLEEP and not shared.num_waking
    assert sent[0]["status"] != 200 or (b"brigade-left-out", b"schema.not") in sent[0]["headers"]
    return sent[0]["status"], [message["body"] for message in sent[1:] if message["body"]]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_lives_while_the_model_is_read_again_and_then_answers(path: str, virtual: VirtualTime) -> None:
    status, bodies = virtual.run(asked(path, lambda shared: shared.open(Awake()), after=4))
    assert (status, bodies[:3]) == (200, [LIVES] * 3)
    assert bodies[3].startswith((b"data: {", b"event: ")) and b'"a"' in b"".join(bodies) and LIVES not in bodies[3:]
    assert virtual.now >= 1040
    assert virtual.run(asked(path, None, after=3)) == (200, [LIVES, LIVES]), "a client that leaves waits no more"


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_while_a_stream_waits_is_an_event_an_earlier_one_a_status(path: str, virtual: VirtualTime) -> None:
    status, bodies = virtual.run(asked(path, lambda shared: shared.fail("worker mini is away"), after=2))
    assert (status, bodies[0]) == (200, LIVES) and b"recovering: worker mini is away" in b"".join(bodies[1:])
    assert virtual.run(asked(path, lambda shared: shared.fail("worker mini is away"), after=0))[0] == 503
