"""Turns: conversations that come in pieces, as chat templates take them. Pure."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from coordinator.resident.channels import ToolCall

Json = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """A piece of a turn: a text, a thought, a call, or, of the role `tool`, what a call has given."""

    role: str
    text: str | None = None
    thought: str | None = None
    call: ToolCall | None = None
    call_id: str = ""  # of the call that this is the result of


def as_messages(pieces: Iterable[Said]) -> tuple[Json, ...]:
    """One message of what a role says in a row: many templates want the roles to alternate. Results stay apart."""
    messages: list[Json] = []
    for role, said in groupby(pieces, key=lambda piece: piece.role):
        if role == "tool":
            messages += [{"role": role, "tool_call_id": each.call_id, "content": each.text or ""} for each in said]
        else:
            messages.append(_message(role, list(said)))
    return tuple(messages)


def _message(role: str, said: Sequence[Said]) -> Json:
    message: Json = {"role": role, "content": "\n".join(each.text for each in said if each.text is not None)}
    if thoughts := [each.thought for each in said if each.thought is not None]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [each.call for each in said if each.call is not None]:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": parsed(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def parsed(arguments: str) -> Any:
    """A call's arguments, which templates take as an object; as they stand if they are no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def function_tool(name: str, description: str | None, parameters: Json | None) -> Json:
    """A tool as chat templates take it."""
    said = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in said.items() if value is not None}}


def one_if_text(make: Callable[[str], Json]) -> Callable[[Any], Any]:
    """For fields where one text stands for a list of one object."""
    return lambda value: [make(value)] if isinstance(value, str) else value
