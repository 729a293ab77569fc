"""`POST /v1/responses`: Open Responses. Nothing is stored."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.answers import TurnPart, function_tool, one_if_text, template_messages
from coordinator.api.body import OF_OPENAI, UNSUPPORTED, Sampled, Section, Unsupported, read_body
from coordinator.api.errors import HttpError
from coordinator.api.response_events import EchoedFormat, ResponseBuilder, ResponseObject
from coordinator.api.server import Server
from coordinator.api.sse import DONE, named, renaming, respond
from coordinator.engine.engine import Engine
from coordinator.engine.grammars import json_grammar
from coordinator.sessions.output import Output, ToolCall
from coordinator.sessions.request import Calls, Conversation, RequestSpec
from coordinator.sessions.request import Request as EngineRequest
from protos.brigade_pb2 import Sampling
from worker.errors import InputError

Json = dict[str, Any]

_FORMAT = {"response_format": "text.format"}
_NAMES = _FORMAT | {"prompt": "input", "max_tokens": "max_output_tokens"}
_NOTHING_STORED = "expected none: this server stores nothing; send the whole conversation as input"
_TOLD_BY_CHAT = "log-probabilities are only told by /v1/chat/completions"
_NO_LOGPROBS = f"expected none of message.output_text.logprobs: {_TOLD_BY_CHAT}"
_REFUSED = {
    "previous_response_id": _NOTHING_STORED,
    "conversation": _NOTHING_STORED,
    "prompt": _NOTHING_STORED,
    "background": "expected false: this server answers at once",
    "top_logprobs": f"expected 0: {_TOLD_BY_CHAT}",
}


class TextPart(Section):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ThoughtPart(Section):
    text: str


TextParts = Annotated[list[TextPart], BeforeValidator(one_if_text(lambda text: {"type": "text", "text": text}))]


class MessageItem(Section):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextParts


class CallItem(Section):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Section):
    type: Literal["function_call_output"]
    call_id: str
    output: TextParts


class ReasoningItem(Section):
    """Thoughts of another server's may be encrypted: nobody else can read them."""

    type: Literal["reasoning"]
    content: list[ThoughtPart] | None = None
    summary: list[ThoughtPart] = Field(default_factory=list)


def _type_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="unsupported_item",
        custom_error_message="expected an item of type message, function_call, function_call_output or reasoning",
    ),
]
Items = Annotated[list[Item], BeforeValidator(one_if_text(lambda text: {"role": "user", "content": text}))]


class Tool(Section):
    """A function of the client's. This server has no tools of its own."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None


class OneTool(Section):
    """The one that must be called."""

    type: Literal["function"]
    name: str


class Format(Section):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")

    def grammar(self) -> str | None:
        """What the answer must be. Raises InputError for a schema that cannot be enforced."""
        if self.type == "json_schema":
            if self.schema_ is None:
                raise InputError("text.format.schema", "expected an object, found none")
            return json_grammar(self.schema_)
        return json_grammar() if self.type == "json_object" else None

    def echoed(self) -> EchoedFormat:
        found: EchoedFormat = {"type": self.type}
        if self.name is not None:
            found["name"] = self.name
        if self.schema_ is not None:
            found["schema"] = self.schema_
        return found


class TextConfig(Section):
    format: Format = Format()


class Effort(Section):
    effort: str | None = None


class ResponsesBody(Sampled):
    """What may be asked. Fields that would change the answer and are not supported are refused by `ask`."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | OF_OPENAI
    model: str | None = None
    input: Items = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    reasoning: Effort | None = None
    stream: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: Json = Field(default_factory=dict)
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None

    def ask(self) -> RequestSpec:
        """Raises InputError for what is not supported and would change the answer."""
        for name, why in _REFUSED.items():
            if getattr(self, name):
                raise InputError(name, why)
        if "message.output_text.logprobs" in (self.include or ()):
            raise InputError("include", _NO_LOGPROBS)
        penalties = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        return self.asking(
            self._conversation(),
            sampling={name: value for name, value in penalties.items() if value is not None},
            max_tokens=self.max_output_tokens,
            grammar=self.text.format.grammar(),
            calls=self._calls(),
        )

    def _calls(self) -> Calls:
        only = self.tool_choice.name if isinstance(self.tool_choice, OneTool) else None
        are_forced = only is not None or self.tool_choice == "required"
        return Calls(are_forced, only, self.parallel_tool_calls is not False)

    def response(self, id: str, model: str, created: int, sampling: Sampling) -> ResponseObject:
        """Return a response in progress, with the settings that hold for it. `created` is in seconds since 1970."""
        choice = self.tool_choice
        return {
            "id": id,
            "object": "response",
            "created_at": created,
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": False,
                }
                for tool in self.tools
            ],
            "tool_choice": {"type": "function", "name": choice.name}
            if isinstance(choice, OneTool)
            else choice or "auto",
            "parallel_tool_calls": self._calls().is_parallel,
            "text": {"format": self.text.format.echoed()},
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "metadata": self.metadata or {},
            "previous_response_id": None,
            "truncation": "disabled",
            "top_logprobs": 0,
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "safety_identifier": None,
            "prompt_cache_key": None,
        }

    def _conversation(self) -> Conversation:
        instructions = () if self.instructions is None else (TurnPart("system", text=self.instructions),)
        parts = [*instructions, *(part for item in self.input for part in _parts_of(item))]
        tools = () if self.tool_choice == "none" else self.tools
        return Conversation(
            template_messages(parts),
            tuple(function_tool(tool.name, tool.description, tool.parameters) for tool in tools),
            self._effort() | self.chat_template_kwargs,
        )

    def _effort(self) -> Json:
        """By the names that templates know; what they do without it is the model's own choice."""
        if self.reasoning is None or self.reasoning.effort is None:
            return {}
        effort = self.reasoning.effort
        return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


def _parts_of(item: MessageItem | CallItem | CallOutputItem | ReasoningItem) -> Iterator[TurnPart]:
    match item:
        case MessageItem():
            role = "system" if item.role == "developer" else item.role  # which no template knows
            yield from (TurnPart(role, text=part.text) for part in item.content)
        case CallItem():
            yield TurnPart("assistant", call=ToolCall(item.call_id, item.name, item.arguments))
        case CallOutputItem():
            yield TurnPart("tool", text="\n".join(part.text for part in item.output), call_id=item.call_id)
        case ReasoningItem():
            yield from (TurnPart("assistant", thought=part.text) for part in item.content or item.summary)


class ResponsesAnswer:
    """The answer to one request of `/v1/responses`."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._body = body
        self._model = model
        self._builder = self._make_builder(Sampling())  # for a failure before the request is prepared

    def _make_builder(self, sampling: Sampling) -> ResponseBuilder:
        response = self._body.response(f"resp_{uuid.uuid4().hex}", self._model, int(time.time()), sampling)
        return ResponseBuilder(response)

    async def prepare(self, engine: Engine) -> Sequence[EngineRequest]:
        with renaming(_FORMAT):  # a `prompt` that is refused here is the body's own
            spec = self._body.ask()
        with renaming(_NAMES):
            request = await engine.prepare(spec)
        self._builder = self._make_builder(request.sampling)
        return [request]

    def events(self, index: int, output: Output) -> Iterator[bytes]:
        return map(named, self._builder.events(output))

    def end(self) -> Iterator[bytes]:
        yield DONE

    def failed(self, error: HttpError) -> bytes:
        return b"".join(map(named, self._builder.failed(error.to_openai()["error"]))) + DONE

    def whole(self, outputs: Sequence[Sequence[Output]]) -> ResponseObject:
        for output in outputs[0]:
            for _ in self._builder.events(output):
                pass
        return self._builder.response


async def responses(request: Request) -> Response:
    """Answer items of input as Open Responses says."""
    server: Server = request.app.state.server
    body = await read_body(request, ResponsesBody, server.limits.body_bytes)
    server.require_name(body.model)
    return await respond(request, ResponsesAnswer(body, server.names[0]), stream=body.stream)
