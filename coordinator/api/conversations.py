"""Conversations of the three APIs as chat templates take them, by one definition of what they have in common.

What a model cannot read, such as an image, stays in an agent's history for good: a note takes its place.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from coordinator.api.body import MOST_SHOWN, Sampled, Section
from coordinator.api.left_out import leave_out
from worker.errors import InputError
from worker.platform.text import Json

_TEXT = ("text", "input_text", "output_text", "summary_text")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")


class Part(Section):
    """A part of a message: `text`, `refusal`, thoughts, or anything else, for which a note is put in its place."""

    model_config = ConfigDict(extra="allow")
    type: str


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


def text_of(parts: Iterable[Json], field: str) -> str:
    """Return the text of a message's parts. Raises InputError, with the field's name, for what is no part."""
    found = (_text_in(part, field) for part in parts)
    return "\n".join(text for text in found if text is not None)


def thoughts_of(parts: Iterable[Json]) -> str:
    """Return the thoughts among a message's parts."""
    given = (part.get("thinking", part.get("text")) for part in parts if part.get("type") in _THOUGHTS)
    return "\n".join(text for text in given if isinstance(text, str))


def _text_in(part: Json, field: str) -> str | None:
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
        case {"type": str(kind)} if kind not in (*_TEXT, "refusal"):
            name = leave_out(kind.removeprefix("input_").removesuffix("_url"))
            return f"[{name} left out: this model reads text only]"
    raise InputError(field, f"expected parts with a type and its content, found {json.dumps(part)[:MOST_SHOWN]}")


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


def leave_out_tool(kind: Any) -> None:
    """Note that a tool of this type is not offered to the model."""
    leave_out(f"tools.{kind if isinstance(kind, str) else 'unknown'}")


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
