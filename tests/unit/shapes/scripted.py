"""Answers by script: deltas as a model's, and a server whose model answers with them."""

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx2

from coordinator.http.app import make_app
from coordinator.http.keys import Keys
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


ALL = [  # kinds
    delta(reasoning="\n"), delta(reasoning="Hm, "), delta(reasoning="add."), delta("\n"), delta("\nLet me "),
    delta("add."), delta("\n\n"), delta(calls=CALLS[:1]), delta("\n"), delta(calls=CALLS[1:]), last("tool_calls"),
]  # fmt: skip


class ScriptedModel:
    """Stands in for a ResidentModel: answers every request with these deltas, in which errors are raised."""

    standing = Standing(State.READY)
    num_waiting = 0

    def __init__(self, script: Sequence[Delta | Exception]) -> None:
        self.script = script
        self.asks: list[Ask] = []

    async def prepare(self, ask: Ask) -> Any:
        self.asks.append(ask)
        return SimpleNamespace(request=SimpleNamespace(prompt=(1,) * 7, sampling=Sampling(temperature=0.5)))

    async def stream(self, task: Any, *, traced: bool = False) -> AsyncGenerator[Delta, None]:
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            yield step


def connected(model: ScriptedModel, keys: Keys | None = None) -> httpx2.AsyncClient:
    """A client of a server with this model, in this process."""
    served = Served(cast(Frontend, None), ["scripted"], 0, model=cast(Any, model))
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(make_app(served, keys=keys)))
