"""Anthropic's answers as types: what `/openapi.json` promises of them. They are built elsewhere, plainly. Pure."""

from typing import Any, Literal

from pydantic import RootModel

from coordinator.shapes.openai_objects import Figures, Told

StopReason = Literal["end_turn", "stop_sequence", "max_tokens", "tool_use"]
ErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
    "rate_limit_error", "overloaded_error", "api_error",
]  # fmt: skip


class TextTold(Told):
    type: Literal["text"]
    text: str


class ThinkingTold(Told):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseTold(Told):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockTold = TextTold | ThinkingTold | ToolUseTold


class MessageUsage(Told):
    """Input tokens are those that were in no cache. A stream's beginning does not know of any cache yet."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnthropicMessage(Told):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockTold]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    brigade: Figures | None = None


class AnthropicErrorBody(Told):
    type: ErrorType
    message: str


class AnthropicError(Told):
    """Before an answer or, as an event, in the middle of one."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str | None


class MessageStart(Told):
    type: Literal["message_start"]
    message: AnthropicMessage


class Ping(Told):
    type: Literal["ping"]


class BlockStart(Told):
    type: Literal["content_block_start"]
    index: int
    content_block: BlockTold


class TextDelta(Told):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Told):
    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(Told):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Told):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Told):
    type: Literal["content_block_stop"]
    index: int


class Stop(Told):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Told):
    type: Literal["message_delta"]
    delta: Stop
    usage: MessageUsage
    brigade: Figures


class MessageStop(Told):
    type: Literal["message_stop"]


class MessageEvent(
    RootModel[MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError]
):
    """An event of a streamed message."""


class TokenCount(Told):
    input_tokens: int
