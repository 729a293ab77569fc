"""OpenAI's chat completions: the body as an Ask, an answer's deltas as an object or as chunks. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from coordinator.resident.ask import Ask, Calls, Conversation
from coordinator.resident.channels import Delta, ToolCall
from coordinator.resident.grammars import json_grammar, lark_grammar, regex_grammar
from coordinator.shapes.answers import TokenBytes, TokenText, logprobs_of, total_usage
from coordinator.shapes.body import UNSUPPORTED, Sampled, Section, StreamOptions, Texts, Unsupported
from coordinator.shapes.turns import parsed
from worker.errors import InputError

Json = dict[str, Any]


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
    """One turn. Parts of text are joined; parts of anything else are refused."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


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

    @model_validator(mode="after")
    def _agree(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs", "expected only with logprobs: true")
        return self

    @property
    def wants_waterfall(self) -> bool:
        return bool(self.brigade.get("waterfall"))

    @property
    def wants_fills(self) -> bool:
        return bool(self.brigade.get("fills"))

    def ask(self) -> Ask:
        """Raises InputError for messages, tools and choices that cannot be served."""
        chosen = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "logprobs": 1 + (self.top_logprobs or 0) if self.logprobs else 0,
        }
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        messages = tuple(as_template_message(message) for message in self.messages)
        return self.asking(
            Conversation(messages, self._tools(), effort | self.chat_template_kwargs),
            sampling=chosen,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stops=tuple(self.stop or ()),
            grammar=grammar_of(self.response_format),
            calls=self._calls(),
        )

    def _tools(self) -> tuple[Json, ...]:
        """What may be called."""
        for tool in self.tools or ():
            if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
                raise InputError("tools", f"expected tools of type function, found {tool.get('type')!r}")
        return () if self.tool_choice == "none" else tuple(self.tools or ())

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
    """What a `response_format` enforces: OpenAI's types, and `regex` and `grammar` (Lark) with a key of that name."""
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


def as_template_message(message: Message) -> Json:
    """A message as chat templates take it. Raises InputError for parts that are no text."""
    said = message.model_dump(exclude_none=True)
    said["role"] = "system" if message.role == "developer" else message.role  # which no template knows
    if (thought := said.pop("reasoning", None)) is not None:
        said.setdefault("reasoning_content", thought)
    if isinstance(message.content, list):
        said["content"] = _joined(message.content)
    elif message.content is None:
        said["content"] = ""
    for call in said.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = parsed(function["arguments"])
    return said


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    texts = []
    for part in parts:
        if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise InputError("messages", f"expected parts of type text, found {part.get('type')!r}: only text is read")
        texts.append(part["text"])
    return "\n".join(texts)


@dataclass(frozen=True)
class ChatAnswer:
    """How one request's answers are told: `opening` and `chunk` in a stream, `whole` at once."""

    id: str
    model: str
    created: int  # seconds since 1970
    token_text: TokenText
    has_logprobs: bool = False
    token_bytes: TokenBytes = lambda token: None

    def opening(self, index: int) -> Json:
        """A stream's first chunk of this choice."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, index: int, delta: Delta, num_calls: int) -> Json | None:
        """What a step added; None where nothing came of it yet. `num_calls` came before in this choice."""
        said: Json = {"content": delta.content} if delta.content else {}
        if delta.reasoning:
            said |= _thought(delta.reasoning)
        if delta.tool_calls:
            said["tool_calls"] = [{"index": num_calls + n, **_call(call)} for n, call in enumerate(delta.tool_calls)]
        if not (said or delta.finish_reason or (self.has_logprobs and delta.piece.tokens)):
            return None
        return self._chunk(index, said, self._logprobs([delta]), delta.finish_reason)

    def filled(self, index: int, delta: Delta, chunk: Json | None) -> Json:
        """This chunk, or an empty one, with the tokens that are decided ahead of the text: [position, text] of each."""
        fills = [[at, self.token_text(token.token)] for at, token in delta.piece.fills]
        return (chunk or self._chunk(index, {}, None, None)) | {"brigade": {"fills": fills}}

    def closing(self, lasts: Sequence[Delta]) -> Json:
        """The chunk that tells the usage, where it is asked for; `lasts` are the last deltas of all choices."""
        return self._about("chat.completion.chunk") | {"choices": [], "usage": total_usage(lasts)}

    def whole(self, choices: Sequence[Sequence[Delta]]) -> Json:
        """All deltas of every choice as one object."""
        about = self._about("chat.completion")
        return about | {
            "choices": [self._choice(index, deltas) for index, deltas in enumerate(choices)],
            "usage": total_usage([deltas[-1] for deltas in choices]),
        }

    def _choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        calls = [call for delta in deltas for call in delta.tool_calls]
        content = "".join(delta.content for delta in deltas)
        message: Json = {"role": "assistant", "content": None if calls and not content else content}
        if thought := "".join(delta.reasoning for delta in deltas):
            message |= _thought(thought)
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        reason = deltas[-1].finish_reason
        return {"index": index, "message": message, "logprobs": self._logprobs(deltas), "finish_reason": reason}

    def _chunk(self, index: int, said: Json, logprobs: Json | None, reason: str | None) -> Json:
        choice = {"index": index, "delta": said, "logprobs": logprobs, "finish_reason": reason}
        return self._about("chat.completion.chunk") | {"choices": [choice]}

    def _logprobs(self, deltas: Iterable[Delta]) -> Json | None:
        if not self.has_logprobs:
            return None
        tokens = [token for delta in deltas for token in delta.piece.tokens]
        return {"content": [logprobs_of(token, self.token_text, self.token_bytes) for token in tokens], "refusal": None}

    def _about(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _thought(text: str) -> Json:
    """Under both names that clients look for."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
