"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's messages."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import Discriminator, Field, RootModel, Tag
from pydantic_core import from_json
from typing_extensions import TypedDict

from coordinator.api.answers import AnswerStats, Block, BlockAnswer, OneOf, answer_stats, usage_of
from coordinator.api.body import OPENAI_ONLY, UNSUPPORTED, Limit, ModelName, Section, Texts, Unsupported, text_or_list
from coordinator.api.conversations import (
    Conversing,
    OfferedTool,
    OtherTool,
    Part,
    Parts,
    ToolName,
    call_part,
    function_tool,
    join_turns,
    naming_tools,
    offered,
    text_of,
)
from coordinator.api.errors import AnthropicError, HttpError
from coordinator.api.server import Server
from coordinator.api.sse import Event
from coordinator.api.texts import bounded_ids
from coordinator.engine.grammars import json_grammar
from coordinator.engine.inputs import InputProcessor, renaming
from coordinator.sessions.output import Output
from coordinator.sessions.request import Calls, Conversation, Request, RequestSpec
from worker.errors import InputError
from worker.platform.text import Json

StopReason = Literal["end_turn", "stop_sequence", "max_tokens", "tool_use"]

_NAMES = {"prompt": "messages", "response_format": "output_config.format", "stop": "stop_sequences"}
_OneText = text_or_list(lambda text: {"type": "text", "text": text})


class TextBlock(Section):
    type: Literal["text"]
    text: str


class ThinkingBlock(Section):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Section):
    """Encrypted reasoning, which only the server that made it can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Section):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json = Field(default_factory=dict)


TextBlocks = Annotated[list[TextBlock], _OneText]


class ToolResultBlock(Section):
    """The result of a call. `is_error` is ignored: templates have no place for it, and the content tells."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Parts = Field(default_factory=list)


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_type(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return (kind if kind in _BLOCKS else "other") if isinstance(kind, str) else None


InputBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[Part, Tag("other")],
    Discriminator(_block_type),
]
Blocks = Annotated[list[InputBlock], _OneText]


class Turn(Section):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    def parts(self) -> Iterator[Json]:
        """Yield the blocks as parts of a template's messages."""
        for block in self.content:
            match block:
                case TextBlock():
                    yield {"role": self.role, "content": block.text}
                case ThinkingBlock():
                    yield {"role": self.role, "reasoning_content": block.thinking}
                case ToolUseBlock():
                    yield {**call_part(block.id, block.name, block.input), "role": self.role}
                case Part():
                    yield {"role": self.role, "content": text_of([block])}
                case ToolResultBlock():
                    yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}


class CustomTool(OfferedTool):
    """A tool that the client runs. Tools that Anthropic runs have other types."""

    names: ClassVar = {"function.name": "name", "function.parameters": "input_schema"}
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Json

    def to_template(self) -> Json:
        return function_tool(self.name, self.description, self.input_schema)


def _tool_type(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "other"


Tool = Annotated[Annotated[CustomTool, Tag("custom")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_type)]


class ToolChoice(Section):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None  # of the tool that must be called, for the type `tool`
    disable_parallel_tool_use: bool = False

    def calls(self) -> Calls:
        """Return what may be called. Raises InputError for a tool without a name."""
        if self.type == "tool" and self.name is None:
            raise InputError("tool_choice.name", "expected the name of the tool that must be called, found none")
        only = self.name if self.type == "tool" else None
        return Calls(self.type in ("any", "tool"), only, not self.disable_parallel_tool_use)


class OutputFormat(Section):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Section):
    format: OutputFormat | None = None
    effort: str | None = None

    def grammar(self) -> str | None:
        """Return the grammar of the answer. Raises InputError for a schema that cannot be enforced."""
        if self.format is None:
            return None
        return json_grammar(self.format.schema_, is_strict=False, field="output_config.format")


class CountBody(Conversing):
    """The fields that make a prompt: the body of `/v1/messages/count_tokens`."""

    unsupported: ClassVar[Unsupported] = (
        UNSUPPORTED | OPENAI_ONLY | {"frequency_penalty": (0,), "output_format": (), "presence_penalty": (0,)}
    )
    model: ModelName | None = None
    messages: list[Turn] = Field(min_length=1)
    system: TextBlocks = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    output_config: OutputConfig = OutputConfig()

    def conversation(self) -> Conversation:
        """Return the conversation. Raises InputError for tools of the same name."""
        tools = offered(self.tools)
        system = ({"role": "system", "content": block.text} for block in self.system)
        parts = [*system, *(part for turn in self.messages for part in turn.parts())]
        return Conversation(
            join_turns(parts),
            () if self.tool_choice.type == "none" else tools,
            self.template_arguments(self.output_config.effort),
        )


class MessagesBody(CountBody):
    """The body of `/v1/messages`."""

    max_tokens: Limit = None
    stop_sequences: Texts = Field(default_factory=list)
    stream: bool = False

    def to_spec(self) -> RequestSpec:
        """Return the engine's request. Raises InputError as `conversation` does."""
        return self.make_spec(
            self.conversation(),
            max_tokens=self.max_tokens,
            stops=tuple(self.stop_sequences),
            grammar=self.output_config.grammar(),
            calls=self.tool_choice.calls(),
        )


_CONTENTS = OneOf(
    "Content",
    {
        "text": {"text": str},
        "thinking": {"thinking": str, "signature": str},
        "tool_use": {"id": str, "name": str, "input": Json},
    },
)


class MessageUsage(TypedDict):
    """`input_tokens` are those that were in no cache. The first event of a stream has no counts of cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: NotRequired[int]
    cache_read_input_tokens: NotRequired[int]
    output_tokens: int


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[Json, _CONTENTS]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    brigade: NotRequired[AnswerStats]


class Stop(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


_DELTAS = OneOf(
    "", {"text_delta": {"text": str}, "thinking_delta": {"thinking": str}, "input_json_delta": {"partial_json": str}}
)
_EVENTS = OneOf(
    "Event",
    {
        "message_start": {"message": AnthropicMessage},
        "ping": {},
        "content_block_start": {"index": int, "content_block": Annotated[Json, _CONTENTS]},
        "content_block_delta": {"index": int, "delta": Annotated[Json, _DELTAS]},
        "content_block_stop": {"index": int},
        "message_delta": {"delta": Stop, "usage": MessageUsage, "brigade": AnswerStats},
        "message_stop": {},
    },
)


class MessageEvent(RootModel[Annotated[Json, _EVENTS] | AnthropicError]):
    """An event of a streamed message."""


class TokenCount(TypedDict):
    input_tokens: int


class MessageAnswer(BlockAnswer):
    """The answer to one request of `/v1/messages`."""

    answer: AnthropicMessage

    def __init__(self, body: MessagesBody, model: str) -> None:
        super().__init__()
        self.is_stream = body.stream
        self._body = body
        self.answer = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    async def prepare(self, inputs: InputProcessor) -> Sequence[Request]:
        with renaming(_NAMES):
            spec = self._body.to_spec()
            with naming_tools(self._body.tools):
                request = await inputs.make_request(spec)
        self.answer["usage"]["input_tokens"] = len(request.prompt)
        return [request]

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": {**self.answer, "content": []}}
        yield {"type": "ping"}

    def open_block(self, block: Block) -> Iterator[Event]:
        content = _content(block)
        if content["type"] == "tool_use":
            content["input"] = {}
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def extend_block(self, block: Block, text: str) -> Event:
        match block.kind:
            case "text":
                delta = {"type": "text_delta", "text": text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": text}
            case "call":
                is_object = block.text.lstrip().startswith("{")  # or the call came whole, since no format streams it
                delta = {"type": "input_json_delta", "partial_json": text if is_object else "{}"}
        return {"type": "content_block_delta", "index": block.index, "delta": delta}

    def close_block(self, block: Block, *, is_whole: bool) -> Iterator[Event]:
        self.answer["content"].append(_content(block))
        yield {"type": "content_block_stop", "index": block.index}

    def finish(self, last: Output) -> Iterator[Event]:
        usage, is_stopped = usage_of(last), last.finish_reason == "stop" and last.stop is not None
        reasons: dict[str | None, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        stop: Stop = {
            "stop_reason": "stop_sequence" if is_stopped else reasons[last.finish_reason],
            "stop_sequence": last.stop if is_stopped else None,
        }
        counts: MessageUsage = {
            "input_tokens": usage.num_prompt - usage.num_reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_reused,
            "output_tokens": usage.num_generated,
        }
        stats = answer_stats(last)
        self.answer = {**self.answer, **stop, "usage": counts, "brigade": stats}
        yield {"type": "message_delta", "delta": stop, "usage": counts, "brigade": stats}
        yield {"type": "message_stop"}

    def end(self) -> Iterator[Event]:
        return iter(())

    def failed(self, error: HttpError) -> Iterator[AnthropicError]:
        yield error.to_anthropic()


def _content(block: Block) -> Json:
    """Return a block as it stands in the message."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    assert block.call is not None
    try:
        found = from_json(block.text, allow_partial=True)  # of a call that breaks off, as clients read its stream
    except ValueError:  # it has no arguments
        found = {}
    given = found if isinstance(found, dict) else {}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}


async def messages(server: Server, body: MessagesBody) -> MessageAnswer:
    """Answer a conversation as Anthropic's API does."""
    return MessageAnswer(body, server.name_for(body.model))


async def count_tokens(server: Server, body: CountBody) -> TokenCount:
    """Count a prompt's tokens, also while the model is being loaded, and also if the prompt is a little too long."""
    server.name_for(body.model)
    with renaming(_NAMES):
        return {"input_tokens": len(await bounded_ids(server, body.conversation(), "messages"))}
