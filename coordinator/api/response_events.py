"""Open Responses: the types of an answer, and its events made of the engine's outputs. Pure."""

import copy
import uuid
from collections.abc import Iterator
from typing import Any, Literal, NotRequired

from pydantic import RootModel
from typing_extensions import TypedDict

from coordinator.api.answers import Figures, Part, Parts, Text, Thought, figures_of, usage_of
from coordinator.api.errors import ErrorBody
from coordinator.sessions.output import Output, ToolCall

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Json = dict[str, Any]


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
    """Name and schema are those of a `json_schema`."""

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
    """The answer, the settings that held for it, and what it took."""

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
    brigade: NotRequired[Figures]


class ResponseStep(TypedDict):
    """The response so far."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed",
    ]  # fmt: skip
    sequence_number: int
    response: ResponseObject


class ItemStep(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: ResponseItem


class _OfItem(TypedDict):
    sequence_number: int
    output_index: int
    item_id: str


class PartStep(_OfItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: ResponsePart


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


class FailureStep(TypedDict):
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


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of ids


class ResponseBuilder:
    """Makes events of an answer's outputs; everything that they have told so far stands in `response`."""

    def __init__(self, response: ResponseObject) -> None:
        """`response` is in progress and has no output yet."""
        self.response = response
        self._parts = Parts()
        self._items: list[Json] = []  # the same as `response.output`
        self.response["output"] = self._items  # type: ignore[typeddict-item]
        self._num_events = 0
        self._num_reasoning = 0  # tokens

    def events(self, output: Output) -> Iterator[Json]:
        """Yield what the next output adds."""
        yield from self._begin()
        if output.reasoning and not output.content:
            self._num_reasoning += len(output.tokens)
        for part in self._parts.push(output):
            yield from self._add(part)
        if output.finish_reason is not None:
            yield from self._end(output)

    def failed(self, error: ErrorBody) -> Iterator[Json]:
        """Yield the end of a stream that has failed."""
        yield from self._begin()
        yield from self._close("incomplete")
        yield self._event("error", code=error["code"], message=error["message"], param=error["param"], error=error)
        code: Literal["rate_limit_exceeded", "server_error"] = "server_error"
        if error["code"] == "rate_limit_exceeded":
            code = "rate_limit_exceeded"
        self.response["status"] = "failed"
        self.response["error"] = {"code": code, "message": error["message"]}
        yield self._response_event("response.failed")

    def _begin(self) -> Iterator[Json]:
        if not self._num_events:
            yield self._response_event("response.created")
            yield self._response_event("response.in_progress")

    def _add(self, part: Part) -> Iterator[Json]:
        match part:
            case Text(text):
                empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                yield from self._append({"type": "message", "role": "assistant"}, empty, text)
            case Thought(text):
                yield from self._append(
                    {"type": "reasoning", "summary": []}, {"type": "reasoning_text", "text": ""}, text
                )
            case ToolCall():
                call = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": ""}
                yield from self._open(call)
                self._items[-1]["arguments"] = part.arguments
                yield self._item_event("response.function_call_arguments.delta", delta=part.arguments)

    def _append(self, item: Json, empty: Json, text: str) -> Iterator[Json]:
        """Add text to the one part of a message or a reasoning; begin it with `empty` if it is not the last item."""
        last = self._items[-1] if self._items else {}
        if last.get("type") != item["type"] or last["status"] != "in_progress":
            yield from self._open(item | {"content": []})
            self._items[-1]["content"].append(dict(empty))
            yield self._item_event("response.content_part.added", content_index=0, part=empty)
        part = self._items[-1]["content"][0]
        part["text"] += text
        yield self._item_event(f"response.{part['type']}.delta", content_index=0, delta=text, **_logprobs(part))

    def _open(self, item: Json) -> Iterator[Json]:
        yield from self._close("completed")
        added = item | {"id": f"{_PREFIXES[item['type']]}_{uuid.uuid4().hex}", "status": "in_progress"}
        self._items.append(copy.deepcopy(added))
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=added)

    def _close(self, status: str) -> Iterator[Json]:
        """End the last item, if it is in progress."""
        if not (self._items and self._items[-1]["status"] == "in_progress"):
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._item_event("response.function_call_arguments.done", arguments=item["arguments"])
        else:
            [part] = item["content"]
            yield self._item_event(
                f"response.{part['type']}.done", content_index=0, text=part["text"], **_logprobs(part)
            )
            yield self._item_event("response.content_part.done", content_index=0, part=copy.deepcopy(part))
        index = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=index, item=copy.deepcopy(item))

    def _end(self, last: Output) -> Iterator[Json]:
        usage, response, is_cut = usage_of(last), self.response, last.finish_reason == "length"
        yield from self._close("incomplete" if is_cut else "completed")
        response["status"] = "incomplete" if is_cut else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        took_s = (last.at - usage.started) // 10**9
        response["completed_at"] = None if is_cut else response["created_at"] + took_s
        response["usage"] = {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {
                "cached_tokens": min(usage.num_reused, usage.num_prompt),
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_generated,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": usage.num_prompt + usage.num_generated,
        }
        response["brigade"] = figures_of(last)
        yield self._response_event(f"response.{response['status']}")

    def _response_event(self, kind: str) -> Json:
        return self._event(kind, response=copy.deepcopy(self.response))

    def _item_event(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _logprobs(part: Json) -> Json:
    """Return the empty field that events of a text have, and those of a reasoning have not."""
    return {"logprobs": []} if part["type"] == "output_text" else {}
