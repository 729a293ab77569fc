"""Open Responses: the types of an answer and of its events."""

from typing import Any, Literal, NotRequired

from pydantic import RootModel
from typing_extensions import TypedDict

from coordinator.api.answers import AnswerStats
from coordinator.api.errors import ErrorBody

Json = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[Json]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


ResponsePart = OutputText | ReasoningText


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(TypedDict):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Json]
    content: list[ReasoningText]


class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


ResponseItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(TypedDict):
    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class Incomplete(TypedDict):
    reason: Literal["max_output_tokens"]


class EchoedTool(TypedDict):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: Json | None
    strict: bool


class EchoedFormat(TypedDict):
    """The format of the text; a `json_schema` has its name and schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    schema: NotRequired[Json]


class EchoedChoice(TypedDict):
    """The tool that had to be called."""

    type: Literal["function"]
    name: str


class EchoedText(TypedDict):
    format: EchoedFormat


class EchoedReasoning(TypedDict):
    effort: str | None
    summary: None


class ResponseObject(TypedDict):
    """The answer, with the settings that were used and its usage."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    tools: list[EchoedTool]
    tool_choice: Literal["auto", "none", "required"] | EchoedChoice
    parallel_tool_calls: bool
    text: EchoedText
    reasoning: EchoedReasoning
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    metadata: dict[str, str]
    previous_response_id: None
    truncation: Literal["disabled"]
    top_logprobs: int
    max_tool_calls: None
    store: Literal[False]
    background: Literal[False]
    service_tier: Literal["default"]
    safety_identifier: None
    prompt_cache_key: None
    brigade: NotRequired[AnswerStats]


class _Event(TypedDict):
    sequence_number: int


class ResponseChanged(_Event):
    """The response so far."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed",
    ]  # fmt: skip
    response: ResponseObject


class ItemChanged(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: ResponseItem


class _OfItem(_Event):
    output_index: int
    item_id: str


class _OfPart(_OfItem):
    content_index: int


class PartChanged(_OfPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: ResponsePart


class TextDelta(_OfPart):
    """More text of an answer or, without `logprobs`, of its reasoning."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    delta: str
    logprobs: NotRequired[list[Json]]


class TextDone(_OfPart):
    """A whole text of an answer or, without `logprobs`, of its reasoning."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    text: str
    logprobs: NotRequired[list[Json]]


class ArgumentsDelta(_OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_OfItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


class FailureEvent(_Event):
    """An error, which `response.failed` follows; `error` is OpenAI's error object."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None
    error: ErrorBody


class ResponseEvent(
    RootModel[
        ResponseChanged | ItemChanged | PartChanged | TextDelta | TextDone | ArgumentsDelta | ArgumentsDone
        | FailureEvent
    ]
):  # fmt: skip
    """An event of a streamed response."""
