"""Channels: an answer's text taken apart into what is said, what is thought, and what is to be called. Pure."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.sessions.answer import Piece
from coordinator.sessions.markers import Markers
from worker.process.json_text import to_json

_UNPARSABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError)  # what tool parsers raise


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer. `piece` is where it came from."""

    piece: Piece
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None  # "stop", "length" or "tool_calls", with the last one


@dataclass
class _Call:
    """The text of a call that has not ended yet."""

    pieces: list[str] = field(default_factory=list)


class Channels:
    """One answer's. Without markers all is content."""

    def __init__(
        self, markers: Markers | None, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool = True
    ) -> None:
        """Calls are only looked for where there are tools; only the first one is told unless it `is_parallel`."""
        self._markers = markers
        self._tools = [dict(tool) for tool in tools]
        self._is_parallel = is_parallel
        self._state = markers.machine.make_state(markers.begins_in) if markers else None
        self._call: _Call | None = None
        self._has_called = False

    def push(self, piece: Piece) -> Delta:
        """Take the next piece of text."""
        is_last = piece.finish_reason is not None
        content, reasoning, calls = "", "", list[ToolCall]()
        for state, text in self._split(piece.text, is_last=is_last):
            if state != "tool" and self._call is not None:
                said, found = self._end_call(is_whole=True)
                content, calls = content + said, calls + found
            if state == "tool":
                self._call = self._call or _Call()
                self._call.pieces.append(text)
            elif state == "reasoning":
                reasoning += text
            else:
                content += text
        if is_last and self._call is not None:
            said, found = self._end_call(is_whole=not (self._markers and self._markers.call_ends))
            content, calls = content + said, calls + found
        reason = "tool_calls" if piece.finish_reason == "stop" and self._has_called else piece.finish_reason
        return Delta(piece, content, reasoning, tuple(calls), reason)

    def _split(self, text: str, *, is_last: bool) -> list[tuple[str, str]]:
        if self._markers is None:
            return [("normal", text)]
        machine = self._markers.machine
        self._state, segments = machine.split(self._state, text)
        if is_last:
            self._state, rest, state = machine.flush(self._state)
            segments.append((state, rest))
        return segments

    def _end_call(self, *, is_whole: bool) -> tuple[str, list[ToolCall]]:
        """What is to be called; as text where nothing may be called, or where it cannot be read."""
        assert self._markers is not None and self._call is not None
        text = "".join(self._call.pieces)
        self._call = None
        said = f"{self._markers.call_begins}{text}{self._markers.call_ends if is_whole else ''}"
        if not self._tools or self._markers.parse is None:
            return said, []
        try:
            parsed = self._markers.parse(text, self._tools)
            calls = [_as_call(each) for each in (parsed if isinstance(parsed, list) else [parsed])]
        except _UNPARSABLE:
            return said, []
        if not calls:
            return said, []
        told = calls if self._is_parallel else calls[: not self._has_called]
        self._has_called = True
        return "", told


def _as_call(parsed: Mapping[str, Any]) -> ToolCall:
    arguments = parsed["arguments"]
    as_text = arguments if isinstance(arguments, str) else to_json(arguments)
    return ToolCall(str(parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}"), str(parsed["name"]), as_text)
