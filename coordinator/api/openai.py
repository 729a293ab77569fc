"""`POST /v1/chat/completions`: OpenAI's chat completions."""

import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NotRequired, cast

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from coordinator.api.answers import (
    Figures,
    TokenBytes,
    TokenLogprob,
    TokenText,
    Usage,
    all_figures,
    openai_usage,
    parse_arguments,
    token_logprob,
)
from coordinator.api.body import UNSUPPORTED, Sampled, Section, StreamOptions, Texts, Unsupported, read_body
from coordinator.api.errors import HttpError
from coordinator.api.server import Server
from coordinator.api.sse import DONE, data, respond
from coordinator.engine.engine import Engine, prepare_choices
from coordinator.engine.grammars import json_grammar, lark_grammar, regex_grammar
from coordinator.sessions.output import Output, ToolCall
from coordinator.sessions.request import Calls, Conversation, RequestSpec
from coordinator.sessions.request import Request as EngineRequest
from worker.errors import InputError

Json = dict[str, Any]
Finish = Literal["stop", "length", "tool_calls"]

_UNSUPPORTED: Unsupported = UNSUPPORTED | {
    "audio": (),
    "best_of": (1,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}


class Message(Section):
    """One turn. Parts of text are joined; parts of any other type are refused."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def to_template(self) -> Json:
        """Return the message as chat templates take it. Raises InputError for parts that are no text."""
        message = self.model_dump(exclude_none=True)
        message["role"] = "system" if self.role == "developer" else self.role  # which no template knows
        if (reasoning := message.pop("reasoning", None)) is not None:
            message.setdefault("reasoning_content", reasoning)
        if isinstance(self.content, list):
            message["content"] = _joined(self.content)
        elif self.content is None:
            message["content"] = ""
        for call in message.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = parse_arguments(function["arguments"])
        return message


def _joined(parts: Iterable[Json]) -> str:
    texts = []
    for part in parts:
        if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise InputError("messages", f"expected parts of type text, found {part.get('type')!r}: only text is read")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatBody(Sampled):
    """What may be asked."""

    unsupported: ClassVar[Unsupported] = _UNSUPPORTED
    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Texts | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=128)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    reasoning_effort: str | None = None  # which some templates know
    chat_template_kwargs: Json = Field(default_factory=dict)
    brigade: Json = Field(default_factory=dict)  # {"waterfall": true, "fills": true}

    def ask(self) -> RequestSpec:
        """Raises InputError for messages, tools and choices that cannot be served."""
        for tool in self.tools or ():
            if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
                raise InputError("tools", f"expected tools of type function, found {tool.get('type')!r}")
        chosen = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "logprobs": 1 + (self.top_logprobs or 0) if self.logprobs else 0,
        }
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        messages = tuple(message.to_template() for message in self.messages)
        tools = () if self.tool_choice == "none" else tuple(self.tools or ())
        return self.asking(
            Conversation(messages, tools, effort | self.chat_template_kwargs),
            sampling=chosen,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stops=tuple(self.stop or ()),
            grammar=grammar_of(self.response_format),
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
        raise InputError("tool_choice", 'expected "auto", "none", "required" or a function by its name')


def grammar_of(response_format: Json | None) -> str | None:
    """Return the grammar of a `response_format`: OpenAI's types, and `regex` and `grammar` (Lark) by those keys."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return json_grammar()
    if kind == "json_schema":
        holder = response_format.get("json_schema", {})
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise InputError("response_format", "expected json_schema.schema, an object, found none")
        return json_grammar(schema)
    makers = {"regex": regex_grammar, "grammar": lark_grammar}
    if kind not in makers or not isinstance(response_format.get(kind), str):
        expected = "text, json_object, json_schema, regex or grammar (with a text of that name)"
        raise InputError("response_format", f"expected the type {expected}, found {kind!r}")
    return makers[kind](response_format[kind])


class Ahead(TypedDict):
    """Tokens that a window has decided ahead of the text: position and text of each."""

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


class CallDelta(Call):
    index: int


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]  # under both names that clients look for
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    brigade: Figures | list[Figures]


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallDelta]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(TypedDict):
    """An event of a stream; `usage` and `brigade` come with the last one, if they are asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage]
    brigade: NotRequired[Figures | list[Figures] | Ahead]


class OpenAIAnswer:
    """What chats and completions have in common."""

    def __init__(self, model: str, prefix: str) -> None:
        """`model` is the name that the answer carries, `prefix` the beginning of its id."""
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.model = model
        self.created = int(time.time())  # seconds since 1970
        self.token_text: TokenText = str
        self.token_bytes: TokenBytes = lambda token: None
        self.lasts: dict[int, Output] = {}  # of each choice that has ended
        self.begun: set[int] = set()  # choices whose first output has come

    def failed(self, error: HttpError) -> bytes:
        return data(error.to_openai())


class ChatAnswer(OpenAIAnswer):
    """The answer to one request of chat completions."""

    def __init__(self, body: ChatBody, model: str) -> None:
        super().__init__(model, "chatcmpl")
        self._body = body
        self._num_calls: Counter[int] = Counter()

    async def prepare(self, engine: Engine) -> Sequence[EngineRequest]:
        self.token_text, self.token_bytes = engine.inputs.token_text, engine.inputs.token_bytes
        return await prepare_choices(engine, self._body.ask(), self._body.n)

    def events(self, index: int, output: Output) -> Iterator[bytes]:
        if index not in self.begun:
            self.begun.add(index)
            yield data(self._chunk(index, {"role": "assistant", "content": ""}))
        delta: ChatDelta = {"content": output.content} if output.content else {}
        if output.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = output.reasoning
        if output.tool_calls:
            first = self._num_calls[index]
            self._num_calls[index] += len(output.tool_calls)
            delta["tool_calls"] = [{"index": first + n, **_call(call)} for n, call in enumerate(output.tool_calls)]
        has_tokens = self._body.logprobs and output.tokens
        if delta or output.finish_reason or has_tokens or self._wants_fills(output):
            is_empty = not (delta or output.finish_reason or has_tokens)
            logprobs = None if is_empty else self._logprobs([output])
            chunk = self._chunk(index, delta, logprobs, output.finish_reason)
            if self._wants_fills(output):
                chunk["brigade"] = {"fills": [(at, self.token_text(token.token)) for at, token in output.fills]}
            yield data(chunk)
        if output.finish_reason is not None:
            self.lasts[index] = output

    def end(self) -> Iterator[bytes]:
        if self._body.stream_options.include_usage:
            lasts = [self.lasts[index] for index in range(len(self.lasts))]
            chunk: ChatCompletionChunk = {
                "id": self.id,
                "object": "chat.completion.chunk",
                "created": self.created,
                "model": self.model,
                "choices": [],
                "usage": openai_usage(lasts),
                "brigade": all_figures(lasts),
            }
            yield data(chunk)
        yield DONE

    def whole(self, outputs: Sequence[Sequence[Output]]) -> ChatCompletion:
        lasts = [choice[-1] for choice in outputs]
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(outputs)],
            "usage": openai_usage(lasts),
            "brigade": all_figures(lasts),
        }

    def _choice(self, index: int, outputs: Sequence[Output]) -> ChatChoice:
        calls = [_call(call) for output in outputs for call in output.tool_calls]
        content = "".join(output.content for output in outputs)
        message: ChatMessage = {"role": "assistant", "content": None if calls and not content else content}
        if reasoning := "".join(output.reasoning for output in outputs):
            message["reasoning"] = message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(outputs),
            "finish_reason": cast(Finish, outputs[-1].finish_reason),
        }

    def _chunk(
        self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, reason: str | None = None
    ) -> ChatCompletionChunk:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [
                {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": cast(Finish | None, reason)}
            ],
        }

    def _wants_fills(self, output: Output) -> bool:
        return bool(output.fills) and bool(self._body.brigade.get("fills"))

    def _logprobs(self, outputs: Iterable[Output]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        tokens = [token for output in outputs for token in output.tokens]
        content = [token_logprob(token, self.token_text, self.token_bytes) for token in tokens]
        return {"content": content, "refusal": None}


def _call(call: ToolCall) -> Call:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, at once or as a stream of events."""
    server: Server = request.app.state.server
    body = await read_body(request, ChatBody, server.limits.body_bytes)
    server.require_name(body.model)
    answer = ChatAnswer(body, server.names[0])
    return await respond(request, answer, stream=body.stream, traced=bool(body.brigade.get("waterfall")))
