"""What the answers of all APIs share: usage, log-probabilities, and the parts of answers and turns. Pure."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from coordinator.sessions.output import Output, Token, ToolCall
from coordinator.sessions.output import Usage as EngineUsage
from coordinator.sessions.waterfall import make_waterfall

Json = dict[str, Any]
TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes | None]  # also of a part of a character, where the tokenizer knows them
MIN_LOGPROB = -9999.0  # as OpenAI's: JSON has no infinity


class PromptDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Figures(TypedDict):
    """What windows, recoveries and prefixes made of an answer."""

    steps: int
    tokens_per_step: float | None
    recoveries: int
    recovery_s: float
    reused_tokens: int
    waterfall: dict[str, Any] | None


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


def usage_of(last: Output) -> EngineUsage:
    """Return what an answer took, by its last output."""
    assert last.usage is not None, "only the last output of an answer has its usage"
    return last.usage


def openai_usage(lasts: Sequence[Output]) -> Usage:
    """Return OpenAI's `usage` of all choices of one prompt, by their last outputs."""
    usages = [usage_of(last) for last in lasts]
    num_prompt, num_generated = usages[0].num_prompt, sum(usage.num_generated for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": min(usages[0].num_reused, num_prompt)},
    }


def figures_of(last: Output) -> Figures:
    """Return our own block of an answer; with a waterfall if the request was traced."""
    usage = usage_of(last)
    waterfall = make_waterfall(usage.legs, usage.started, last.at) if usage.legs else None
    return {
        "steps": usage.num_steps,
        "tokens_per_step": round(usage.num_generated / usage.num_steps, 2) if usage.num_steps else None,
        "recoveries": usage.num_recoveries,
        "recovery_s": round(usage.still_s, 3),
        "reused_tokens": usage.num_reused,
        "waterfall": {"wall_ms": waterfall.wall_ms, **waterfall.parts} if waterfall else None,
    }


def all_figures(lasts: Sequence[Output]) -> Figures | list[Figures]:
    """Return the figures of all choices; a list if there are several."""
    figures = [figures_of(last) for last in lasts]
    return figures[0] if len(figures) == 1 else figures


def token_logprob(token: Token, text_of: TokenText, bytes_of: TokenBytes) -> TokenLogprob:
    """Return OpenAI's entry of one token, with its alternatives."""

    def entry(token: int, logprob: float) -> TopLogprob:
        spelled = bytes_of(token)
        return {
            "token": text_of(token),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": None if spelled is None else list(spelled),
        }

    others = [entry(other.token, other.logprob) for other in token.alternatives]
    return {**entry(token.token, token.logprob), "top_logprobs": others}


@dataclass(frozen=True)
class Text:
    """A piece of the text of an answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of the reasoning of an answer."""

    text: str


Part = Text | Thought | ToolCall


class Parts:
    """Divides one answer into texts, thoughts and calls. White space between thoughts and calls is dropped."""

    def __init__(self) -> None:
        self._run: type[Part] | None = None  # the kind of the latest part
        self._has_begun = False  # the run has a visible character
        self._held = ""  # white space that the run began with
        self._has_called = False

    def push(self, output: Output) -> list[Part]:
        """Return the parts that the next output adds."""
        parts: list[Part] = [*self._add(Thought, output.reasoning), *self._add(Text, output.content)]
        for call in output.tool_calls:
            parts.append(call)
            self._run, self._held, self._has_called = ToolCall, "", True
        if output.finish_reason is not None and self._run is Text and self._held and not self._has_called:
            parts.append(Text(self._held))  # white space is the whole answer
        return parts

    def _add(self, kind: type[Text] | type[Thought], text: str) -> list[Part]:
        if not text:
            return []
        if self._run is not kind:
            self._run, self._has_begun, self._held = kind, False, ""
        whole = self._held + text
        if not self._has_begun and whole.isspace():
            self._held = whole
            return []
        self._has_begun, self._held = True, ""
        return [kind(whole)]


class TemplateFunction(TypedDict):
    name: str
    arguments: Any


class TemplateCall(TypedDict):
    id: str
    type: Literal["function"]
    function: TemplateFunction


class TemplateMessage(TypedDict):
    """A message as chat templates take it."""

    role: str
    content: str
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[TemplateCall]]


@dataclass(frozen=True)
class TurnPart:
    """A piece of a turn: a text, a thought, a call, or, of the role `tool`, the result of a call."""

    role: str
    text: str | None = None
    thought: str | None = None
    call: ToolCall | None = None
    call_id: str = ""  # of the call that this is the result of


def template_messages(parts: Iterable[TurnPart]) -> tuple[TemplateMessage, ...]:
    """Join the parts of a role in a row, since many templates want the roles to alternate. Results stay apart."""
    messages: list[TemplateMessage] = []
    for role, group in groupby(parts, key=lambda part: part.role):
        turn = list(group)
        if role == "tool":
            messages += [{"role": role, "tool_call_id": part.call_id, "content": part.text or ""} for part in turn]
            continue
        texts = [part.text for part in turn if part.text is not None]
        message: TemplateMessage = {"role": role, "content": "\n".join(texts)}
        if thoughts := [part.thought for part in turn if part.thought is not None]:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls := [part.call for part in turn if part.call is not None]:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": parse_arguments(call.arguments)},
                }
                for call in calls
            ]
        messages.append(message)
    return tuple(messages)


def parse_arguments(arguments: str) -> Any:
    """Return a call's arguments as templates take them, an object; unchanged if they are no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """Return a tool as chat templates take it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def one_if_text(make: Callable[[str], Json]) -> Callable[[Any], Any]:
    """Return a validator for fields where one text stands for a list of one object."""
    return lambda value: [make(value)] if isinstance(value, str) else value
