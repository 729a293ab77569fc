"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages."""

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BeforeValidator, Field, RootModel
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from coordinator.api.answers import (
    Figures,
    Part,
    Parts,
    Text,
    Thought,
    TurnPart,
    figures_of,
    function_tool,
    one_if_text,
    parse_arguments,
    template_messages,
    usage_of,
)
from coordinator.api.body import OF_OPENAI, UNSUPPORTED, Sampled, Section, Texts, Unsupported, read_body
from coordinator.api.errors import AnthropicError, HttpError, JSONResponse
from coordinator.api.server import Server
from coordinator.api.sse import named, renaming, respond, unless_left
from coordinator.engine.engine import Engine
from coordinator.engine.grammars import json_grammar
from coordinator.sessions.output import Output, ToolCall
from coordinator.sessions.request import Calls, Conversation, RequestSpec
from coordinator.sessions.request import Request as EngineRequest
from worker.errors import InputError
from worker.platform.text import to_json

Json = dict[str, Any]
StopReason = Literal["end_turn", "stop_sequence", "max_tokens", "tool_use"]

_NAMES = {"prompt": "messages", "response_format": "output_config.format", "stop": "stop_sequences"}


class TextBlock(Section):
    type: Literal["text"]
    text: str


class ThinkingBlock(Section):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Section):
    """Thoughts of another server, which only that server can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Section):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


TextBlocks = Annotated[list[TextBlock], BeforeValidator(one_if_text(lambda text: {"type": "text", "text": text}))]


class ToolResultBlock(Section):
    """The result of a call. No template knows `is_error`: the content says so."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field(default_factory=list)


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Blocks = Annotated[list[Block], BeforeValidator(one_if_text(lambda text: {"type": "text", "text": text}))]


class Turn(Section):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    def parts(self) -> Iterator[TurnPart]:
        for block in self.content:
            match block:
                case TextBlock():
                    yield TurnPart(self.role, text=block.text)
                case ThinkingBlock():
                    yield TurnPart(self.role, thought=block.thinking)
                case ToolUseBlock():
                    yield TurnPart(self.role, call=ToolCall(block.id, block.name, json.dumps(block.input)))
                case ToolResultBlock():
                    yield TurnPart(
                        "tool", text="\n".join(part.text for part in block.content), call_id=block.tool_use_id
                    )


class Tool(Section):
    """A tool that the client runs. Those that Anthropic runs have other types."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Json


class ToolChoice(Section):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None  # of the tool that must be called, with the type `tool`
    disable_parallel_tool_use: bool = False

    def calls(self) -> Calls:
        """Raises InputError for a tool without a name."""
        if self.type == "tool" and self.name is None:
            raise InputError("tool_choice.name", "expected the name of the tool that must be called, found none")
        only = self.name if self.type == "tool" else None
        return Calls(self.type in ("any", "tool"), only, not self.disable_parallel_tool_use)


class Thinking(Section):
    """Whether to think first. A budget is ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(Section):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Section):
    format: OutputFormat | None = None

    def grammar(self) -> str | None:
        """Return the grammar of the answer. Raises InputError for a schema that cannot be enforced."""
        return None if self.format is None else json_grammar(self.format.schema_, field="output_config.format")


class CountBody(Sampled):
    """The fields that make a prompt: the body of `/v1/messages/count_tokens`."""

    unsupported: ClassVar[Unsupported] = (
        UNSUPPORTED | OF_OPENAI | {"frequency_penalty": (0,), "output_format": (), "presence_penalty": (0,)}
    )
    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    system: TextBlocks = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: Json = Field(default_factory=dict)

    def conversation(self) -> Conversation:
        """Raises InputError for what is not supported and would change the answer."""
        if self.messages[-1].role == "assistant":
            raise InputError(
                "messages", "expected the last one to be the user's: an answer cannot be begun for the model"
            )
        system = (TurnPart("system", text=block.text) for block in self.system)
        parts = [*system, *(part for turn in self.messages for part in turn.parts())]
        return Conversation(template_messages(parts), self._tools(), self._thinking() | self.chat_template_kwargs)

    def _tools(self) -> tuple[Json, ...]:
        if self.tool_choice.type == "none":
            return ()
        return tuple(function_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools)

    def _thinking(self) -> Json:
        """Return the template argument by the name that most templates know."""
        if self.thinking is None or self.thinking.type not in ("enabled", "disabled"):
            return {}
        return {"enable_thinking": self.thinking.type == "enabled"}


class MessagesBody(CountBody):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Texts = Field(default_factory=list)
    stream: bool = False

    def ask(self) -> RequestSpec:
        """Raises InputError as `conversation` does."""
        return self.asking(
            self.conversation(),
            max_tokens=self.max_tokens,
            stops=tuple(self.stop_sequences),
            grammar=self.output_config.grammar(),
            calls=self.tool_choice.calls(),
        )


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class ThinkingContent(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(TypedDict):
    """Input tokens are those that were in no cache. The beginning of a stream does not know of any cache yet."""

    input_tokens: int
    cache_creation_input_tokens: NotRequired[int]
    cache_read_input_tokens: NotRequired[int]
    output_tokens: int


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    brigade: NotRequired[Figures]


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: AnthropicMessage


class Ping(TypedDict):
    type: Literal["ping"]


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


BlockChange = TextDelta | ThinkingDelta | InputDelta


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockChange


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class Stop(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: Stop
    usage: MessageUsage
    brigade: Figures


class MessageStop(TypedDict):
    type: Literal["message_stop"]


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessageEvent(RootModel[Event | AnthropicError]):
    """An event of a streamed message."""


class TokenCount(TypedDict):
    input_tokens: int


class MessageBuilder:
    """Makes events of an answer's outputs; everything that they have told so far stands in `message`."""

    def __init__(self, id: str, model: str, num_prompt: int) -> None:
        self._parts = Parts()
        self._is_block_open = False
        self._has_begun = False
        self.message: AnthropicMessage = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_prompt, "output_tokens": 0},
        }

    def events(self, output: Output) -> Iterator[Event]:
        """Yield what the next output adds."""
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": {**self.message, "content": []}}
            yield {"type": "ping"}
        for part in self._parts.push(output):
            yield from self._add(part)
        if output.finish_reason is not None:
            yield from self._close_block()
            yield from self._end(output)

    def _add(self, part: Part) -> Iterator[Event]:
        blocks = self.message["content"]
        last = blocks[-1] if blocks and self._is_block_open else None
        match part:
            case Text(text):
                if last is None or last["type"] != "text":
                    yield from self._open_block({"type": "text", "text": ""}, last := TextContent(type="text", text=""))
                last["text"] += text
                yield self._delta({"type": "text_delta", "text": text})
            case Thought(text):
                if last is None or last["type"] != "thinking":
                    last = ThinkingContent(type="thinking", thinking="", signature="")
                    yield from self._open_block({"type": "thinking", "thinking": "", "signature": ""}, last)
                last["thinking"] += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCall(id, name, arguments):
                given = parse_arguments(arguments)
                given = given if isinstance(given, dict) else {"arguments": given}  # which has to be an object
                call = ToolUseContent(type="tool_use", id=id, name=name, input=given)
                yield from self._open_block({**call, "input": {}}, call)
                yield self._delta({"type": "input_json_delta", "partial_json": to_json(given)})

    def _open_block(self, empty: Content, block: Content) -> Iterator[Event]:
        """Begin a block that is `empty` in its first event."""
        yield from self._close_block()
        self.message["content"].append(block)
        self._is_block_open = True
        yield {"type": "content_block_start", "index": len(self.message["content"]) - 1, "content_block": empty}

    def _delta(self, delta: BlockChange) -> BlockDelta:
        return {"type": "content_block_delta", "index": len(self.message["content"]) - 1, "delta": delta}

    def _close_block(self) -> Iterator[Event]:
        if self._is_block_open:
            self._is_block_open = False
            yield {"type": "content_block_stop", "index": len(self.message["content"]) - 1}

    def _end(self, last: Output) -> Iterator[Event]:
        usage, reasons = usage_of(last), {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        is_stopped = last.finish_reason == "stop" and last.stop is not None
        num_cached = min(usage.num_reused, usage.num_prompt)
        message = self.message
        message["stop_reason"] = "stop_sequence" if is_stopped else reasons[last.finish_reason or ""]  # type: ignore[typeddict-item]
        message["stop_sequence"] = last.stop if is_stopped else None
        message["usage"] = {
            "input_tokens": usage.num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage.num_generated,
        }
        message["brigade"] = figures_of(last)
        assert message["stop_reason"] is not None
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]},
            "usage": message["usage"],
            "brigade": message["brigade"],
        }
        yield {"type": "message_stop"}


class MessageAnswer:
    """The answer to one request of `/v1/messages`."""

    def __init__(self, body: MessagesBody, model: str, request_id: str) -> None:
        self._body = body
        self._model = model
        self._request_id = request_id

    async def prepare(self, engine: Engine) -> Sequence[EngineRequest]:
        with renaming(_NAMES):
            request = await engine.prepare(self._body.ask())
        self._builder = MessageBuilder(f"msg_{uuid.uuid4().hex}", self._model, len(request.prompt))
        return [request]

    def events(self, index: int, output: Output) -> Iterator[bytes]:
        return map(named, self._builder.events(output))

    def end(self) -> Iterator[bytes]:
        return iter(())

    def failed(self, error: HttpError) -> bytes:
        return named(error.to_anthropic(self._request_id))

    def whole(self, outputs: Sequence[Sequence[Output]]) -> AnthropicMessage:
        for output in outputs[0]:
            for _ in self._builder.events(output):
                pass
        return self._builder.message


async def messages(request: Request) -> Response:
    """Answer a conversation as Anthropic's API does."""
    server: Server = request.app.state.server
    body = await read_body(request, MessagesBody, server.limits.body_bytes)
    server.require_name(body.model)
    return await respond(request, MessageAnswer(body, server.names[0], request.state.request_id), stream=body.stream)


async def count_tokens(request: Request) -> Response:
    """Told while the model is still being loaded as well, and of prompts that are too long."""
    server: Server = request.app.state.server
    body = await read_body(request, CountBody, server.limits.body_bytes)
    server.require_name(body.model)
    with renaming(_NAMES):
        prompt = await unless_left(request, server.inputs.prompt_ids(body.conversation()))
    count: TokenCount = {"input_tokens": len(prompt)}
    return JSONResponse(count)
