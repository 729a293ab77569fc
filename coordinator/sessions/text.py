"""The text of answers: detokenisation, stop strings, and the split into content, reasoning and tool calls. Pure."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.sessions.calls import HAVE_JSON, JsonCallMachine, WrittenCalls
from coordinator.sessions.output import KnownTokens, Output, ToolCall
from coordinator.sessions.request import AUTO_CALLS, Calls
from worker.errors import ModelError


@dataclass(frozen=True)
class Markers:
    """How an answer's text marks thoughts and tool calls, according to mlx-lm."""

    machine: Any  # mlx_lm.generate.TextStateMachine
    begins_in: str  # the state of `machine` in which the answer begins
    call_begins: str = ""
    call_ends: str = ""
    parse: Callable[[str, Any], Any] | None = None
    format: str = ""  # of calls: the name of mlx-lm's parser
    thought_begins: str = ""
    thought_ends: str = ""


class TextParser:
    """Turns one answer's tokens into text, without partial characters and without any part of a stop string."""

    def __init__(
        self,
        detokenizer: Any = None,
        stops: Sequence[str] = (),
        markers: Markers | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        calls: Calls = AUTO_CALLS,
        *,
        min_tokens: int = 0,
        token_bytes: Callable[[int], bytes | None] = lambda token: None,
    ) -> None:
        """
        Args:
            detokenizer: mlx-lm's; without one the text consists of the token ids, separated by commas.
            stops: end the answer where they stand outside of calls; where a call is forced they end nothing.
            markers: how thoughts and calls are marked; without them all text is content.
            tools: the tools that may be called; without them marked calls count as content.
            calls: calls after the first one are kept if they are parallel; forced ones leave no content.
            min_tokens: tokens in which no stop string begins, as in vLLM.
            token_bytes: the bytes of a token, if they are known.
        """
        self.text = ""
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._stop = StopText(stops) if stops and not calls.are_forced else None
        self._min_tokens = min_tokens
        self._token_bytes = token_bytes
        if markers and markers.format in HAVE_JSON:
            markers = replace(markers, machine=JsonCallMachine(markers.machine))
        self._markers = markers
        self._tools = [dict(tool) for tool in tools]
        self._asked = calls
        self._state: Any = markers.machine.make_state(markers.begins_in) if markers else None
        self._searched: Any = self._state  # at the end of the text in which stop strings were looked for
        self._unsure = ""  # behind it: may begin a marker
        self._calls: WrittenCalls | None = None  # those that have not ended
        self._call_ids = set[str]()
        self._has_called = False

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the text, if any."""
        return self._stop.found if self._stop else None

    def recall(self, known: KnownTokens, eos: Collection[int] = ()) -> None:
        """Process the tokens of a journal, whose text an earlier process has shown."""
        self.read(Output("", known.tokens, 0, known.finish_reason), eos)

    def read(self, output: Output, eos: Collection[int] = ()) -> None:
        """Set the output's text, and cut the output after a stop string. Tokens of `eos` have no text.

        Raises:
            ModelError: the tokenizer has no text for a token.
        """
        texts, tokens = [], []
        for token in output.tokens:
            tokens.append(token)
            texts.append("" if token.token in eos else self.push(token.token))
            if self.stopped_by is not None:
                break  # drop the tokens after the stop string
        if self.stopped_by is not None or output.finish_reason is not None:
            texts.append(self.finish())  # the text that was held back may complete a stop string
            output.fills = ()
        if self.stopped_by is not None:
            output.finish_reason, output.stop = "stop", self.stopped_by
        output.tokens, output.text = tokens, "".join(texts)
        self.split(output, texts)

    def push(self, token: int) -> str:
        """Add a token; return the text that is final now. Raises ModelError if the tokenizer has no text for it."""
        self.num_tokens += 1
        if self._detokenizer is None:
            return self._emit(f",{token}" if self.num_tokens > 1 else str(token))
        try:
            self._detokenizer.add_token(token)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"the model's tokenizer has no text for token {token} ({error!r})") from error
        return self._emit(self._before_stop(self._detokenizer.last_segment))

    def finish(self) -> str:
        """Return the text that was held back, at the end of the tokens."""
        if self._detokenizer is None:
            return ""
        self._detokenizer.finalize()
        rest = self._detokenizer.last_segment
        if count := _num_replaced(rest):  # drop an incomplete character, but not one that is U+FFFD
            latest = self._detokenizer.tokens[-4 * count - 4 :]  # and what is before, to begin at no part of one
            spelled = b"".join(self._token_bytes(token) or b"" for token in latest)
            known = getincrementaldecoder("utf-8")("replace").decode(spelled)
            rest = rest[:-count] + "\ufffd" * min(count, _num_replaced(known))
        return self._emit(self._before_stop(rest, is_last=True))

    def _before_stop(self, text: str, *, is_last: bool = False) -> str:
        """Add text; return what is certainly before a stop string. Once `is_last`, nothing is held back."""
        if self._stop is None:
            return text
        if self._stop.found is not None:
            return ""
        found = ""
        for is_call, piece in self._regions(text, is_last=is_last):
            if is_call:
                found += self._stop.flush() + piece
            else:
                found += self._stop.push(piece) if is_last or self.num_tokens > self._min_tokens else piece
            if self._stop.found is not None:
                break
        return found + (self._stop.flush() if is_last else "")

    def _regions(self, text: str, *, is_last: bool) -> Iterator[tuple[bool, str]]:
        """Yield pieces of text, each with whether it belongs to a call; hold back what may be a marker."""
        if self._markers is None or not self._tools:
            yield False, text
            return
        for letter in text:
            state, self._unsure = self._searched[0], self._unsure + letter
            self._searched, [(_, sure), *after] = self._markers.machine.split(self._searched, letter)
            yield state == "tool", sure
            self._unsure = self._unsure[len(sure) :]
            if after:  # a marker is complete
                yield "tool" in (state, self._searched[0]), self._unsure
                self._unsure = ""
        if is_last:
            yield self._searched[0] == "tool", self._unsure

    def _emit(self, text: str) -> str:
        self.text += text
        return text

    def split(self, output: Output, texts: Sequence[str] = ()) -> None:
        """Split the output's text into content, reasoning and tool calls, and count the tokens of reasoning.

        Args:
            texts: of its tokens, and what follows them.
        """
        if self._markers is None:
            output.content = output.text
            return
        machine, is_last = self._markers.machine, output.finish_reason is not None
        segments = list[tuple[str, str]]()
        for number, text in enumerate(texts or [output.text]):
            output.num_reasoning += number < len(output.tokens) and self._state[0] == "reasoning"
            self._state, found = machine.split(self._state, text)
            segments += found
        if is_last:
            self._state, rest, state = machine.flush(self._state)
            segments.append((state, rest))
        content, reasoning, calls = "", "", list[ToolCall]()
        for state, text in segments:
            if state != "tool" and self._calls is not None:
                rest, ended = self._end_calls(self._markers, is_whole=True)
                content, calls = content + rest, calls + ended
            if state == "tool":
                calls += self._read_calls(self._markers, text)
            elif state == "reasoning":
                reasoning += text
            else:
                content += text
        if is_last and self._calls is not None:
            rest, ended = self._end_calls(self._markers, is_whole=not self._markers.call_ends)
            content, calls = content + rest, calls + ended
        if self._asked.are_forced:
            content = ""  # blanks between calls, or a marker or a call that breaks off
        output.content, output.reasoning, output.tool_calls = content, reasoning, tuple(calls)
        if output.finish_reason == "stop" and self._has_called:
            output.finish_reason = "tool_calls"

    def _read_calls(self, markers: Markers, text: str) -> list[ToolCall]:
        """Add text between the markers of calls; return the pieces of calls that are certain."""
        if self._calls is None:
            most = None if self._asked.is_parallel else int(not self._has_called)
            can_read = bool(self._tools) and markers.parse is not None
            parse = markers.parse if can_read else None
            self._calls = WrittenCalls(markers.format, parse, self._tools, most, self._call_ids)
        found = self._calls.push(text)
        self._has_called = self._has_called or bool(found)
        return found

    def _end_calls(self, markers: Markers, *, is_whole: bool) -> tuple[str, list[ToolCall]]:
        """Return (content, last pieces of calls); the content is the text itself if it cannot be parsed as calls."""
        assert self._calls is not None
        written, self._calls = self._calls, None
        found = written.finish()
        if found is None:
            return f"{markers.call_begins}{written.text}{markers.call_ends if is_whole else ''}", []
        self._has_called = True
        return "", found


class StopText:
    """Finds stop strings in a stream of text, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, piece: str) -> str:
        """Add text; return what is certainly not part of a stop string. After a match nothing is returned."""
        if self.found is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.found = min(found)  # the first to end, so the result does not depend on the pieces
            self._held = ""
            return text[:at]
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _num_replaced(text: str) -> int:
    """Return how many U+FFFD end a text."""
    return len(text) - len(text.rstrip("\ufffd"))


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
