"""Ask: what a client wants, in the words that all doors share, and the task that comes of it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.decoding.decode import Decode
from protos.brigade_pb2 import Cache
from worker.errors import InputError


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, the tools that may be called, and what else the template is told."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Calls:
    """Which of the tools an answer may call, and whether it must."""

    are_forced: bool = False
    only: str | None = None  # the tool that must be called
    is_parallel: bool = True  # several calls in one answer


Prompt = Conversation | str | tuple[int, ...]  # the text as it stands; token ids


@dataclass(frozen=True)
class Ask:
    """A prompt and how to go on from it. What is left out is the model's own choice, or nothing."""

    prompt: Prompt
    max_tokens: int | None = None  # None: what is usual, see `Frontend`
    sampling: Mapping[str, Any] = field(default_factory=dict)  # by the names of the proto message
    decode: Decode = field(default_factory=lambda: Decode("auto"))
    cache: Cache = field(default_factory=Cache)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None  # that the answer must be of, as llguidance writes it
    calls: Calls = field(default_factory=Calls)
    repeat_guard: int = 0
    score_from: int | None = None  # index of the first token of the prompt whose likelihood is asked for, from 1

    @property
    def is_bound(self) -> bool:
        """Whether the answer must keep to a grammar."""
        return self.calls.are_forced or self.grammar is not None

    @property
    def wants_thought(self) -> bool:
        """Whether the model was told that it may think first."""
        return isinstance(self.prompt, Conversation) and bool(self.prompt.template_arguments.get("enable_thinking"))

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        return self.prompt.tools if isinstance(self.prompt, Conversation) else ()


def require_utf8(name: str, text: str) -> None:
    """Raises InputError for text with halves of surrogate pairs: that is how Python reads bytes that are no UTF-8."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError(name, "expected UTF-8 text, found other bytes")
