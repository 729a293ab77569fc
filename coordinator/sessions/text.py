"""Text in, tokens out and back: chat template, streaming detokenisation, stop strings. Knows nothing of the chain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from mlx_lm import tokenizer_utils

from coordinator.sessions.generation_config import read_generation_config
from worker.errors import InputError, ModelError


class Tokenizer:
    """The checkpoint's tokenizer, chat template and streaming detokenizer, as mlx-lm loads them."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the folder holds no tokenizer that can be read."""
        try:
            self._wrapper = tokenizer_utils.load(folder, {"trust_remote_code": False})
        except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ModelError(f"cannot load the tokenizer of {folder}: {reason}") from error
        if len(self._wrapper.get_vocab()) < 2:  # transformers makes an empty one where there are no files
            raise ModelError(
                f"{folder} holds no tokenizer; copy its tokenizer files there, or give the prompt as token ids"
            )

    @property
    def has_chat_template(self) -> bool:
        """A base model has none: its prompts are given as they stand."""
        return bool(self._wrapper.has_chat_template)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """A conversation's token ids, up to where the answer begins."""
        if not self.has_chat_template:
            raise InputError("prompt", "this model has no chat template; give it raw, as it stands")
        try:
            return list(self._wrapper.apply_chat_template(list(messages), add_generation_prompt=True))
        except TemplateError as error:
            raise InputError("prompt", f"the chat template refuses this conversation ({error}); give it raw") from error

    def encode(self, text: str) -> list[int]:
        return list(self._wrapper.encode(text))

    def encode_prompt(self, text: str) -> list[int]:
        """As a conversation's first message if there is a chat template, else as it stands."""
        return self.encode_chat([{"role": "user", "content": text}]) if self.has_chat_template else self.encode(text)

    def stream(self, stops: Sequence[str]) -> "TextStream":
        return TextStream(self._wrapper.detokenizer, StopText(stops))

    @property
    def eos(self) -> frozenset[int]:
        return frozenset(self._wrapper.eos_token_ids)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def eos_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """All end-of-sequence ids that the checkpoint names, in config.json and generation_config.json."""
    places = config, config.get("text_config") or {}, read_generation_config(folder)
    found = [place.get("eos_token_id") for place in places]
    ids: set[int] = set()
    for value in found:
        ids |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return frozenset(ids)


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
        self.matched = False
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, piece: str) -> str:
        """Take a piece; returns what is certainly not part of a stop string. Nothing comes after a match."""
        if self.matched:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.matched, self._held = True, ""
            return text[: min(found)[1]]  # the one that ends first, however the text was cut into pieces
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
