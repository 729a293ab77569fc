"""Answers as text: detokenisation, stop strings, and what is said, thought and called. Pure."""

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.sessions.output import KnownTokens, Output, ToolCall
from worker.errors import ModelError
from worker.platform.text import to_json

_UNPARSABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError)  # what tool parsers raise


@dataclass(frozen=True)
class Markers:
    """How the text of the answer to one prompt marks its thoughts and its calls, as mlx-lm knows it."""

    machine: Any  # mlx_lm.generate.TextStateMachine
    begins_in: str  # state
    call_begins: str = ""
    call_ends: str = ""
    parse: Callable[[str, Any], Any] | None = None
    format: str = ""  # of calls, by mlx-lm's name of its parser
    thought_begins: str = ""
    thought_ends: str = ""


class TextParser:
    """One answer's text as its tokens come: never half a character, never a part of a stop string."""

    def __init__(
        self,
        detokenizer: Any = None,
        stops: Sequence[str] = (),
        markers: Markers | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        *,
        has_parallel_calls: bool = True,
    ) -> None:
        """
        Args:
            detokenizer: mlx-lm's; without one the ids themselves are the text, with commas between them.
            markers: how thoughts and calls are marked; without them all is content.
            tools: calls are only looked for where there are some.
            has_parallel_calls: whether more than the first call is told.
        """
        self.text = ""
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._stop = StopText(stops) if stops else None
        self._markers = markers
        self._tools = [dict(tool) for tool in tools]
        self._has_parallel_calls = has_parallel_calls
        self._state = markers.machine.make_state(markers.begins_in) if markers else None
        self._call: list[str] | None = None  # the text of a call that has not ended yet, in pieces
        self._has_called = False

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the text, if one has."""
        return self._stop.found if self._stop else None

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    def recall(self, known: KnownTokens, eos: Collection[int] = ()) -> None:
        """Take in the text of tokens that a journal has: their reader got it when they became known."""
        if known.tokens or known.finish_reason is not None:
            self.read(Output("", known.tokens, 0, known.finish_reason), eos)

    def read(self, output: Output, eos: Collection[int] = ()) -> None:
        """Give the output its text, up to where a stop string ends it; tokens of `eos` have none.

        Raises ModelError if another token has none.
        """
        said, tokens = [], []
        for token in output.tokens:
            tokens.append(token)
            if token.token not in eos:
                said.append(self.push(token.token))
            if self.is_stopped:
                break  # the rest of the step lies behind the stop string
        if self.is_stopped or output.finish_reason is not None:
            said.append(self.finish())  # what was held back may be a stop string as well
            output.fills = ()
        if self.is_stopped:
            output.finish_reason, output.stop = "stop", self.stopped_by
        output.tokens, output.text = tokens, "".join(said)
        self.divide(output)

    def push(self, token: int) -> str:
        """Take a token; returns what can be printed now. Raises ModelError if the tokenizer has no text for it."""
        self.num_tokens += 1
        if self._detokenizer is None:
            return self._emit(f",{token}" if self.num_tokens > 1 else str(token))
        try:
            self._detokenizer.add_token(token)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"the model's tokenizer has no text for token {token} ({error!r})") from error
        text = self._detokenizer.last_segment
        return self._emit(self._stop.push(text) if self._stop else text)

    def finish(self) -> str:
        """The text that was held back, once no more tokens come."""
        if self._detokenizer is None:
            return ""
        self._detokenizer.finalize()
        rest = self._detokenizer.last_segment.rstrip("\ufffd")  # the bytes of a character that never became whole
        return self._emit(self._stop.push(rest) + self._stop.flush() if self._stop else rest)

    def _emit(self, text: str) -> str:
        self.text += text
        return text

    def divide(self, output: Output) -> None:
        """Divide the output's text into what is said, what is thought, and what is to be called."""
        if self._markers is None:
            output.content = output.text
            return
        is_last = output.finish_reason is not None
        content, reasoning, calls = "", "", list[ToolCall]()
        for state, text in self._split(self._markers.machine, output.text, is_last=is_last):
            if state != "tool" and self._call is not None:
                said, found = self._end_call(self._markers, is_whole=True)
                content, calls = content + said, calls + found
            if state == "tool":
                self._call = [*(self._call or ()), text]
            elif state == "reasoning":
                reasoning += text
            else:
                content += text
        if is_last and self._call is not None:
            said, found = self._end_call(self._markers, is_whole=not self._markers.call_ends)
            content, calls = content + said, calls + found
        output.content, output.reasoning, output.tool_calls = content, reasoning, tuple(calls)
        if output.finish_reason == "stop" and self._has_called:
            output.finish_reason = "tool_calls"

    def _split(self, machine: Any, text: str, *, is_last: bool) -> list[tuple[str, str]]:
        segments: list[tuple[str, str]]
        self._state, segments = machine.split(self._state, text)
        if is_last:
            self._state, rest, state = machine.flush(self._state)
            segments.append((state, rest))
        return segments

    def _end_call(self, markers: Markers, *, is_whole: bool) -> tuple[str, list[ToolCall]]:
        """What is to be called; as text where nothing may be called, or where it cannot be read."""
        text, self._call = "".join(self._call or ()), None
        said = f"{markers.call_begins}{text}{markers.call_ends if is_whole else ''}"
        if not self._tools or markers.parse is None:
            return said, []
        try:
            parsed = markers.parse(text, self._tools)
            calls = [_as_call(each) for each in (parsed if isinstance(parsed, list) else [parsed])]
        except _UNPARSABLE:
            return said, []
        if not calls:
            return said, []
        told = calls if self._has_parallel_calls else calls[: not self._has_called]
        self._has_called = True
        return "", told


def _as_call(parsed: Mapping[str, Any]) -> ToolCall:
    arguments = parsed["arguments"]
    as_text = arguments if isinstance(arguments, str) else to_json(arguments)
    return ToolCall(str(parsed.get("id") or f"call_{uuid.uuid4().hex[:24]}"), str(parsed["name"]), as_text)


class StopText:
    """Finds stop strings in a stream of text pieces; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    @property
    def matched(self) -> bool:
        return self.found is not None

    def push(self, piece: str) -> str:
        """Take a piece; returns what is certainly not part of a stop string. Nothing comes after a match."""
        if self.matched:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)  # the one that ends first, however the text was cut into pieces
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, now that the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
