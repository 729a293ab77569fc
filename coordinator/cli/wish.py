"""One request of the command line: what is wished for, and what becomes of it with a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coordinator.cli.refusals import SAMPLED
from coordinator.cli.report import require_writable
from coordinator.cluster.open import read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.cluster.tokenizer import Tokenizer, find_tokenizer
from coordinator.decoding.decode import Decode, suit
from coordinator.sessions.answer import Answer
from coordinator.sessions.generation_config import eos_ids, sampling_defaults
from coordinator.sessions.request import Request, check_request, make_sampling, room_for_answer
from coordinator.sessions.text import TextStream, TokenIds
from protos.brigade_pb2 import Cache
from worker.errors import InputError, ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec


@dataclass(frozen=True)
class Wish:
    """What `generate` is asked for, beyond the cluster: the prompt as text or as token ids, and how to go on."""

    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    system: str | None = None
    raw: bool = False
    max_tokens: int = 256
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what was chosen; the model's own choices are below it
    decode: Decode = field(default_factory=lambda: Decode("auto"))
    cache: Cache = field(default_factory=Cache)
    repeat_guard: int = 0
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    chunk: int | None = None
    as_json: bool = False
    with_stats: bool = False
    trace: Path | None = None
    journal: Path | None = None
    given: frozenset[str] = frozenset()  # flags of the command line, to be compared with a journal's request

    @property
    def is_traced(self) -> bool:
        """Whether anybody wants to know where each millisecond went."""
        return self.as_json or self.with_stats or self.trace is not None


@dataclass(frozen=True)
class Task:
    """A request that its model can serve, and what turns its tokens into text."""

    checkpoint: Checkpoint
    spec: ModelSpec
    request: Request
    tokenizer: Tokenizer | None
    defaults: Mapping[str, float]  # of the sampling, by the model's generation_config.json

    def stream(self) -> TextStream | TokenIds:
        return self.tokenizer.stream(self.request.stops) if self.tokenizer else TokenIds()

    def how_it_ended(self, answer: Answer, stream: TextStream | TokenIds) -> str:
        """Why there are no more tokens."""
        if answer.finish_reason == "length":
            if room_for_answer(self.request, self.spec.context) < self.request.max_tokens:
                return f"cut off where the model's context of {self.spec.context} tokens ends"
            return f"cut off at --max-tokens {self.request.max_tokens}"
        if stream.is_stopped:
            return "ended at a --stop text"
        return "ended by itself" if answer.tokens[-1] in self.request.eos else "ended as it began to repeat itself"

    def how_it_was_drawn(self) -> str:
        """Temperature and seed of a sampled answer, and whose choice that was; empty for the likeliest tokens."""
        sampling = self.request.sampling
        if not sampling.temperature:
            return ""
        own = ", ".join(f"{name} {value:g}" for name, value in self.defaults.items())
        choice = f"as the model's generation_config.json says ({own})" if own else f"at --temp {sampling.temperature:g}"
        return f"sampled {choice}, --seed {sampling.seed}"


async def prepare(wish: Wish, options: ClusterOptions) -> Task:
    """Read the model's configuration and check the wish against it, before any node is asked.

    Raises:
        InputError: the model cannot serve it. ModelError: there is no such model, or it cannot be read.
    """
    for name, text in (("prompt", wish.prompt), ("system_prompt", wish.system), *(("stop", s) for s in wish.stops)):
        _require_utf8(name, text or "")
    if wish.trace is not None:
        require_writable("trace", wish.trace)
    checkpoint, spec = await read_model(options.model)
    spec = replace(spec, cache=wish.cache)
    tokenizer = _tokenizer(wish, checkpoint, options.trust_remote_code)
    defaults = sampling_defaults(checkpoint.generation_config)
    defaults = {name: value for name, value in defaults.items() if name not in wish.sampling}
    request = _make_request(wish, checkpoint, spec, tokenizer, defaults)
    _check(wish, request, spec)
    if _is_plain(wish, tokenizer) and not wish.raw:
        say("note: this model has no chat template; the prompt is given as it stands")
    return Task(checkpoint, spec, request, tokenizer, defaults)


def _check(wish: Wish, request: Request, spec: ModelSpec) -> None:
    try:
        check_request(request, spec)
    except InputError as error:
        if error.field == "prompt" and wish.prompt_tokens is not None:
            raise InputError("prompt_tokens", error.message) from error
        raise
    if not request.sampling.temperature:
        for name in SAMPLED:
            if name in wish.sampling:
                raise InputError(name, f"changes nothing at temperature 0, {spec.name}'s default; give --temp as well")


def _make_request(
    wish: Wish, checkpoint: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer | None, defaults: Mapping[str, float]
) -> Request:
    eos = eos_ids(checkpoint.config, checkpoint.generation_config) | (tokenizer.eos if tokenizer else frozenset())
    try:
        sampling = make_sampling(**{**defaults, **wish.sampling})
    except InputError as error:  # what was chosen is checked already
        raise ModelError(f"{checkpoint.folder}/generation_config.json: {error}") from error
    return Request(
        prompt=prompt_ids(wish, tokenizer),
        max_tokens=wish.max_tokens,
        sampling=sampling,
        stops=wish.stops,
        eos=frozenset() if wish.ignore_eos else eos,
        decode=suit(wish.decode, wish.cache, spec),
        cache=wish.cache,
        repeat_guard=wish.repeat_guard,
    )


def _tokenizer(wish: Wish, checkpoint: Checkpoint, trust_remote_code: bool) -> Tokenizer | None:
    """None only where nothing asks for text."""
    if wish.prompt is None and not wish.stops:
        return find_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
    return Tokenizer(checkpoint, trust_remote_code=trust_remote_code)


def _is_plain(wish: Wish, tokenizer: Tokenizer | None) -> bool:
    """Whether the prompt is text that goes to the model without a chat template."""
    return wish.prompt is not None and tokenizer is not None and (wish.raw or not tokenizer.has_chat_template)


def prompt_ids(wish: Wish, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if wish.prompt_tokens is not None:
        return wish.prompt_tokens
    assert tokenizer is not None and wish.prompt is not None
    if not (wish.prompt if wish.raw else wish.prompt.strip()):
        raise InputError("prompt", "expected some text, found none")
    if _is_plain(wish, tokenizer):
        if wish.system:
            raise InputError("system_prompt", "this model has no chat template that would give it its place")
        return tuple(tokenizer.encode(wish.prompt))
    messages = [{"role": "system", "content": wish.system}] if wish.system else []
    return tuple(tokenizer.encode_chat([*messages, {"role": "user", "content": wish.prompt}]))


def _require_utf8(name: str, text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # how python reads bytes that are no UTF-8
        raise InputError(name, "expected UTF-8 text, found other bytes")
