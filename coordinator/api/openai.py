"""`POST /v1/chat/completions`, and what OpenAI's chats and completions have in common."""

import time
import uuid
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypedDict

from coordinator.api.answers import AnswerStats, answer_stats, usage_of
from coordinator.api.body import UNSUPPORTED, Limit, ModelName, OpenAISampled, Section, Unsupported, shown
from coordinator.api.conversations import (
    Conversing,
    OfferedTool,
    OtherTool,
    Parts,
    ToolName,
    naming_tools,
    offered,
    parse_arguments,
    text_of,
    thoughts_of,
    tool_type,
)
from coordinator.api.server import Server
from coordinator.api.sse import DONE, ApiAnswer, Event
from coordinator.engine.grammars import json_grammar, lark_grammar, regex_grammar
from coordinator.engine.inputs import InputProcessor, prepare_choices, renaming
from coordinator.sessions.calls import joined_calls
from coordinator.sessions.output import Output, Token, ToolCall
from coordinator.sessions.request import Calls, Conversation, Prompt, Request, RequestSpec
from worker.errors import InputError
from worker.platform.text import Json

Finish = Literal["stop", "length", "tool_calls"]
MAX_CHOICES = 128  # of one request


class StreamOptions(Section):
    """Options of the end of a stream."""

    include_usage: bool = False


class OpenAIBody(OpenAISampled):
    """The fields that chats and completions share."""

    model: ModelName | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    response_format: Json | None = None
    brigade: Json = Field(default_factory=dict)  # {"waterfall": true}; in chats also {"fills": true}

    def make_spec(self, prompt: Prompt, *, logprobs: int = 0, **more: Any) -> RequestSpec:
        grammar = make_grammar(self.response_format)
        return super().make_spec(prompt, logprobs=logprobs, grammar=grammar, **more)


def make_grammar(response_format: Json | None) -> str | None:
    """Return the grammar of a `response_format`: OpenAI's types, and `regex` and `grammar` (Lark) by those keys."""
    found = {"type": "text"} if response_format is None else response_format
    match found.get("type"):
        case "text":
            return None
        case "json_object":
            return json_grammar()
        case "json_schema":
            holder: Any = found.get("json_schema", {})
            schema = holder.get("schema") if isinstance(holder, dict) else None
            if not isinstance(schema, dict):
                wrong = "none" if schema is None else shown(schema)
                raise InputError("response_format", f"expected json_schema.schema, an object, found {wrong}")
            return json_grammar(schema, is_strict=holder.get("strict") is True)
        case "regex" if isinstance(found.get("regex"), str):
            return regex_grammar(found["regex"])
        case "grammar" if isinstance(found.get("grammar"), str):
            return lark_grammar(found["grammar"])
    expected = "text, json_object, json_schema, regex or grammar (with a text of that name)"
    raise InputError("response_format", f"expected the type {expected}, found {found.get('type')!r}")


class Message(Section):
    """One turn. Texts are joined; a note takes the place of a part that is no text."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Parts | None = None
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None
    function_call: Json | None = None  # the older form of one call
    reasoning: str | None = None
    reasoning_content: str | None = None

    def to_template(self) -> Json:
        """Return the message as chat templates take it. Raises InputError for a call without a function."""
        message = self.model_dump(exclude_none=True, exclude={"reasoning", "content", "tool_calls", "function_call"})
        # What templates do not know: developers, and the results of older calls.
        message["role"] = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        parts = self.content or []
        message["content"] = text_of(parts)
        if reasoning := self.reasoning_content or self.reasoning or thoughts_of(parts):
            message["reasoning_content"] = reasoning
        older = [] if self.function_call is None else [{"type": "function", "function": self.function_call}]
        if calls := self.tool_calls or older:
            message["tool_calls"] = [_past_call(call) for call in calls]
        return message


def _past_call(call: Json) -> Json:
    """Return a call of an earlier turn as chat templates take it."""
    if isinstance(custom := call.get("custom"), dict):
        called = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
        return {"id": call.get("id"), "type": "function", "function": called}
    function = call.get("function")
    if not isinstance(function, dict):
        raise InputError("messages", f"expected tool_calls with a function, found {call.get('type')!r}")
    given = function.get("arguments")
    arguments = given if isinstance(given, dict) else parse_arguments(given if isinstance(given, str) else "")
    return call | {"function": function | {"arguments": arguments}}


class ChatFunction(Section):
    """A function. Templates may read further fields of it."""

    model_config = ConfigDict(extra="allow")
    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ChatTool(OfferedTool):
    """A tool that the client runs."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: ChatFunction

    def to_template(self) -> Json:
        return self.model_dump(exclude_unset=True)


Tool = Annotated[Annotated[ChatTool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(tool_type)]


class ChatBody(OpenAIBody, Conversing):
    """The body of `/v1/chat/completions`."""

    unsupported: ClassVar[Unsupported] = UNSUPPORTED | {
        "audio": (),
        "best_of": (1,),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "web_search_options": (),
    }
    messages: list[Message] = Field(min_length=1)
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None

    def to_spec(self) -> RequestSpec:
        """Return the engine's request. Raises InputError for messages, tools and choices that cannot be served."""
        messages = tuple(message.to_template() for message in self.messages)
        tools = offered(self.tools)
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs", "expected with logprobs: true, whose likeliest tokens these are")
        return self.make_spec(
            Conversation(messages, () if self.tool_choice == "none" else tools, self.template_arguments()),
            logprobs=1 + (self.top_logprobs or 0) if self.logprobs else 0,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            calls=self._calls(),
        )

    def _calls(self) -> Calls:
        is_parallel = self.parallel_tool_calls is not False
        match self.tool_choice:
            case None | "auto" | "none":
                return Calls(is_parallel=is_parallel)
            case "required":
                return Calls(are_forced=True, is_parallel=is_parallel)
            case {"type": "function", "function": {"name": str(name)}}:
                return Calls(are_forced=True, only=name)
        expected = 'expected "auto", "none", "required" or a function by its name'
        raise InputError("tool_choice", f"{expected}, found {shown(self.tool_choice)}")


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None  # also of a part of a character, if the tokenizer knows them


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Ahead(TypedDict):
    """Tokens that a window has decided ahead of the text, each with its position and text."""

    fills: list[tuple[int, str]]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class Function(TypedDict):
    name: str
    arguments: str


class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """A piece of a call; the first one has its id, type and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]  # clients look for one name or the other
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class _Choice(TypedDict):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChoice(_Choice):
    message: ChatMessage


class OpenAIObject(TypedDict):
    id: str
    created: int  # seconds since 1970
    model: str


class ChatCompletion(OpenAIObject):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage
    brigade: AnswerStats | list[AnswerStats]


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallDelta]


class ChatChunkChoice(_Choice):
    delta: ChatDelta


class ChatCompletionChunk(OpenAIObject):
    """An event of a stream. The last one has `usage` and `brigade`, if the request wants them."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage]
    brigade: NotRequired[AnswerStats | list[AnswerStats] | Ahead]


class OpenAIAnswer(ApiAnswer):
    """The common part of the answers of chats and completions: an id, choices and their usage."""

    kind: ClassVar[str]  # the `object` of the whole answer
    chunk_kind: ClassVar[str]  # and of an event

    def __init__(self, body: OpenAIBody, model: str, prefix: str) -> None:
        """`model` is the name that the answer carries, `prefix` the beginning of its id."""
        self.is_stream, self.is_traced = body.stream, bool(body.brigade.get("waterfall"))
        self._wants_usage = body.stream_options.include_usage
        self._n = body.n
        self._about = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._lasts: dict[int, Output] = {}  # the last output of each choice that has ended
        self._parts: defaultdict[int, list[Json]] = defaultdict(list)  # of each choice of a whole answer

    @abstractmethod
    def chunks(self, index: int, output: Output) -> Iterator[Json]:
        """Yield the events of the next output of a choice."""

    @abstractmethod
    def join(self, parts: Sequence[Json]) -> Json:
        """Return the whole of a choice, from its parts in all events."""

    def events(self, index: int, output: Output) -> Iterator[Json]:
        yield from self.chunks(index, output)
        if output.finish_reason is not None:
            self._lasts[index] = output

    def chunk(self, **choice: Any) -> Json:
        return {**self._about, "object": self.chunk_kind, "choices": [choice]}

    def end(self) -> Iterator[Event]:
        if self._wants_usage:
            yield {**self._about, "object": self.chunk_kind, "choices": [], **self._usage_and_stats()}
        yield DONE

    def add(self, index: int, output: Output) -> None:
        self._parts[index] += [event["choices"][0] for event in self.events(index, output)]

    def whole(self) -> Json:
        choices = [self.join(parts) for _, parts in sorted(self._parts.items())]
        return {**self._about, "object": self.kind, "choices": choices, **self._usage_and_stats()}

    def _usage_and_stats(self) -> Json:
        """Return the usage of all choices, of which `n` in a row share a prompt, and the stats of each."""
        lasts = [last for _, last in sorted(self._lasts.items())]
        usages = [usage_of(last) for last in lasts]
        firsts = usages[:: self._n]
        num_prompt, num_generated = sum(each.num_prompt for each in firsts), sum(each.num_generated for each in usages)
        usage: CompletionUsage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(each.num_reused for each in firsts)},
        }
        stats = [answer_stats(last) for last in lasts]
        return {"usage": usage, "brigade": stats[0] if len(stats) == 1 else stats}


class ChatAnswer(OpenAIAnswer):
    """The answer to one request of chat completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, model: str) -> None:
        super().__init__(body, model, "chatcmpl")
        self._body = body
        self._calls: dict[int, list[str]] = {}  # by choice, the ids of those that have begun
        self.token_text: Callable[[int], str] = str
        self.token_bytes: Callable[[int], bytes | None] = lambda token: None

    async def prepare(self, inputs: InputProcessor) -> Sequence[Request]:
        self.token_text, self.token_bytes = inputs.token_text, inputs.token_bytes
        spec = self._body.to_spec()
        with renaming({"prompt": "messages"}), naming_tools(self._body.tools):
            return await prepare_choices(inputs, spec, self._body.n)

    def chunks(self, index: int, output: Output) -> Iterator[Json]:
        if index not in self._calls:
            self._calls[index] = []
            begun = {"role": "assistant", "content": ""}
            yield self.chunk(index=index, delta=begun, logprobs=None, finish_reason=None)
        delta: ChatDelta = {"content": output.content} if output.content else {}
        if output.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = output.reasoning
        if output.tool_calls:
            delta["tool_calls"] = [
                self._call_delta(self._calls[index], call) for call in joined_calls(output.tool_calls)
            ]
        has_news = delta or output.finish_reason or (self._body.logprobs and output.tokens)
        fills = output.fills if self._body.brigade.get("fills") else ()
        if has_news or fills:
            logprobs = self._logprobs(output) if has_news else None
            chunk = self.chunk(index=index, delta=delta, logprobs=logprobs, finish_reason=output.finish_reason)
            if fills:
                chunk["brigade"] = {"fills": [(at, self.token_text(token.token)) for at, token in fills]}
            yield chunk

    def join(self, parts: Sequence[Json]) -> Json:
        deltas = [part["delta"] for part in parts]
        calls: list[Json] = []
        for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": "function", "function": {**piece["function"]}})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        content = "".join(delta.get("content", "") for delta in deltas)
        message: Json = {"role": "assistant", "content": None if calls and not content else content}
        if reasoning := "".join(delta.get("reasoning", "") for delta in deltas):
            message["reasoning"] = message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        logprobs = {"content": entries, "refusal": None} if self._body.logprobs else None
        last = parts[-1]
        reason = last["finish_reason"]
        return {"index": last["index"], "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _call_delta(self, known: list[str], piece: ToolCall) -> CallDelta:
        """Return a piece of a call, given the ids of the calls that have begun."""
        if piece.id in known:
            return {"index": known.index(piece.id), "function": {"arguments": piece.arguments}}
        known.append(piece.id)
        function: FunctionDelta = {"name": piece.name, "arguments": piece.arguments}
        return {"index": len(known) - 1, "id": piece.id, "type": "function", "function": function}

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        content: list[TokenLogprob] = [
            {**self._logprob(token), "top_logprobs": [self._logprob(other) for other in token.alternatives]}
            for token in output.tokens
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, token: Token) -> TopLogprob:
        spelled = self.token_bytes(token.token)
        return {
            "token": self.token_text(token.token),
            "logprob": token.logprob,
            "bytes": None if spelled is None else list(spelled),
        }


async def chat_completions(server: Server, body: ChatBody) -> ChatAnswer:
    """Answer a conversation, at once or as a stream of events."""
    return ChatAnswer(body, server.name_for(body.model))
