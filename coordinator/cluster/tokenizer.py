"""A checkpoint's tokenizer and chat template: text to tokens, and what turns tokens into text."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from mlx_lm import tokenizer_utils

from coordinator.sessions.text import StopText, TextStream
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

    def stream(self, stops: Sequence[str]) -> TextStream:
        return TextStream(self._wrapper.detokenizer, StopText(stops))

    @property
    def eos(self) -> frozenset[int]:
        return frozenset(self._wrapper.eos_token_ids)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
