"""`POST /v1/responses`: Open Responses. Nothing is stored."""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired, get_args, get_origin

from pydantic import Discriminator, Field, RootModel, Tag
from typing_extensions import TypedDict

from coordinator.api.answers import AnswerStats, Block, BlockAnswer, OneOf, answer_stats, usage_of
from coordinator.api.body import (
    OPENAI_ONLY,
    UNSUPPORTED,
    Limit,
    ModelName,
    Section,
    Unsupported,
    described,
    text_or_list,
)
from coordinator.api.conversations import (
    Conversing,
    OfferedTool,
    OtherTool,
    Parts,
    ToolName,
    call_part,
    function_tool,
    join_turns,
    naming_tools,
    offered,
    parse_arguments,
    text_of,
    thoughts_of,
    tool_type,
)
from coordinator.api.errors import ErrorBody, HttpError
from coordinator.api.left_out import leave_out
from coordinator.api.server import Server
from coordinator.api.sse import DONE, Event
from coordinator.engine.grammars import json_grammar
from coordinator.engine.inputs import InputProcessor, renaming
from coordinator.sessions.output import Output
from coordinator.sessions.request import Calls, Conversation, Request, RequestSpec
from protos.brigade_pb2 import Sampling
from worker.errors import InputError
from worker.platform.text import Json

_NAMES = {"response_format": "text.format", "prompt": "input", "max_tokens": "max_output_tokens"}
_NOTHING_STORED = "expected none: this server stores nothing; send the whole conversation as input"
_WHERE_LOGPROBS = "/v1/chat/completions and /v1/completions return log-probabilities"
_NO_LOGPROBS = f"expected none of message.output_text.logprobs: {_WHERE_LOGPROBS}"
_REASONS = {
    "previous_response_id": _NOTHING_STORED,
    "conversation": _NOTHING_STORED,
    "prompt": _NOTHING_STORED,
    "background": "expected false: this server answers at once",
    "top_logprobs": f"expected 0: {_WHERE_LOGPROBS}",
}


class ReasoningPart(Section):
    text: str


class MessageItem(Section):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class CallItem(Section):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CustomCallItem(Section):
    """A call of a tool that takes plain text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CallOutputItem(Section):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts


class ReasoningItem(Section):
    """Reasoning. What another server has encrypted is ignored: only that server can read it."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: list[ReasoningPart] = Field(default_factory=list)


class OtherItem(Section):
    """What another server has done, such as a search of the web: the conversation goes on without it."""

    type: str


_TAGS = {"custom_tool_call_output": "function_call_output", "item_reference": None}  # a reference: nothing is stored
_KNOWN = ("message", "function_call", "function_call_output", "custom_tool_call", "reasoning")


def _type_of(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    if not isinstance(kind, str):
        return None
    tag = _TAGS.get(kind, kind)
    return tag if tag is None or tag in _KNOWN else "other"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(
        _type_of,
        custom_error_type="unsupported_item",
        custom_error_message="expected an item with a type, and no reference: this server stores nothing",
    ),
]
Items = Annotated[list[Item], text_or_list(lambda text: {"role": "user", "content": text})]


class FunctionTool(OfferedTool):
    """A tool that the client runs. This server has none of its own."""

    names: ClassVar = {"function.name": "name", "function.parameters": "parameters"}
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Json | None = None

    def to_template(self) -> Json:
        return function_tool(self.name, self.description, self.parameters)


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(tool_type)
]


class ForcedTool(Section):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class Format(Section):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, exclude=True)

    def grammar(self) -> str | None:
        """Return the grammar of the answer. Raises InputError for a schema that cannot be enforced."""
        if self.type == "json_schema":
            if self.schema_ is None:
                raise InputError("text.format.schema", "expected an object, found none")
            return json_grammar(self.schema_, is_strict=self.strict is True)
        return json_grammar() if self.type == "json_object" else None


class TextConfig(Section):
    format: Format = Format()


class ResponsesBody(Conversing):
    """The body of `/v1/responses`."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | OPENAI_ONLY | dict.fromkeys(_REASONS, (False, "", [], {}))
    reasons: ClassVar = _REASONS
    model: ModelName | None = None
    input: Items = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: Limit = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | ForcedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    stream: bool = False
    presence_penalty: float | None = described("presence_penalty")
    presence_context_size: int | None = described("presence_context_size")
    frequency_penalty: float | None = described("frequency_penalty")
    frequency_context_size: int | None = described("frequency_context_size")
    metadata: dict[str, str] | None = None
    include: list[str] | None = None

    def to_spec(self) -> RequestSpec:
        """Return the engine's request. Raises InputError for what is not supported and would change the answer."""
        if "message.output_text.logprobs" in (self.include or ()):
            raise InputError("include", _NO_LOGPROBS)
        return self.make_spec(
            self._conversation(),
            max_tokens=self.max_output_tokens,
            grammar=self.text.format.grammar(),
            calls=self._calls(),
        )

    def _calls(self) -> Calls:
        only = self.tool_choice.name if isinstance(self.tool_choice, ForcedTool) else None
        are_forced = only is not None or self.tool_choice == "required"
        return Calls(are_forced, only, self.parallel_tool_calls is not False)

    def response(self, id: str, model: str, created: int, sampling: Sampling) -> Json:
        """Return a ResponseObject in progress, with the settings that are used. `created` is seconds since 1970."""
        choice = self.tool_choice
        return {
            **_FIXED,
            "id": id,
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
            "tools": [tool.model_dump() | {"strict": False} for tool in self.tools if isinstance(tool, FunctionTool)],
            "tool_choice": choice.model_dump() if isinstance(choice, ForcedTool) else choice or "auto",
            "parallel_tool_calls": self._calls().is_parallel,
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "metadata": self.metadata or {},
            "top_logprobs": 0,
        }

    def _conversation(self) -> Conversation:
        tools = offered(self.tools)
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        parts = [*instructions, *(part for item in self.input for part in _parts_of(item))]
        return Conversation(join_turns(parts), () if self.tool_choice == "none" else tools, self.template_arguments())


def _parts_of(
    item: MessageItem | CallItem | CustomCallItem | CallOutputItem | ReasoningItem | OtherItem,
) -> Iterator[Json]:
    """Yield an item as parts of a template's messages."""
    match item:
        case MessageItem():
            role = "system" if item.role == "developer" else item.role  # templates do not know developers
            thoughts = thoughts_of(item.content)
            yield {"role": role, "content": text_of(item.content)} | (
                {"reasoning_content": thoughts} if thoughts else {}
            )
        case CallItem():
            yield call_part(item.call_id, item.name, parse_arguments(item.arguments))
        case CustomCallItem():
            yield call_part(item.call_id, item.name, {"input": item.input})
        case CallOutputItem():
            yield {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
        case ReasoningItem():
            for thought in item.content or item.summary:
                yield {"role": "assistant", "reasoning_content": thought.text}
        case OtherItem():
            leave_out(f"input.{item.type}")


_PARTS = OneOf(
    "Part",
    {"output_text": {"text": str, "annotations": list[Json], "logprobs": list[Json]}, "reasoning_text": {"text": str}},
)
_ITEMS = OneOf(
    "Output",
    {
        "message": {"role": Literal["assistant"], "content": list[Annotated[Json, _PARTS]]},
        "reasoning": {"summary": list[Json], "content": list[Annotated[Json, _PARTS]]},
        "function_call": {"call_id": str, "name": str, "arguments": str},
    },
    id=str,
    status=Literal["in_progress", "completed", "incomplete"],
)


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


class ToolOfResponse(FunctionTool):
    """A tool of the request. What of its schema cannot be enforced is left out."""

    strict: Literal[False] = False


class ReasoningOfResponse(TypedDict):
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
    output: list[Annotated[Json, _ITEMS]]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    tools: list[ToolOfResponse]
    tool_choice: Literal["auto", "none", "required"] | ForcedTool
    parallel_tool_calls: bool
    text: TextConfig
    reasoning: ReasoningOfResponse
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


_FIXED = {  # the fields of a response that have one value: nothing is stored, and some settings are not supported
    name: next(iter(get_args(kind)), None)
    for name, kind in ResponseObject.__annotations__.items()
    if kind is type(None) or (get_origin(kind) is Literal and len(get_args(kind)) == 1)
}
_RESPONSE = {"response": ResponseObject}
_ITEM = {"output_index": int, "item": Annotated[Json, _ITEMS]}
_IN_ITEM = {"output_index": int, "item_id": str}
_IN_PART = _IN_ITEM | {"content_index": int}
_EVENTS = OneOf(
    "Event",
    {
        "response.created": _RESPONSE,
        "response.in_progress": _RESPONSE,
        "response.completed": _RESPONSE,
        "response.incomplete": _RESPONSE,
        "response.failed": _RESPONSE,
        "response.output_item.added": _ITEM,
        "response.output_item.done": _ITEM,
        "response.content_part.added": _IN_PART | {"part": Annotated[Json, _PARTS]},
        "response.content_part.done": _IN_PART | {"part": Annotated[Json, _PARTS]},
        "response.output_text.delta": _IN_PART | {"delta": str, "logprobs": list[Json]},
        "response.output_text.done": _IN_PART | {"text": str, "logprobs": list[Json]},
        "response.reasoning_text.delta": _IN_PART | {"delta": str},
        "response.reasoning_text.done": _IN_PART | {"text": str},
        "response.function_call_arguments.delta": _IN_ITEM | {"delta": str},
        "response.function_call_arguments.done": _IN_ITEM | {"arguments": str},
        "error": {"code": str | None, "message": str, "param": str | None, "error": ErrorBody},
    },
    sequence_number=int,
)


class ResponseEvent(RootModel[Annotated[Json, _EVENTS]]):
    """An event of a streamed response."""


# By the kind of a block: the type of its item, the prefix of the item's id, and the name of its text in events.
_KINDS = {
    "text": ("message", "msg", "output_text"),
    "reasoning": ("reasoning", "rs", "reasoning_text"),
    "call": ("function_call", "fc", "function_call_arguments"),
}


class ResponsesAnswer(BlockAnswer):
    """The answer to one request of `/v1/responses`."""

    answer: Json

    def __init__(self, body: ResponsesBody, model: str) -> None:
        super().__init__()
        self.is_stream = body.stream
        self._body = body
        self._num_events = 0
        self._num_reasoning = 0  # tokens
        self.answer = body.response(f"resp_{uuid.uuid4().hex}", model, int(time.time()), Sampling())

    async def prepare(self, inputs: InputProcessor) -> Sequence[Request]:
        with renaming(_NAMES):
            spec = self._body.to_spec()
            with naming_tools(self._body.tools):
                request = await inputs.make_request(spec)
        about = self.answer
        self.answer = self._body.response(about["id"], about["model"], about["created_at"], request.sampling)
        return [request]

    def events(self, index: int, output: Output) -> Iterator[Event]:
        self._num_reasoning += output.num_reasoning
        return super().events(index, output)

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=self.answer)
        yield self._event("response.in_progress", response=self.answer)

    def open_block(self, block: Block) -> Iterator[Event]:
        yield self._event("response.output_item.added", output_index=block.index, item=_item(block, "in_progress"))
        if block.kind != "call":
            yield self._part_event(block, "response.content_part.added", part=_part(block))

    def extend_block(self, block: Block, text: str) -> Event:
        return self._text_event(block, "delta", delta=text)

    def close_block(self, block: Block, *, is_whole: bool) -> Iterator[Event]:
        if block.kind == "call":
            yield self._text_event(block, "done", arguments=block.text)
        else:
            yield self._text_event(block, "done", text=block.text)
            yield self._part_event(block, "response.content_part.done", part=_part(block))
        item = _item(block, "completed" if is_whole else "incomplete")
        yield self._event("response.output_item.done", output_index=block.index, item=item)
        self.answer = {**self.answer, "output": [*self.answer["output"], item]}

    def finish(self, last: Output) -> Iterator[Event]:
        usage, is_cut = usage_of(last), last.finish_reason == "length"
        took_s = (last.at - usage.started) // 10**9
        self.answer = {
            **self.answer,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else self.answer["created_at"] + took_s,
            "usage": {
                "input_tokens": usage.num_prompt,
                "input_tokens_details": {"cached_tokens": usage.num_reused, "cache_write_tokens": 0},
                "output_tokens": usage.num_generated,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
                "total_tokens": usage.num_prompt + usage.num_generated,
            },
            "brigade": answer_stats(last),
        }
        yield self._event(f"response.{self.answer['status']}", response=self.answer)

    def failed(self, error: HttpError) -> Iterator[Event]:
        yield from self.start()  # official clients refuse the failure of a response that was never created
        yield from self.close(is_whole=False)
        yield self._event("error", code=error.code, message=error.message, param=error.param, **error.to_openai())
        code = "rate_limit_exceeded" if error.code == "rate_limit_exceeded" else "server_error"
        self.answer = {**self.answer, "status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=self.answer)
        yield DONE

    def _text_event(self, block: Block, step: str, **fields: Any) -> Json:
        name = f"response.{_KINDS[block.kind][2]}.{step}"
        if block.kind == "call":
            return self._block_event(block, name, **fields)
        return self._part_event(block, name, **fields, **({"logprobs": []} if block.kind == "text" else {}))

    def _part_event(self, block: Block, kind: str, **fields: Any) -> Json:
        return self._block_event(block, kind, content_index=0, **fields)

    def _block_event(self, block: Block, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=_item_id(block), output_index=block.index, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _item_id(block: Block) -> str:
    return f"{_KINDS[block.kind][1]}_{block.id}"


def _item(block: Block, status: str) -> Json:
    """Return a block as an item of the output, without content while it has none."""
    about = {"type": _KINDS[block.kind][0], "id": _item_id(block), "status": status}
    if block.call:
        return about | {"call_id": block.call.id, "name": block.call.name, "arguments": block.text}
    more: Json = {"role": "assistant"} if block.kind == "text" else {"summary": []}
    return about | more | {"content": [_part(block)] if block.text else []}


def _part(block: Block) -> Json:
    about = {"type": _KINDS[block.kind][2], "text": block.text}
    return about | {"annotations": [], "logprobs": []} if block.kind == "text" else about


async def responses(server: Server, body: ResponsesBody) -> ResponsesAnswer:
    """Answer items of input as Open Responses says."""
    return ResponsesAnswer(body, server.name_for(body.model))
