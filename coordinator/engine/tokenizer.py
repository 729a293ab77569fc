"""A checkpoint's tokenizer, chat template and detokenizer, and the trust in its Python code where it has any."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from mlx_lm import tokenizer_utils
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tool_parsers import json_tools
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    dynamic_module_utils,
    tokenization_utils_base,
)
from transformers.dynamic_module_utils import get_imports, get_relative_imports
from transformers.models.auto import tokenization_auto

from coordinator.cluster.progress import say
from coordinator.engine.bounded import GIVE_RAW, TEMPLATES, LongTexts, TemplateRefusal
from coordinator.engine.grammars import JSON_FORMATS
from coordinator.sessions.conversation import CALL_BEGINS, CALL_ENDS, CALL_FORMAT, plainer, with_calls_as_text
from coordinator.sessions.request import AUTO_CALLS, Calls, Conversation
from coordinator.sessions.text import Markers, TextParser
from worker.errors import InputError, ModelError, first_line
from worker.model.checkpoint import Checkpoint

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's spelling of a byte
_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, StrictDataclassError,
    ImportError, SyntaxError, NameError, AssertionError, RuntimeError,  # from a tokenizer that is Python code
)  # fmt: skip
# What apply_chat_template raises for an unsuitable conversation before a template is rendered, or where the template is
# Python code of mlx-lm.
_UNSUITABLE = (LookupError, TypeError, ValueError, AttributeError, AssertionError, NotImplementedError)
# Names of transformers' own arguments; `messages` and `conversations` belong to its renderer.
_RESERVED = {"messages", "conversations"} | (
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    - {"tools", "documents", "add_generation_prompt", "continue_final_message", "kwargs"}
)


class Tokenizer:
    """The checkpoint's tokenizer, chat template and streaming detokenizer, as mlx-lm loads them."""

    def __init__(self, checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> None:
        """Raises ModelError if there is no readable tokenizer, or if it is code that is not trusted."""
        # Render chat templates in another process, and never ask on the terminal whether code may run. Both mlx-lm and
        # tokenizers that are code look these up in their modules, so they are replaced for the whole process.
        tokenization_utils_base.render_jinja_template = TEMPLATES.render  # type: ignore[assignment]  # returns no str
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
        self._token_texts: dict[int, str] = {}  # logprobs ask for the same ones again and again
        self._markers: dict[tuple[str, bool], Markers] = {}  # by how an answer begins, and whether calls are generic
        code = trusted_code(checkpoint, is_trusted=trust_remote_code)
        folder = checkpoint.folder
        # Without a configuration transformers, once it trusts the tokenizer's code, would run the model's code for one.
        settings = {"trust_remote_code": bool(code), "config": _config_of(checkpoint)}
        try:
            if code:
                fetch_code(checkpoint)
            self._wrapper = tokenizer_utils.load(folder, settings)
        except _UNREADABLE as error:
            lacking = "" if code or (folder / "tokenizer.json").exists() else ", which has no tokenizer.json"
            fix = "" if code else "; download the model again, with its tokenizer"
            raise ModelError(f"cannot load the tokenizer of {folder}{lacking}: {first_line(error)}{fix}") from error
        if len(self._wrapper.get_vocab()) < 2:  # transformers makes an empty one where there are no files
            raise ModelError(
                f"{folder} holds no tokenizer; copy its tokenizer files there, or give the prompt as token ids"
            )
        self._long_texts = LongTexts(folder, trust_remote_code=trust_remote_code)

    @property
    def has_chat_template(self) -> bool:
        """False for a base model, whose prompts are raw text."""
        return bool(self._wrapper.has_chat_template)

    def has_generic_calls(self, calls: Calls) -> bool:
        """Return whether calls are in the generic format.

        That is so if mlx-lm reads no format of this template's, or if they are forced and its arguments are no JSON.
        """
        return not self._format or (calls.are_forced and self._format not in JSON_FORMATS)

    def encode_prompt(
        self, prompt: Conversation | str, *, calls: Calls = AUTO_CALLS, special: bool = True, apart: bool = False
    ) -> list[int]:
        """Return a prompt's token ids. It may take long: call it outside of an event loop.

        Args:
            calls: what a conversation's answer may call.
            special: add the tokens that the tokenizer puts around any text; a chat template adds its own.
            apart: work in another process with bounded time and memory, for long prompts.
        Raises:
            InputError: the prompt is unsuitable, or takes too much.
        """
        if isinstance(prompt, Conversation):
            method = "encode_chat"
            arguments = {
                "messages": prompt.messages,
                "tools": prompt.tools,
                "arguments": prompt.template_arguments,
                "has_generic_calls": self.has_generic_calls(calls),
            }
        else:
            method, arguments = "encode", {"text": prompt, "special": special}
        if apart:
            return self._long_texts.encode(method, **arguments)
        found: list[int] = getattr(self, method)(**arguments)
        return found

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        has_generic_calls: bool = False,
    ) -> list[int]:
        """Return a conversation's token ids, up to where the answer begins; `arguments` are the template's own."""
        if not self.has_chat_template:
            raise InputError("prompt", f"this model has no chat template; {GIVE_RAW}")
        arguments = arguments or {}
        if reserved := arguments.keys() & _RESERVED:
            others = ", ".join(sorted(_RESERVED - {min(reserved)}))
            message = f"{min(reserved)} is not the chat template's to know; leave it out (nor is any of {others})"
            raise InputError("chat_template_kwargs", message)
        begins: dict[str, Any] = {"add_generation_prompt": True}
        if is_begun(messages) and not begins.keys() & arguments.keys():
            begins = {"add_generation_prompt": False, "continue_final_message": True}
        if has_generic_calls:
            messages, tools = with_calls_as_text(messages, tools), ()
        given = {**begins, **arguments} | ({"tools": list(tools)} if tools else {})
        try:
            return self._tokenized(messages, given)
        except TemplateRefusal:
            for turns in plainer(messages):
                with suppress(TemplateRefusal):
                    return self._tokenized(turns, given)
            raise

    def _tokenized(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[int]:
        try:
            return list(self._wrapper.apply_chat_template(list(messages), **given))
        except _UNSUITABLE as error:
            raise TemplateRefusal(first_line(error)) from error

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return a text's token ids, with those that the tokenizer puts around any text if `special`."""
        settings = {} if special else {"add_special_tokens": False}  # not all tokenizers that are code know it
        return list(self._wrapper.encode(text, **settings))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._wrapper.decode(list(tokens)))

    def token_text(self, token: int) -> str:
        """Return what a token adds to a text; some tokenizers drop the space that a text begins with."""
        if token not in self._token_texts:
            text = self.decode([*self._letter, token])
            self._token_texts[token] = text.removeprefix(self.decode(self._letter))
        return self._token_texts[token]

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token; None for a part of a character whose bytes the tokenizer does not reveal."""
        text = self.token_text(token)
        if "\ufffd" not in text:
            return text.encode()
        spelled = self._wrapper.convert_ids_to_tokens(token)
        if isinstance(spelled, bytes):  # from some tokenizers that are code
            return spelled
        if byte := _BYTE.fullmatch(str(spelled)):
            return bytes([int(byte[1], 16)])
        known = _bytes_by_letter()
        return bytes(known[letter] for letter in spelled) if known.keys() >= set(spelled) else None

    def markers(self, prompt: Sequence[int], calls: Calls = AUTO_CALLS) -> Markers:
        """Return how answers to this prompt mark thoughts and calls; some templates end within a thought."""
        wrapper = self._wrapper
        begin = next((n for n in range(len(prompt) - 1, -1, -1) if prompt[n] in self._of_turns), 0)  # of the answer
        thinks = wrapper.has_thinking and (
            wrapper.rfind_think_start(prompt, begin) > wrapper.rfind_think_end(prompt, begin)
        )
        key = wrapper.response_initial_state or ("reasoning" if thinks else "normal"), self.has_generic_calls(calls)
        if key not in self._markers:
            self._markers[key] = self._markers_from(*key)
        return self._markers[key]

    @cached_property
    def _of_turns(self) -> frozenset[int]:
        """Special tokens but those of thoughts, which messages may name: chat templates put one before each turn."""
        thoughts = {*(self._wrapper.think_start_tokens or ()), *(self._wrapper.think_end_tokens or ())}
        return (self.eos | self._wrapper.added_tokens_decoder.keys()) - thoughts

    def _markers_from(self, begins_in: str, is_generic: bool) -> Markers:
        wrapper = self._wrapper
        form, parse, begin, end = self._format, wrapper.tool_parser, wrapper.tool_call_start, wrapper.tool_call_end
        if is_generic:
            form, parse, begin, end = CALL_FORMAT, json_tools.parse_tool_call, CALL_BEGINS, CALL_ENDS
        names = ("has_thinking", "think_start", "think_end", "structural_markers", "response_transitions")
        machine = make_text_state_machine(
            SimpleNamespace(
                **{name: getattr(wrapper, name) for name in names},
                has_tool_calling=True,
                tool_call_start=begin,
                tool_call_end=end,
            )
        )
        thoughts = (wrapper.think_start, wrapper.think_end)
        if wrapper.response_initial_state or not wrapper.has_thinking:
            thoughts = ("", "")
        return Markers(machine, begins_in, begin, end or "", parse, form, *thoughts)

    @cached_property
    def _format(self) -> str:
        """The name of mlx-lm's parser for the calls that the chat template knows; empty if there is none."""
        return getattr(self._wrapper.tool_parser, "__module__", "").rpartition(".")[2]

    def stream(
        self,
        stops: Sequence[str] = (),
        markers: Markers | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        calls: Calls = AUTO_CALLS,
        min_tokens: int = 0,
        *,
        continues_text: bool = False,
    ) -> TextParser:
        """Return a parser for one answer's tokens; without `markers` all its text is content.

        A space that the text begins with is dropped, as in mlx-lm, unless it `continues_text`.
        """
        detokenizer = self._wrapper.detokenizer
        if continues_text:
            for token in self._letter:
                detokenizer.add_token(token)
            _ = detokenizer.last_segment
        return TextParser(
            detokenizer, stops, markers, tools, calls, min_tokens=min_tokens, token_bytes=self.token_bytes
        )

    @cached_property
    def _letter(self) -> list[int]:
        return self.encode("a")

    @property
    def eos(self) -> frozenset[int]:
        return frozenset(self._wrapper.eos_token_ids)


def is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last message is the beginning of the answer, which the model continues."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


@cache
def _bytes_by_letter() -> Mapping[str, int]:
    """Return the byte of each letter of byte-level tokenizers, in which invisible bytes are letters from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(unseen)}


def find_tokenizer(checkpoint: Checkpoint, *, trust_remote_code: bool) -> Tokenizer | None:
    """Return the tokenizer, or None if there is none or it is untrusted code, after saying so."""
    try:
        code = trusted_code(checkpoint, is_trusted=trust_remote_code)
    except ModelError as error:
        say(f"note: {error}")
        return None
    if not code and not any((checkpoint.folder / name).exists() for name in _FILES):
        return None
    return Tokenizer(checkpoint, trust_remote_code=trust_remote_code)


def _config_of(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the configuration by which transformers chooses a tokenizer, without running the model's own code."""
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except _UNREADABLE:  # unknown to transformers: its tokenizers need no full configuration
        model_type = checkpoint.config.get("model_type", "")
        named: dict[str, Any] = {"tokenizer_class": checkpoint.config.get("tokenizer_class")}
        if model_type in CONFIG_MAPPING:
            return CONFIG_MAPPING[model_type](**named)
        return PreTrainedConfig(**(named | {"model_type": model_type}))


# --- tokenizers that are Python code --------------------------------------------------------------------------------

# Model types whose checkpoints name code although transformers' own tokenizer is the right one.
_NEEDLESS: set[str] = getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
_REFERENCE = re.compile(r"(?P<module>\w+)\.\w+")


def trusted_code(checkpoint: Checkpoint, *, is_trusted: bool) -> list[str]:
    """Return the Python files of the model's tokenizer; none if it is only data.

    Raises:
        ModelError: there is code that is not trusted, which the message names, or it belongs to another repository.
    """
    code = _code_of(checkpoint)
    if code and not is_trusted:
        raise ModelError(
            f"the tokenizer of {checkpoint.name} is Python code: {', '.join(_place(checkpoint, f) for f in code)}\n"
            "Read it; then --trust-remote-code lets it run, with all that you may do yourself."
        )
    return code


def fetch_code(checkpoint: Checkpoint) -> None:
    """Download missing files of the tokenizer's code, at the commit of the checkpoint's name.

    Raises:
        ModelError: a file of it, or a package that it imports, is missing.
    """
    while lacking := [file for file in _code_of(checkpoint) if not (checkpoint.folder / file).exists()]:
        if checkpoint.download is None:
            raise ModelError(
                f"{checkpoint.folder} lacks {', '.join(lacking)}, the code of its tokenizer; copy it there"
            )
        checkpoint.download(lacking, lambda nbytes: None)
    imported = {name for file in _code_of(checkpoint) for name in get_imports(checkpoint.folder / file)}
    if absent := sorted(name for name in imported if find_spec(name) is None):
        raise ModelError(
            f"the tokenizer of {checkpoint.name} imports {', '.join(absent)}, not installed here; "
            f"run `pip install {' '.join(absent)}`"
        )


def _code_of(checkpoint: Checkpoint) -> list[str]:
    """Return the file that tokenizer_config.json names and the files that it imports; not code of the model itself."""
    reference = _reference(checkpoint.folder)
    if reference is None or checkpoint.config.get("model_type") in _NEEDLESS:
        return []
    match = _REFERENCE.fullmatch(reference)
    if match is None:  # owner/name--module.Class: transformers would fetch whatever it holds then
        raise ModelError(
            f"the tokenizer of {checkpoint.name} is Python code that is not its own: {reference}\n"
            "Expected file.Class in tokenizer_config.json: copy the code into a folder of the model, and name it so."
        )
    return _with_imports(checkpoint.folder, f"{match['module']}.py")


def _reference(folder: Path) -> str | None:
    """Return the tokenizer class that tokenizer_config.json names, the fast one if there are two."""
    auto_map = _read(folder / "tokenizer_config.json").get("auto_map")
    found = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map  # in old files only a list
    slow_and_fast = found if isinstance(found, list) else [found]
    return next((str(reference) for reference in reversed(slow_and_fast) if reference), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # loading the tokenizer reports it
        return {}
    return found if isinstance(found, dict) else {}


def _with_imports(folder: Path, file: str) -> list[str]:
    files = [file]
    for each in files:
        if (folder / each).exists():
            imported = (f"{module}.py" for module in sorted(get_relative_imports(folder / each)))
            files += [other for other in imported if other not in files]
    return files


def _place(checkpoint: Checkpoint, file: str) -> str:
    """Return where the user can read a file, which is not downloaded before it is trusted."""
    if checkpoint.download is None or (checkpoint.folder / file).exists():
        return str(checkpoint.folder / file)
    repository, _, commit = checkpoint.name.partition("@")
    return f"{constants.ENDPOINT}/{repository}/blob/{commit}/{file}"
