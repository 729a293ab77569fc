"""Least tokens: how many a text has at least, without tokenizing it: none is longer than the vocabulary's longest."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from mlx_lm import tokenizer_utils
from mlx_lm.generate import make_text_state_machine
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    dynamic_module_utils,
    tokenization_utils_base,
)

from coordinator.cluster.progress import say
from coordinator.engine.bounded import TEMPLATES
from coordinator.engine.tokenizer_code import fetch_code, trusted_code
from coordinator.sessions.text import Markers, TextParser
from worker.errors import ContextExceeded, InputError, ModelError, first_line
from worker.model.checkpoint import Checkpoint

_MARGIN = 4  # normalizers may shorten a text: NFC and NFKC make one letter of up to three
_PROBED = 4096  # letters
# What some tokenizers drop, or make one token of however much there is: blanks, and letters that none knows.
_PROBES = (" " * _PROBED, "\n" * _PROBED, "\u0378" * _PROBED)


class LeastTokens:
    """Of one tokenizer, by letters: a token stands for no more of them than it is spelled with, be they bytes."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], Sequence[int]]) -> None:
        self._most_letters = _MARGIN * max(map(len, tokenizer.get_vocab()))
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._eats_blanks = any(token.lstrip or token.rstrip for token in added)
        self._is_sure = all(len(encode(probe)) >= _PROBED // self._most_letters for probe in _PROBES)

    def of(self, text: str) -> int:
        """A fourth of what can be known, and 0 for a tokenizer that may drop what it is given."""
        if not self._is_sure:
            return 0
        num_letters = sum(map(len, text.split())) if self._eats_blanks else len(text)
        return num_letters // self._most_letters


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte, as SentencePiece spells it
_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, StrictDataclassError,
    ImportError, SyntaxError, NameError, AssertionError, RuntimeError,  # of a tokenizer that is code
)  # fmt: skip
# What apply_chat_template raises for a conversation that does not suit it, apart from the template's own refusal: from
# the code that runs before the template, or from a template of mlx-lm that is Python code.
_UNFIT = (LookupError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError)
# The names under which transformers itself takes something: `messages` and `conversations` are those of its renderer.
_NOT_THE_TEMPLATES = {"messages", "conversations"} | (
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    - {"tools", "documents", "add_generation_prompt", "continue_final_message", "kwargs"}
)


class Tokenizer:
    """The checkpoint's tokenizer, chat template and streaming detokenizer, as mlx-lm loads them."""

    def __init__(self, checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> None:
        """Raises ModelError if there is no tokenizer that can be read, or it is code that is not trusted."""
        _confine_transformers()
        self._markers: dict[str, Markers] = {}  # by how an answer begins
        code = trusted_code(checkpoint, is_trusted=trust_remote_code)
        folder = checkpoint.folder
        # Without a configuration transformers, once it trusts the tokenizer's code, would run the model's to have one.
        settings = {"trust_remote_code": bool(code), "config": _config_of(checkpoint)}
        try:
            if code:
                fetch_code(checkpoint)
            self._wrapper = tokenizer_utils.load(folder, settings)
        except _UNREADABLE as error:
            raise ModelError(f"cannot load the tokenizer of {folder}: {first_line(error)}") from error
        if len(self._wrapper.get_vocab()) < 2:  # transformers makes an empty one where there are no files
            raise ModelError(
                f"{folder} holds no tokenizer; copy its tokenizer files there, or give the prompt as token ids"
            )

    @property
    def has_chat_template(self) -> bool:
        """A base model has none: its prompts are given as they stand."""
        return bool(self._wrapper.has_chat_template)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        most: int | None = None,
    ) -> list[int]:
        """A conversation's token ids, up to where the answer begins; `arguments` are the template's own.

        It may take seconds, and is to be run aside of an event loop. Raises ContextExceeded where it is plain without
        tokenizing that it has more than `most` tokens.
        """
        if not self.has_chat_template:
            raise InputError("prompt", "this model has no chat template; give it raw, as it stands")
        arguments = arguments or {}
        if reserved := arguments.keys() & _NOT_THE_TEMPLATES:
            others = ", ".join(sorted(_NOT_THE_TEMPLATES - {min(reserved)}))
            said = f"{min(reserved)} is not the chat template's to know; leave it out (nor is any of {others})"
            raise InputError("chat_template_kwargs", said)
        given = {"add_generation_prompt": True, **arguments} | ({"tools": list(tools)} if tools else {})
        try:
            if most is not None and self._least.of(str(messages)) > most:  # templates leave some of it out
                self.require_few(str(self._wrapper.apply_chat_template(list(messages), tokenize=False, **given)), most)
            return list(self._wrapper.apply_chat_template(list(messages), **given))
        except ContextExceeded:
            raise
        except _UNFIT as error:
            message = f"the chat template refuses this conversation ({first_line(error)}); give it raw"
            raise InputError("prompt", message) from error

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """A text's token ids, with those that the tokenizer puts around any text where `special`."""
        settings = {} if special else {"add_special_tokens": False}  # which not all that is code knows
        return list(self._wrapper.encode(text, **settings))

    def require_few(self, text: str, most: int) -> None:
        """Raise ContextExceeded where it is plain without tokenizing that a text has more tokens."""
        if (least := self._least.of(text)) > most:
            raise ContextExceeded("prompt", f"expected at most {most} tokens, found at least {least}; shorten it")

    @cached_property
    def _least(self) -> LeastTokens:
        return LeastTokens(self._wrapper, self.encode)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._wrapper.decode(list(tokens)))

    def token_bytes(self, token: int) -> bytes | None:
        """Those that a token stands for; None for a part of a character of which the tokenizer does not tell them."""
        text = self.decode([token])
        if "\ufffd" not in text:
            return text.encode()
        spelled = self._wrapper.convert_ids_to_tokens(token)
        if isinstance(spelled, bytes):  # as some tokenizers that are code have them
            return spelled
        if byte := _BYTE.fullmatch(str(spelled)):
            return bytes([int(byte[1], 16)])
        known = _bytes_by_letter()
        return bytes(known[letter] for letter in spelled) if known.keys() >= set(spelled) else None

    def encode_prompt(self, text: str) -> list[int]:
        """As a conversation's first message if there is a chat template, else as it stands."""
        return self.encode_chat([{"role": "user", "content": text}]) if self.has_chat_template else self.encode(text)

    def markers(self, prompt: Sequence[int]) -> Markers:
        """How answers to this prompt mark thoughts and calls; some templates end where thinking has begun."""
        wrapper = self._wrapper
        thinks = wrapper.has_thinking and wrapper.rfind_think_start(prompt) > wrapper.rfind_think_end(prompt)
        begins_in = wrapper.response_initial_state or ("reasoning" if thinks else "normal")
        if begins_in not in self._markers:
            self._markers[begins_in] = self._markers_from(begins_in)
        return self._markers[begins_in]

    def _markers_from(self, begins_in: str) -> Markers:
        wrapper = self._wrapper
        calls = (wrapper.tool_call_start or "", wrapper.tool_call_end or "") if wrapper.has_tool_calling else ("", "")
        form = getattr(wrapper.tool_parser, "__module__", "").rpartition(".")[2]
        thoughts = (wrapper.think_start, wrapper.think_end)
        if wrapper.response_initial_state or not wrapper.has_thinking:
            thoughts = ("", "")
        return Markers(self._text_machine, begins_in, *calls, wrapper.tool_parser, form, *thoughts)

    @cached_property
    def _text_machine(self) -> Any:
        return make_text_state_machine(self._wrapper)

    def stream(
        self,
        stops: Sequence[str] = (),
        markers: Markers | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        has_parallel_calls: bool = True,
    ) -> TextParser:
        """What makes text of one answer's tokens; without `markers` it does not tell thoughts and calls apart."""
        return TextParser(self._wrapper.detokenizer, stops, markers, tools, has_parallel_calls=has_parallel_calls)

    @property
    def eos(self) -> frozenset[int]:
        return frozenset(self._wrapper.eos_token_ids)


def _confine_transformers() -> None:
    """Have it render chat templates in the other process, and never ask a terminal whether code may run.

    Whoever has a template rendered, mlx-lm or a tokenizer that is code, finds the function by its module, and nobody
    passes a deadline for the question on: for the whole process or not at all.
    """
    tokenization_utils_base.render_jinja_template = TEMPLATES.render  # type: ignore[assignment]  # it gives no str
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # AutoTokenizer as a tokenizer_class asks, whatever was said of trust


@cache
def _bytes_by_letter() -> Mapping[str, int]:
    """How byte-level tokenizers spell bytes: by themselves if they can be seen, the others by letters from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(unseen)}


def find_tokenizer(checkpoint: Checkpoint, *, trust_remote_code: bool) -> Tokenizer | None:
    """For what can do without: None if there is no tokenizer, or if it is code that is not trusted, which is said."""
    try:
        code = trusted_code(checkpoint, is_trusted=trust_remote_code)
    except ModelError as error:
        say(f"note: {error}")
        return None
    if not code and not any((checkpoint.folder / name).exists() for name in _FILES):
        return None
    return Tokenizer(checkpoint, trust_remote_code=trust_remote_code)


def _config_of(checkpoint: Checkpoint) -> PreTrainedConfig:
    """What transformers chooses a tokenizer by. Left to itself it would run the model's own Python to know it."""
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except _UNREADABLE:  # a model that transformers does not know, or not with such values: tokenizers need none
        model_type = checkpoint.config.get("model_type", "")
        named: dict[str, Any] = {"tokenizer_class": checkpoint.config.get("tokenizer_class")}
        if model_type in CONFIG_MAPPING:
            return CONFIG_MAPPING[model_type](**named)
        return PreTrainedConfig(**(named | {"model_type": model_type}))
