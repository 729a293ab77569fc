"""The lines that `brigade bridge` takes and prints. Pure."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from coordinator.doors.figures import stats_of
from coordinator.doors.streams import MOST_BYTES
from coordinator.resident.ask import Ask, Conversation
from coordinator.resident.channels import Delta
from coordinator.sessions.answer import Answer
from coordinator.shapes.body import Sampled, Texts
from coordinator.shapes.openai_chat import ChatBody
from worker.errors import BrigadeError, InputError

Json = dict[str, Any]
Id = str | int
OPS = ("generate", "chat", "info", "cancel", "quit")


class GenerateBody(Sampled):
    """What `generate` takes: a prompt, as `brigade generate` does, or token ids."""

    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    system_prompt: str | None = None
    raw: bool = False
    max_tokens: int = Field(256, ge=1)
    stop: Texts | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> "GenerateBody":
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise ValueError("expected either prompt or prompt_tokens")
        if self.system_prompt and (self.raw or self.prompt is None):
            raise ValueError("system_prompt is expected only with a prompt that is not raw")
        return self

    def ask(self, *, has_template: bool) -> Ask:
        """As a conversation where the model has a template for one."""
        others = {name: getattr(self, name) for name in ("presence_penalty", "frequency_penalty", "logit_bias")}
        return self.asking(
            self._prompt(has_template), sampling=others, max_tokens=self.max_tokens, stops=tuple(self.stop or ())
        )

    def _prompt(self, has_template: bool) -> Conversation | str | tuple[int, ...]:
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        assert self.prompt is not None
        if self.raw or not has_template:
            return self.prompt
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return Conversation((*system, {"role": "user", "content": self.prompt}))


class OneChat(ChatBody):
    """What `chat` takes: one answer to messages."""

    n: Literal[1] = 1


@dataclass(frozen=True)
class Line:
    """A line that could be read, as far as every op has the same."""

    id: Id
    op: str
    body: Json


class Unreadable(InputError):
    """A line that cannot be read; `id` is the one it gives, if it does."""

    def __init__(self, field: str, message: str, found_id: Id | None = None) -> None:
        super().__init__(field, message)
        self.id = found_id


def parse_line(text: bytes) -> Line:
    """Raises Unreadable."""
    if len(text) > MOST_BYTES:
        raise Unreadable("", f"expected a line of at most {MOST_BYTES} bytes")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable("", f"expected a JSON object, found something else ({error})") from error
    if not isinstance(body, dict):
        raise Unreadable("", f"expected a JSON object, found {type(body).__name__}")
    found = body.pop("id", None)
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise Unreadable("id", "expected a text or a whole number, by which the lines of its answer go")
    op = body.pop("op", None)
    if op not in OPS:
        raise Unreadable("op", f"expected one of {', '.join(OPS)}, found {op!r}", found)
    return Line(found, op, body)


def piece_line(line_id: Id, delta: Delta, *, is_chat: bool) -> Json | None:
    """What a step added; None where it added nothing."""
    tokens = [token.token for token in delta.piece.tokens]
    said: Json = {"id": line_id, "text": delta.content if is_chat else delta.piece.text, "tokens": tokens}
    if is_chat:
        said |= _beside(delta)
    return said if len(said) > 3 or said["text"] or tokens else None


def done_line(line_id: Id, answer: Answer, last: Delta, said: Json) -> Json:
    """The last line of an answer; `said` is the text, and what a chat has beside it."""
    done = {"id": line_id, "done": True, "finish_reason": last.finish_reason}
    return done | said | {"tokens": answer.tokens, "stats": stats_of(answer)}


def cancelled_line(line_id: Id, answer: Answer, said: Json) -> Json:
    """The last line of an answer that was ended before its end."""
    return {"id": line_id, "done": True, "finish_reason": "cancelled", **said, "tokens": answer.tokens, "stats": None}


def error_line(line_id: Id | None, error: BrigadeError) -> Json:
    """Instead of an answer's last line, or of a line that cannot be read."""
    field = error.field if isinstance(error, InputError) and error.field else None
    message = error.message if field else str(error)
    return {"id": line_id, "error": {"message": message, "field": field}}


@dataclass
class Said:
    """All that was said so far."""

    is_chat: bool
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Json, ...] = ()

    def add(self, delta: Delta) -> None:
        self.text += delta.content if self.is_chat else delta.piece.text
        self.reasoning += delta.reasoning
        self.tool_calls += tuple(_beside(delta).get("tool_calls", ()))

    def to_json(self) -> Json:
        """The text; beside that of a chat its reasoning and calls, if there are any."""
        beside: Json = {"reasoning": self.reasoning, "tool_calls": list(self.tool_calls)} if self.is_chat else {}
        return {"text": self.text} | {name: value for name, value in beside.items() if value}


def _beside(delta: Delta) -> Json:
    """What a chat says that is no text."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in delta.tool_calls]
    beside: Json = {"reasoning": delta.reasoning, "tool_calls": calls}
    return {name: value for name, value in beside.items() if value}
