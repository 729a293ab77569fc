"""Answers by script: deltas as a model's, and a server whose model answers with them."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any, cast

import httpx2
from starlette.types import ASGIApp, Message

from coordinator.http.app import make_app
from coordinator.http.served import Served
from coordinator.resident.ask import Ask
from coordinator.resident.channels import Delta, ToolCall
from coordinator.resident.frontend import Frontend
from coordinator.resident.model import Standing, State
from coordinator.sessions.answer import Piece, Token, Usage
from protos.brigade_pb2 import Sampling

CALLS = (ToolCall("call_1", "add", '{"a": 1, "b": "zwei"}'), ToolCall("call_2", "now", "{}"))
TOOL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


def delta(content: str = "", *, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> Delta:
    """Of a step that decided two tokens."""
    return Delta(Piece("", [Token(5), Token(6)], 0), content, reasoning, tuple(calls))


def last(reason: str = "stop", *, stop: str | None = None, num_reused: int = 2) -> Delta:
    """An answer of ten tokens to a prompt of seven has ended, three seconds after it was asked for."""
    usage = Usage(7, started=0, num_reused=num_reused, num_steps=5, num_rows=20, num_generated=10)
    return Delta(Piece("", [], 3 * 10**9, reason, usage, stop=stop), finish_reason=reason)


ALL = [
    delta(reasoning="\n"), delta(reasoning="Hm, "), delta(reasoning="add."), delta("\n"), delta("\nLet me "),
    delta("add."), delta("\n\n"), delta(calls=CALLS[:1]), delta("\n"), delta(calls=CALLS[1:]), last("tool_calls"),
]  # fmt: skip


class ScriptedModel:
    """Stands in for a ResidentModel: answers every request with these deltas, in which errors are raised."""

    standing = Standing(State.READY)
    num_waiting = 0

    def __init__(self, script: Iterable[Delta | Exception]) -> None:
        self.script = script
        self.has_ended = asyncio.Event()
        self.has_begun = asyncio.Event()  # the fifth step: then the first ones were sent

    async def prepare(self, ask: Ask) -> Any:
        return SimpleNamespace(request=SimpleNamespace(prompt=(1,) * 7, sampling=Sampling(temperature=0.5)))

    async def stream(self, task: Any, *, traced: bool = False) -> AsyncGenerator[Delta, None]:
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
    served = Served(cast(Frontend, None), ["scripted"], 0)
    served.take(cast(Any, model))
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
