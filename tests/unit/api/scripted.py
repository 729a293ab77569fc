"""Answers by script: deltas as a model's, and a server whose model answers with them."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import cycle
from typing import Any, cast

import httpx2
from starlette.types import ASGIApp, Message

from coordinator.api.app import make_app
from coordinator.api.server import Server
from coordinator.engine.engine import ServerState, ServerStatus
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.output import Output, Token, ToolCall, Usage
from coordinator.sessions.request import Request, RequestSpec
from protos.brigade_pb2 import Sampling
from tests.unit.api.answers import FakeEngine

CALLS = (ToolCall("call_1", "add", '{"a": 1, "b": "zwei"}'), ToolCall("call_2", "now", "{}"))
TOOL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


def delta(content: str = "", *, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> Output:
    """Of a step that decided two tokens."""
    return Output("", [Token(5), Token(6)], 0, content=content, reasoning=reasoning, tool_calls=tuple(calls))


def last(reason: str = "stop", *, stop: str | None = None, num_reused: int = 2) -> Output:
    """An answer of ten tokens to a prompt of seven has ended, three seconds after it was asked for."""
    usage = Usage(7, started=0, num_reused=num_reused, num_steps=5, num_rows=20, num_generated=10)
    return Output("", [], 3 * 10**9, reason, usage, stop=stop)


ALL = [
    delta(reasoning="\n"), delta(reasoning="Hm, "), delta(reasoning="add."), delta("\n"), delta("\nLet me "),
    delta("add."), delta("\n\n"), delta(calls=CALLS[:1]), delta("\n"), delta(calls=CALLS[1:]), last("tool_calls"),
]  # fmt: skip


class ScriptedModel(FakeEngine):
    """Stands in for an Engine: answers every request with these deltas, in which errors are raised."""

    status = ServerStatus(ServerState.READY)
    num_waiting = 0

    def __init__(self, script: Iterable[Output | Exception]) -> None:
        self.script = script
        self.has_ended = asyncio.Event()
        self.has_begun = asyncio.Event()  # the fifth step: then the first ones were sent

    async def prepare(self, ask: RequestSpec) -> Any:
        return Request((1,) * 7, 5, Sampling(temperature=0.5))

    async def generate(self, request: Any, *, traced: bool = False) -> AsyncGenerator[Output, None]:
        try:
            for number, step in enumerate(self.script):
                await asyncio.sleep(0)
                if number == 4:
                    self.has_begun.set()
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.has_ended.set()


def app_of(model: ScriptedModel) -> ASGIApp:
    """A server with this model."""
    served = Server(cast(InputProcessor, None), ["scripted"])
    served.open(cast(Any, model))
    return make_app(served)


def connected(model: ScriptedModel) -> httpx2.AsyncClient:
    """A client of a server with this model, in this process."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app_of(model)))


async def leave_in_the_middle(path: str, body: dict[str, Any]) -> None:
    """Return once a client has left a server in the middle of an endless answer, and that has ended."""
    model = ScriptedModel(cycle([delta("x")]))
    requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await model.has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    await app_of(model)(scope, receive, send)
    await asyncio.wait_for(model.has_ended.wait(), 10)
