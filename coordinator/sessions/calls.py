"""Tool calls as they are written: their names and arguments, before the calls end. Pure.

mlx-lm's parsers read whole calls only. Where the arguments of a format are JSON, its text is passed on as it comes. In
other formats the calls so far are closed and parsed from time to time: all but the last argument are final then, and
so is the beginning of the last one if it is text.
"""

import ast
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.sessions.output import ToolCall
from worker.platform.text import to_json

# What tool parsers raise, the last two for values that are nested too deeply.
_UNPARSABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError)
Parse = Callable[[str, Any], Any]

# By format: what stands between the calls before, or the beginning, and the next call's JSON arguments.
_IN_JSON = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'
_HEADS = {
    "json_tools": re.compile(rf"\s*{_IN_JSON}"),
    "mistral": re.compile(rf"[\s\[\]}},]*{_IN_JSON}|[^{{]*?(?P<other>[\w-]+)\s*\[ARGS\]\s*(?=\{{)"),
    "kimi_k2": re.compile(
        r"[^{]*?(?P<id>(?:functions\.)?(?P<name>[^<>\s]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
    ),
}
_MOST_HEAD = 512  # characters
_ESCAPED = re.compile(r"\\.")

HAVE_JSON = frozenset(_HEADS)  # the formats of which the arguments are JSON

# By format: what may close the calls so far, first that which closes an open text.
_CLOSINGS = {
    "qwen3_coder": ("</parameter></function>", "</function>"),
    "glm47": ("</arg_value>", ""),
    "laguna": ("</arg_value>", ""),
    "longcat": ("</longcat_arg_value>", ""),
    "minimax_m2": ("</parameter></invoke>", "</invoke>"),
    "minicpm5": ("</param>", ""),
    "muse_spark": ("</atem:parameter>", ""),
    "kimi_k3": ("<|close|>argument<|sep|><|close|>call<|sep|>", "<|close|>call<|sep|>"),
    "pythonic": ('")]', "')]", ")]"),
    "gemma4": ('<|"|>}', "}"),
    "function_gemma": ("<escape>}", "}"),
}
_BEGUN = re.compile(r"<arg_key>|<longcat_arg_key>|[>({]")  # the name of a call has ended
_UNSURE = 40  # characters at the end of an open text that may belong to the marker that closes it
_PLAIN = re.compile(r"\s*[A-Za-z]{3}")  # a long text that begins so is no number, list or object
_STEPS = 64  # parts of a call after each of which it is parsed again


@dataclass
class WrittenCalls:
    """The calls between two markers of an answer, from the first text to the last."""

    format: str
    parse: Parse | None  # None: all text is content
    tools: Sequence[Mapping[str, Any]]
    most_calls: int | None = None  # calls beyond these are dropped
    used_ids: set[str] = field(default_factory=set)  # of calls of the same answer
    text: str = ""
    _streamed: list[ToolCall] = field(default_factory=list)  # of each call that has begun, the pieces returned so far
    _at: int = 0  # of the JSON that is being read, or of the next head
    _scan: "_JsonScan | None" = None
    _next_parse: int = 0  # length of the text

    def push(self, text: str) -> list[ToolCall]:
        """Add text; return the pieces of calls that are certain now: a new id begins a call."""
        self.text += text
        if self.parse is None:
            return []
        if self.format in _HEADS:
            return self._read_json(_HEADS[self.format])
        if self.format in _CLOSINGS and len(self.text) >= self._next_parse:
            self._next_parse = len(self.text) + max(16, len(self.text) // _STEPS)
            return self._read_closed(_CLOSINGS[self.format])
        return []

    def finish(self) -> list[ToolCall] | None:
        """Return the last pieces; None if the text is no call. A call that breaks off keeps what was streamed."""
        calls = self._parsed("")
        if not calls and not self._streamed:
            return None
        pieces = []
        for number, (id, name, arguments) in enumerate(calls[: self.most_calls]):
            whole = arguments if isinstance(arguments, str) else to_json(arguments)
            if number < len(self._streamed) and self.format in _HEADS:
                continue  # its own text was passed on
            pieces += self._stream(number, name, whole, id)
        return pieces

    def _parsed(self, closing: str) -> list[tuple[str, str, Any]]:
        """Return the id, if it has one, the name and the arguments of each call; none if the text cannot be parsed."""
        if self.parse is None:
            return []
        try:
            parsed = self.parse(self.text + closing, self.tools)
            found = parsed if isinstance(parsed, list) else [parsed]
            return [(str(each.get("id") or ""), str(each["name"]), each["arguments"]) for each in found]
        except _UNPARSABLE:
            return []

    def _stream(self, number: int, name: str, arguments: str, id: str = "") -> list[ToolCall]:
        """Return what is new of a call whose arguments begin so."""
        if is_new := number >= len(self._streamed):
            self._streamed.append(ToolCall(self._unused(id), name, ""))
        known = self._streamed[number].arguments
        new = arguments[len(known) :] if arguments.startswith(known) else ""
        return [self._piece(number, new)] if new or is_new else []

    def _unused(self, id: str) -> str:
        """Return the model's id, or a new one if it gives none, or that of another call."""
        if not id or id in self.used_ids:
            id = f"call_{uuid.uuid4().hex[:24]}"
        self.used_ids.add(id)
        return id

    def _piece(self, number: int, text: str) -> ToolCall:
        """Return the next piece of a call, whose arguments go on so."""
        call = self._streamed[number]
        self._streamed[number] = replace(call, arguments=call.arguments + text)
        return replace(call, arguments=text)

    def _read_json(self, head: re.Pattern[str]) -> list[ToolCall]:
        pieces: list[ToolCall] = []
        while True:
            if self._scan is None:
                if self.most_calls is not None and len(self._streamed) >= self.most_calls:
                    return pieces
                found = head.match(self.text, self._at, self._at + _MOST_HEAD)
                if found is None:
                    return pieces
                groups = found.groupdict()
                self._scan, self._at = _JsonScan(), found.end()
                pieces += self._stream(
                    len(self._streamed), groups["name"] or groups["other"], "", groups.get("id") or ""
                )
            length = self._scan.read(self.text, self._at)
            if new := self.text[self._at : self._at + length]:
                pieces.append(self._piece(-1, new))
            self._at += length
            if self._scan.depth:
                return pieces
            self._scan = None

    def _read_closed(self, closings: Sequence[str]) -> list[ToolCall]:
        if not _BEGUN.search(self.text):
            return []
        names = [function.get("name") for function in self._functions()]
        for closing in closings:
            if self.format == "pythonic" and not _is_python(self.text + closing):
                continue  # its parser would guess
            calls = self._parsed(closing)
            if not calls or any(name not in names or not isinstance(given, dict) for _, name, given in calls):
                continue
            pieces = []
            for number, (id, name, arguments) in enumerate(calls[: self.most_calls]):
                is_last = number == len(calls) - 1
                certain = self._begun(name, arguments) if is_last else to_json(arguments)
                pieces += self._stream(number, name, certain, id)
            return pieces
        return []

    def _begun(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the part of the last call's arguments that no further text changes, as JSON."""
        if not arguments:
            return ""
        *_, last = arguments
        final = to_json({key: value for key, value in arguments.items() if key != last})[:-1]
        value, begin = arguments[last], ", " if len(arguments) > 1 else ""
        known = value.rstrip()[:-_UNSURE] if isinstance(value, str) else ""
        if not known or not (_PLAIN.match(known) or self._is_text(name, last)):
            return final
        return f"{final}{begin}{to_json(last)}: {to_json(known)[:-1]}"

    def _is_text(self, name: str, argument: str) -> bool:
        """Return whether the schema of an argument allows nothing but text, and the format respects that."""
        if self.format in ("muse_spark", "minicpm5"):  # which reads any JSON, and sections of CDATA
            return False
        found: Any = next((each.get("parameters") for each in self._functions() if each.get("name") == name), None)
        for key in ("properties", argument):
            found = found.get(key) if isinstance(found, dict) else None
        return isinstance(found, dict) and found.get("type") == "string"

    def _functions(self) -> list[Mapping[str, Any]]:
        found = [tool.get("function") for tool in self.tools]
        return [function for function in found if isinstance(function, dict)]


def _is_python(text: str) -> bool:
    try:
        return bool(ast.parse(text.strip(), mode="eval"))
    except _UNPARSABLE:
        return False


@dataclass
class _JsonScan:
    """Finds the end of an object of JSON in text that comes in pieces."""

    depth: int = 0
    _is_text: bool = False
    _is_escaped: bool = False

    def read(self, text: str, at: int) -> int:
        """Return how many of the characters from index `at` on belong to the object."""
        for place in range(at, len(text)):
            letter = text[place]
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped = letter == "\\"
                self._is_text = letter != '"'
            elif letter == '"':
                self._is_text = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if not self.depth:
                    return place + 1 - at
        return len(text) - at


class JsonCallMachine:
    """mlx-lm's TextStateMachine, but the marker that ends calls ends none inside a string of their JSON."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def make_state(self, initial: str) -> Any:
        """Return a state that begins with this name: (name, the machine's state, how a JSON string goes on)."""
        return initial, self._machine.make_state(initial), ""

    def split(self, state: Any, text: str) -> tuple[Any, list[tuple[str, str]]]:
        """Return the state after a text, and the text's parts by the states that it passed."""
        name, before, string = state
        after, parts = self._machine.split(before, text)
        if len(parts) == 1:
            return (name, after, _string_at_end(string + parts[0][1]) if name == "tool" else ""), parts
        if len(text) > 1:  # find the marker by letters
            parts = [(name, "")]
            for letter in text:
                state, ((name, sure), *others) = self.split(state, letter)
                parts = [*parts[:-1], (name, parts[-1][1] + sure), *others]
            return state, parts
        if (string := _string_at_end(string + parts[0][1])).rstrip("\\") == '"':
            marker = self._machine.flush(before)[1] + text
            return (name, self._machine.make_state(name), string), [(name, marker)]
        return (after[0], after, ""), parts

    def flush(self, state: Any) -> tuple[Any, str, str]:
        """Return (state, the text that was held back, the state's name)."""
        name, before, string = state
        before, rest, _ = self._machine.flush(before)
        return (name, before, string), rest, name


def _string_at_end(text: str) -> str:
    """Return a short text that has to be known of this one to tell whether what follows is in a JSON string.

    That is a quote if a string is open, and a backslash if the next character is escaped. No JSON string has several
    lines, so each line begins outside of any. Where a string is followed by what none is, the quotes of the line tell
    nothing any more, and no string is open.
    """
    rest = _ESCAPED.sub("", text.rpartition("\n")[2])
    _, *parts = rest.split('"')  # strings, and what follows each
    behind = [part.strip() for part in parts[1::2]]
    if any(each and each[0] not in ",:}]" for each in behind):
        return '""!'
    if len(parts) % 2:
        return '"' + "\\" * rest.endswith("\\")
    return '""' if behind and not behind[-1] else ""


def joined_calls(pieces: Sequence[ToolCall]) -> list[ToolCall]:
    """Return whole calls from their pieces."""
    found: dict[str, ToolCall] = {}
    for piece in pieces:
        before = found[piece.id].arguments if piece.id in found else ""
        found[piece.id] = ToolCall(piece.id, piece.name, before + piece.arguments)
    return list(found.values())
