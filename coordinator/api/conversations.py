"""Conversations of the three APIs as chat templates take them, by one definition of what they have in common.

What a model cannot read, such as an image, stays in an agent's history for good: a note takes its place.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from coordinator.api.body import Sampled, Section, shown, text_or_list
from coordinator.api.left_out import leave_out
from worker.errors import InputError, again
from worker.platform.text import Json

_TEXT = ("text", "input_text", "output_text", "summary_text")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")


class Part(Section):
    """A part of a message: `text`, `refusal`, thoughts, or anything else, for which a note is put in its place."""

    model_config = ConfigDict(extra="allow")
    type: str

    @model_validator(mode="after")
    def _has_its_text(self) -> Self:
        name = "text" if self.type in _TEXT else self.type
        if name in ("text", "refusal") and not isinstance(found := getattr(self, name, None), str):
            raise ValueError(f"expected a text as its {name}, found {'none' if found is None else shown(found)}")
        return self


Parts = Annotated[
    list[Part], text_or_list(lambda text: {"type": "text", "text": text}, json_schema_input_type=str | list[Part])
]


class Reasoning(Section):
    """Whether and how hard to reason."""

    effort: str | None = None  # "none": not at all
    enabled: bool | None = None


class Thinking(Section):
    """Whether to reason first. A budget is ignored; where the model may decide, the template does."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]


class Conversing(Sampled):
    """The fields that the bodies of all conversations share: clients of each API send the switches of the others."""

    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Json = Field(default_factory=dict)

    def template_arguments(self, effort: str | None = None) -> Json:
        """Return the template's arguments; `effort` is what the API's own field says."""
        reasoning = self.reasoning or Reasoning()
        effort = effort or self.reasoning_effort or reasoning.effort
        switch = reasoning.enabled if self.enable_thinking is None else self.enable_thinking
        if self.thinking and self.thinking.type in ("enabled", "disabled"):
            switch = self.thinking.type == "enabled"
        if effort == "none":
            effort, switch = None, bool(switch)
        arguments = {"enable_thinking": switch, "reasoning_effort": effort}
        return {name: value for name, value in arguments.items() if value is not None} | self.chat_template_kwargs


# --- parts of messages ------------------------------------------------------------------------------------------------


def text_of(parts: Iterable[Part]) -> str:
    """Return the text of a message's parts."""
    found = (_text_in(part.model_dump()) for part in parts)
    return "\n".join(text for text in found if text is not None)


def thoughts_of(parts: Iterable[Part]) -> str:
    """Return the thoughts among a message's parts."""
    thoughts = (part.model_dump() for part in parts if part.type in _THOUGHTS)
    given = (thought.get("thinking", thought.get("text")) for thought in thoughts)
    return "\n".join(text for text in given if isinstance(text, str))


def _text_in(part: Json) -> str | None:
    """Return the text of a part; None for thoughts, which are no part of the text."""
    match part:
        case {"type": kind, "text": str(text)} if kind in _TEXT:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": kind} if kind in _THOUGHTS:
            return None
    name = leave_out(part["type"].removeprefix("input_").removesuffix("_url"))
    return f"[{name} left out: this model reads text only]"


def join_turns(parts: Iterable[Json]) -> tuple[Json, ...]:
    """Return messages as chat templates take them, from parts of messages in order.

    Adjacent parts of a role are joined, since many templates require alternating roles. Tool results stay separate.
    """
    messages: list[Json] = []
    for part in parts:
        if not messages or part["role"] != messages[-1]["role"] or part["role"] == "tool":
            messages.append(dict(part))
            continue
        last = messages[-1]
        for name, value in part.items():
            if name not in last:
                last[name] = value
            elif name != "role":
                last[name] += f"\n{value}" if isinstance(value, str) else value
    return tuple({"content": "", **message} for message in messages)


# --- tools and their calls --------------------------------------------------------------------------------------------


ToolName = Annotated[str, Field(min_length=1)]


class OtherTool(Section):
    """A tool that this server cannot offer to the model, since no schema describes it: it is left out."""

    type: str


def tool_type(tool: Any) -> str:
    """Return the tag of a tool of OpenAI's APIs: that of functions, or the one of all others."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "function" if kind == "function" else "other"


class OfferedTool(Section):
    """A tool that the client runs."""

    names: ClassVar[Mapping[str, str]] = {}  # of fields of a template's tool, what the API calls them

    def to_template(self) -> Json:
        """Return the tool as chat templates take it."""
        raise NotImplementedError


def offered(tools: Sequence[OfferedTool | OtherTool]) -> tuple[Json, ...]:
    """Return the tools that the model can be offered as chat templates take them, and note the others.

    Raises:
        InputError: two have the same name.
    """
    found = dict[str, Json]()
    for number, tool in enumerate(tools):
        if not isinstance(tool, OfferedTool):
            leave_out(f"tools.{tool.type}")
            continue
        each = tool.to_template()
        if (name := each["function"]["name"]) in found:
            field = "function.name"
            place = f"tools.{number}.{tool.names.get(field, field)}"
            raise InputError(place, f"expected a name that no other tool has, found {shown(name)} again; rename one")
        found[name] = each
    return tuple(found.values())


@contextmanager
def naming_tools(tools: Sequence[OfferedTool | OtherTool]) -> Iterator[None]:
    """Raise InputErrors of this block about `tools.N.FIELD`, of those offered, by their place and name in the body."""
    try:
        yield
    except InputError as error:
        name, _, place = error.field.partition(".")
        number, _, field = place.partition(".")
        if name != "tools" or not number:
            raise
        at, tool = [(at, tool) for at, tool in enumerate(tools) if isinstance(tool, OfferedTool)][int(number)]
        renamed = again(error)
        renamed.field = f"tools.{at}.{tool.names.get(field, field)}"
        raise renamed from error


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """Return a tool as chat templates take it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def call_part(id: str, name: str, arguments: Any) -> Json:
    """Return the part of a message that calls a tool. `arguments` are an object."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}


def parse_arguments(arguments: str) -> Json:
    """Return a call's arguments as the object that templates iterate over.

    Blank text has no arguments. Anything else that is no object, which a model may have generated, is one argument.
    """
    if not arguments.strip():
        return {}
    try:
        found = json.loads(arguments)
    except ValueError:
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}
