"""A conversation: its messages so far, and a message while it is typed line by line. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.errors import InputError
from worker.platform.text import to_json

ConversationTurn = dict[str, str]
QUOTES = '"""'


@dataclass
class Dialogue:
    """The messages of a conversation, with its system prompt."""

    system: str | None = None
    turns: list[ConversationTurn] = field(default_factory=list)

    def messages(self) -> list[ConversationTurn]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the answer to the last question; if it is empty, remove the question."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def to_json(self) -> str:
        return to_json({"messages": self.messages()}, indent=1) + "\n"

    @classmethod
    def of(cls, text: str) -> "Dialogue":
        """Read what `to_json` wrote. Raises InputError for anything else."""
        try:
            messages = [_message(each) for each in json.loads(text)["messages"]]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise InputError("", 'expected {"messages": [{"role": ..., "content": ...}, ...]}') from error
        is_system = bool(messages) and messages[0]["role"] == "system"
        return cls(messages[0]["content"] if is_system else None, messages[is_system:])


def _message(found: Mapping[str, Any]) -> ConversationTurn:
    role, content = found["role"], found["content"]
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise ValueError
    return {"role": role, "content": content}


class Typed:
    """The lines of a message that is being typed: several after a backslash or between quotes."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._is_quoted = False

    @property
    def is_open(self) -> bool:
        """Return whether the message continues with the next line."""
        return bool(self._lines) or self._is_quoted

    def push(self, line: str) -> str | None:
        """Take the next line. Return the message if it is complete."""
        if not self.is_open and line.startswith(QUOTES):
            self._is_quoted, line = True, line.removeprefix(QUOTES)
            if line.endswith(QUOTES):
                return self._end(line.removesuffix(QUOTES))
            self._lines = [line] if line else []
            return None
        if self._is_quoted:
            is_last, line = line.rstrip().endswith(QUOTES), line.rstrip().removesuffix(QUOTES)
        else:
            is_last, line = not line.endswith("\\"), line.removesuffix("\\")
        if is_last:
            return self._end(line)
        self._lines.append(line)
        return None

    def flush(self) -> str | None:
        """Return an incomplete message, if there is one."""
        return self._end("") if self.is_open else None

    def drop(self) -> None:
        """Discard the lines so far."""
        self._lines, self._is_quoted = [], False

    def _end(self, line: str) -> str:
        text = "\n".join([*self._lines, line]).strip("\n")
        self.drop()
        return text
