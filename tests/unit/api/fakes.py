"""Engines that answer by script, and the application around them without a process, a port or a model."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from itertools import cycle
from typing import Any, cast

import httpx2
from starlette.types import ASGIApp, Message

from coordinator.api.app import make_app
from coordinator.api.server import RequestLimits, Server
from coordinator.engine.engine import Engine, ServerState, ServerStatus
from coordinator.engine.inputs import InputProcessor
from coordinator.sessions.output import Output, Token, ToolCall, Usage
from coordinator.sessions.request import Request, RequestSpec
from protos.brigade_pb2 import Sampling

CALLS = (ToolCall("call_1", "add", '{"a": 1, "b": "zwei"}'), ToolCall("call_2", "now", "{}"))
TOOL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


def delta(content: str = "", *, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> Output:
    """An output of a step that decided two tokens."""
    tokens, num_reasoning = [Token(5), Token(6)], 2 * bool(reasoning)
    return Output(
        "", tokens, 0, content=content, reasoning=reasoning, num_reasoning=num_reasoning, tool_calls=tuple(calls)
    )


def last(reason: str = "stop", *, stop: str | None = None, num_reused: int = 2) -> Output:
    """The end of an answer of ten tokens to a prompt of seven, three seconds after it was asked for."""
    usage = Usage(7, started=0, num_reused=num_reused, num_steps=5, num_rows=20, num_generated=10)
    return Output("", [], 3 * 10**9, reason, usage, stop=stop)


def only(num_reused: int) -> Output:
    """The only output of an answer, `a`."""
    return Output("a", (), 0, "stop", Usage(9, 0, num_reused, 1, 1, num_generated=1), content="a")


ALL = [
    delta(reasoning="\n"), delta(reasoning="Hm, "), delta(reasoning="add."), delta("\n"), delta("\nLet me "),
    delta("add."), delta("\n\n"), delta(calls=CALLS[:1]), delta("\n"), delta(calls=CALLS[1:]), last("tool_calls"),
]  # fmt: skip


class FakeEngine:
    """Runs its own `generate` for one request after the other; makes its requests as well."""

    status, failure = ServerStatus(ServerState.READY), None
    token_text = str
    tokenizer = None

    def token_bytes(self, token: int) -> None:
        return None

    def has_begun(self, requests: Sequence[Any]) -> bool:
        return True

    def generate(self, request: Any, *, traced: bool = False) -> AsyncGenerator[Output, None]:
        raise NotImplementedError

    async def generate_all(
        self, requests: Sequence[Any], *, traced: bool = False, at_once: int = 1
    ) -> AsyncGenerator[tuple[int, Output], None]:
        for number, request in enumerate(requests):
            async with aclosing(self.generate(request, traced=traced)) as outputs:
                async for output in outputs:
                    yield number, output


class ScriptedModel(FakeEngine):
    """Answers every request with these outputs, and raises the errors among them."""

    def __init__(self, script: Iterable[Output | Exception]) -> None:
        self.script = script
        self.has_ended = asyncio.Event()
        self.has_begun = asyncio.Event()  # the fifth step: the first ones were sent

    async def make_request(self, ask: RequestSpec) -> Any:
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


def served(*, model: Any = None, heartbeat_s: float = RequestLimits.heartbeat_s, **more: Any) -> Server:
    """What routes share while this model is loaded, or none."""
    limits = RequestLimits(body_bytes=1000, heartbeat_s=heartbeat_s)
    shared = Server(cast(InputProcessor, model or ScriptedModel(())), ("talker",), limits, **more)
    if model is not None:
        shared.open(cast(Engine, model))
    return shared


def app(**more: Any) -> ASGIApp:
    return make_app(served(), **more)


def ask(app: ASGIApp, method: str, path: str, **more: Any) -> httpx2.Response:
    """The answer to one request."""

    async def sent() -> httpx2.Response:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:9338") as client:
            return await client.request(method, path, **more)

    return asyncio.run(sent())


def app_of(model: ScriptedModel) -> ASGIApp:
    shared = Server(cast(InputProcessor, model), ["scripted"])
    shared.open(cast(Any, model))
    return make_app(shared)


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
