"""Answers as text: streaming detokenisation, stop strings. Knows nothing of the chain. Pure."""

from collections.abc import Sequence
from typing import Any, Protocol

from worker.errors import ModelError


class Text(Protocol):
    """One answer's text as its tokens come."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended it."""
        ...

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended it, if one has."""
        ...

    def push(self, token: int) -> str:
        """Take a token; returns what can be printed now."""
        ...

    def finish(self) -> str:
        """The text that was held back, once no more tokens come."""
        ...


class TextStream:
    """One answer's text as its tokens come: never half a character, never a part of a stop string."""

    def __init__(self, detokenizer: Any, stop: "StopText") -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self.text = ""
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        return self._stop.matched

    @property
    def stopped_by(self) -> str | None:
        return self._stop.found

    def push(self, token: int) -> str:
        """Take a token; returns what can be printed now. Raises ModelError if the tokenizer has no text for it."""
        self.num_tokens += 1
        try:
            self._detokenizer.add_token(token)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"the model's tokenizer has no text for token {token} ({error!r})") from error
        return self._emit(self._stop.push(self._detokenizer.last_segment))

    def finish(self) -> str:
        """The text that was held back, once no more tokens come."""
        self._detokenizer.finalize()
        rest = self._detokenizer.last_segment.rstrip("\ufffd")  # the bytes of a character that never became whole
        return self._emit(self._stop.push(rest) + self._stop.flush())

    def _emit(self, text: str) -> str:
        self.text += text
        return text


class TokenIds:
    """Stands in for a TextStream where the model has no tokenizer: the ids themselves, with commas between them."""

    is_stopped = False
    stopped_by: str | None = None

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0

    def push(self, token: int) -> str:
        """Take a token; returns what can be printed now."""
        self.num_tokens += 1
        return f",{token}" if self.num_tokens > 1 else str(token)

    def finish(self) -> str:
        return ""


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
