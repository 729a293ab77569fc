"""Open Responses' answers as types: what `/openapi.json` promises of them. They are built elsewhere, plainly. Pure."""

from typing import Any, Literal

from pydantic import Field, RootModel

from coordinator.shapes.openai_objects import ErrorBody, Figures, Told

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Json = dict[str, Any]


class OutputText(Told):
    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[Json]


class ReasoningText(Told):
    type: Literal["reasoning_text"]
    text: str


PartTold = OutputText | ReasoningText


class MessageTold(Told):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningTold(Told):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Json]
    content: list[ReasoningText]


class FunctionCallTold(Told):
    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


ItemTold = MessageTold | ReasoningTold | FunctionCallTold


class InputDetails(Told):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Told):
    reasoning_tokens: int


class ResponseUsage(Told):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(Told):
    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class Incomplete(Told):
    reason: Literal["max_output_tokens"]


class EchoedTool(Told):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: Json | None
    strict: bool


class EchoedFormat(Told):
    """Name and schema are those of a `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema_: Json = Field({}, alias="schema")


class EchoedChoice(Told):
    """The tool that had to be called."""

    type: Literal["function"]
    name: str


class EchoedText(Told):
    format: EchoedFormat


class EchoedReasoning(Told):
    effort: str | None
    summary: None


class Response(Told):
    """What is said, what held for it, and what it took."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    model: str
    output: list[ItemTold]
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
    brigade: Figures | None = None


class ResponseStep(Told):
    """The response as far as it is told."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed",
    ]  # fmt: skip
    sequence_number: int
    response: Response


class ItemStep(Told):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: ItemTold


class _OfItem(Told):
    sequence_number: int
    output_index: int
    item_id: str


class PartStep(_OfItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: PartTold


class TextStep(_OfItem):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[Json]


class TextDone(_OfItem):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[Json]


class ReasoningStep(_OfItem):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(_OfItem):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsStep(_OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_OfItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


class FailureStep(Told):
    """Before `response.failed`; `error` says the same as OpenAI's error object."""

    type: Literal["error"]
    sequence_number: int
    code: str | None
    message: str
    param: str | None
    error: ErrorBody


class ResponseEvent(
    RootModel[
        ResponseStep | ItemStep | PartStep | TextStep | TextDone | ReasoningStep | ReasoningDone | ArgumentsStep
        | ArgumentsDone | FailureStep
    ]
):  # fmt: skip
    """An event of a streamed response."""
