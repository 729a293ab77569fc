"""Conversations for chat templates that lack something: tools, system messages, roles in any order. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from worker.platform.text import to_json

# The generic format of calls, as mlx-lm's parser `json_tools` reads it.
CALL_FORMAT, CALL_BEGINS, CALL_ENDS = "json_tools", "<tool_call>", "</tool_call>"
_TOOLS = """You can call these functions. Each line describes one; "parameters" is the JSON schema of its arguments.
{tools}
To call a function, end your answer with
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>
To call several, write this several times. The next message has the results. If you need no function, answer in text."""

Messages = Sequence[Mapping[str, Any]]


def with_calls_as_text(messages: Messages, tools: Messages) -> list[Mapping[str, Any]]:
    """Return the conversation in the generic format of calls, for templates that know no tools.

    Tools are described in the system prompt; calls are text of the assistant, and their results text of the user.
    """
    turns = [_with_text(message) for message in messages]
    if tools:
        systems = [turn["content"] for turn in takewhile(lambda turn: turn.get("role") == "system", turns)]
        described = _TOOLS.format(tools="\n".join(to_json(tool["function"]) for tool in tools))
        turns[: len(systems)] = [{"role": "system", "content": "\n\n".join((*systems, described))}]
    return turns


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not (calls := message.get("tool_calls")):
        return message
    named = ({name: call["function"].get(name) for name in ("name", "arguments")} for call in calls)
    written = (f"{CALL_BEGINS}\n{to_json(call)}\n{CALL_ENDS}" for call in named)
    turn = {name: value for name, value in message.items() if name != "tool_calls"}
    return turn | {"content": "\n".join(filter(None, (message["content"], *written)))}


def plainer(messages: Messages) -> Iterator[list[Mapping[str, Any]]]:
    """Yield what to try with a template that refuses the conversation, each asking less of it than the one before.

    Agents tell the model of changes by system messages in the middle, and send several turns of the user in a row.
    """
    turns: list[Mapping[str, Any]] = []
    for message in messages:
        is_late = any(turn.get("role") != "system" for turn in turns)
        _append(turns, {**message, "role": "user"} if is_late and message.get("role") == "system" else message)
    if turns != [*messages]:
        yield turns
    if turns and turns[0].get("role") == "system":
        first: list[Mapping[str, Any]] = [{**turns[0], "role": "user"}]
        for turn in turns[1:]:
            _append(first, turn)
        yield first


def _append(turns: list[Mapping[str, Any]], message: Mapping[str, Any]) -> None:
    """Append a message, to the last one's text if both are of the system or of the user."""
    if turns and message.get("role") == turns[-1].get("role") and message.get("role") in ("system", "user"):
        last = turns.pop()
        message = {**last, "content": f"{last['content']}\n{message['content']}"}
    turns.append(message)
