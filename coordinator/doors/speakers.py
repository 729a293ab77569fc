"""Speakers: whoever answers a conversation: the model in this process, or a server that runs already."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from coordinator.doors.server import Server
from coordinator.resident.ask import Ask, Conversation
from coordinator.resident.model import ResidentModel
from coordinator.shapes.answers import usage_of

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Figures:
    """What an answer took."""

    num_prompt: int
    num_reused: int  # tokens of the prompt that were in the caches already
    num_generated: int
    num_recoveries: int = 0


@dataclass(frozen=True)
class Said:
    """What a step added to an answer."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    figures: Figures | None = None


class Speaker(Protocol):
    """Answers messages."""

    @property
    def name(self) -> str:
        """The model's."""
        ...

    def stream(self, messages: Messages) -> AsyncGenerator[Said, None]:
        """The answer as it comes. Closing the iterator ends it. Raises BrigadeError if there is none."""
        ...


class ResidentSpeaker:
    """The model that this process has open."""

    def __init__(self, model: ResidentModel, manner: Ask) -> None:
        """Everything is asked in this manner; its prompt does not count."""
        self._model = model
        self._manner = manner

    @property
    def name(self) -> str:
        return self._model.name

    async def stream(self, messages: Messages) -> AsyncGenerator[Said, None]:
        task = await self._model.prepare(replace(self._manner, prompt=Conversation(tuple(messages))))
        async with aclosing(self._model.stream(task)) as deltas:
            async for delta in deltas:
                figures = None
                if delta.finish_reason is not None:
                    took = usage_of(delta)
                    figures = Figures(took.num_prompt, took.num_reused, took.num_generated, took.num_recoveries)
                yield Said(delta.content, delta.reasoning, delta.finish_reason, figures)


class ServerSpeaker:
    """The model of a server."""

    def __init__(self, server: Server, manner: Mapping[str, Any]) -> None:
        """`manner` are fields of every body."""
        self._server = server
        self._manner = dict(manner)

    @property
    def name(self) -> str:
        return self._server.name

    async def stream(self, messages: Messages) -> AsyncGenerator[Said, None]:
        async with aclosing(self._steps("v1/chat/completions", {"messages": list(messages)})) as steps:
            async for step in steps:
                yield step

    async def complete(self, prompt: str | Sequence[int]) -> AsyncGenerator[Said, None]:
        """Likewise, what follows a text or token ids as they stand."""
        async with aclosing(self._steps("v1/completions", {"prompt": prompt})) as steps:
            async for step in steps:
                yield step

    async def _steps(self, path: str, asked: dict[str, Any]) -> AsyncGenerator[Said, None]:
        async with aclosing(self._server.events(path, self._manner | asked)) as events:
            async for event in events:
                for choice in event.get("choices", ()):
                    said = choice.get("delta") or {"content": choice.get("text")}
                    reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
                    yield Said(said.get("content") or "", reasoning, choice.get("finish_reason"))
                if usage := event.get("usage"):
                    yield Said(figures=_figures(usage, event.get("brigade") or {}))


def _figures(usage: Mapping[str, Any], beside: Mapping[str, Any]) -> Figures:
    reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Figures(usage["prompt_tokens"], reused, usage["completion_tokens"], beside.get("recoveries", 0))
