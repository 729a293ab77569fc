"""Request: what a client asks, and the request that is made of it: checked once, before any node is asked. Pure."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic asks for it up to Python 3.11

from coordinator.decoding.decode import Decode
from coordinator.planning.costs import StepCosts
from coordinator.sessions.output import NOTHING_KNOWN, KnownTokens
from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, Cache, Sampling
from worker.errors import ContextExceeded, InputError, ModelError
from worker.model.modelspec import ModelSpec

_COLDEST = 1e-6  # below it the division by the temperature leaves float32
_OFF_AT_ONE = ("top_p", "repetition_penalty")

Temperature = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=0, le=100)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Bias = Annotated[float, Field(ge=-1e9, le=1e9)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
Count = Annotated[int, Field(ge=0, le=2**32 - 1)]


@with_config(ConfigDict(extra="forbid"))
class SamplingParams(TypedDict, total=False):
    """How tokens are drawn, by the names of the proto message: the one place that says what each may be."""

    seed: Seed
    temperature: Temperature  # 0: the likeliest token
    top_p: Share  # 0: off, as for the next two
    top_k: Count
    min_p: Share
    repetition_penalty: RepetitionPenalty
    presence_penalty: Penalty
    frequency_penalty: Penalty
    logit_bias: dict[Count, Bias]  # by token id
    logprobs: Count  # of the drawn token, and of so many alternatives less one


_PARAMS: TypeAdapter[SamplingParams] = TypeAdapter(SamplingParams)
MODELS_OWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that a checkpoint may have defaults for


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it. Immutable; `check_request` says whether a model can serve it."""

    prompt: tuple[int, ...]
    max_tokens: int  # 0: only the prompt is scored
    sampling: Sampling = field(default_factory=Sampling)
    decode: Decode = Decode()  # noqa: RUF009 - immutable
    cache: Cache = field(default_factory=Cache)
    stops: tuple[str, ...] = ()
    eos: frozenset[int] = frozenset()
    repeat_guard: int = 0  # end once the last tokens repeat so many times; 0 never does
    score_from: int | None = None  # index of the first token of the prompt whose likelihood is asked for, from 1
    known: KnownTokens = NOTHING_KNOWN  # the answer so far, by its journal
    tools: tuple[Mapping[str, Any], ...] = ()  # that the answer may call
    has_parallel_calls: bool = True  # several calls in one answer


@dataclass(frozen=True)
class Calls:
    """Which of the tools an answer may call, and whether it must."""

    are_forced: bool = False
    only: str | None = None  # the tool that must be called
    is_parallel: bool = True  # several calls in one answer


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, the tools that may be called, and what else the template is told."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


Prompt = Conversation | str | tuple[int, ...]  # the text as it stands; token ids


@dataclass(frozen=True)
class RequestSpec:
    """What a client asks, in the words that all front ends share, not checked yet: see `InputProcessor.make_request`.

    What is left out is the model's own choice, or nothing.
    """

    prompt: Prompt
    max_tokens: int | None = None  # None: the usual number, see `InputProcessor`
    sampling: Mapping[str, Any] = field(default_factory=dict)  # by the names of `SamplingParams`
    decode: Decode = Decode("auto")  # noqa: RUF009 - immutable
    cache: Cache = field(default_factory=Cache)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: str | None = None  # that the answer must be of, as llguidance writes it
    calls: Calls = Calls()
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


def make_sampling(*, seed: int | None = None, **parameters: Any) -> Sampling:
    """Sampling parameters, with a random seed if none is given. Raises InputError for a value that none can have."""
    given = {**parameters, "seed": random.getrandbits(32) if seed is None else seed}
    try:
        checked = _PARAMS.validate_python(given)
    except ValidationError as error:
        raise _refusal(error) from error
    if 0 < checked.get("temperature", 0.0) < _COLDEST:
        raise InputError("temperature", f"expected 0 or at least {_COLDEST:g}, got {checked['temperature']:g}")
    return Sampling(**checked)


def check_sampling(sampling: Sampling) -> None:
    """Raises InputError, naming the parameter, for a value outside its range."""
    names = (name for name in SamplingParams.__annotations__ if name != "logit_bias")
    make_sampling(**{name: getattr(sampling, name) for name in names}, logit_bias=dict(sampling.logit_bias))


def _refusal(error: ValidationError) -> InputError:
    """The first problem as an error of that parameter, with the range that it has."""
    first = error.errors(include_url=False)[0]
    name, value = str(first["loc"][0]), first["input"]
    kinds = {"top_k": Count, "logprobs": Count, "seed": Seed, "temperature": Temperature, "top_p": Share}
    kinds |= {"min_p": Share, "repetition_penalty": RepetitionPenalty, "presence_penalty": Penalty}
    kinds |= {"frequency_penalty": Penalty, "logit_bias": Count if first["loc"][-1] == "[key]" else Bias}
    if name not in kinds or not isinstance(value, int | float):
        return InputError(name, first["msg"])
    at_least, at_most = get_args(kinds[name])[1].metadata
    low, high = at_least.ge, at_most.le
    if kinds[name] in (Count, Seed):
        return InputError(name, f"expected a whole number from {low} to {high}, got {value}")
    return InputError(name, f"expected a number from {low:g} to {high:g}, got {value:g}")


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters of a generation_config.json that samples; none where `do_sample` is not true.

    Raises:
        ModelError: one of them is no number.
    """
    if config.get("do_sample") is not True:
        return {}
    defaults: dict[str, float] = {"temperature": 1.0}  # transformers' own, where the file names none
    for name in MODELS_OWN:
        value = config.get(name)
        if value is None or (value == 1 and not isinstance(value, bool) and name in _OFF_AT_ONE):
            continue
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ModelError(f"generation_config.json: {name}: expected a number, found {value!r}")
        defaults[name] = value
    return defaults


def eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> frozenset[int]:
    """All end-of-sequence ids that the checkpoint names, in config.json and generation_config.json."""
    ids: set[int] = set()
    for place in (config, config.get("text_config") or {}, generation_config):
        value = place.get("eos_token_id")
        ids |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return frozenset(ids)


def check_request(request: Request, spec: ModelSpec) -> None:
    """Refuse what the model cannot serve.

    Raises:
        ContextExceeded: a prompt that leaves no room for an answer.
        InputError: an empty prompt, ids outside the vocabulary, a cache that the model's heads do not suit.
    """
    sampling, num_prompt = request.sampling, len(request.prompt)
    check_sampling(sampling)
    if not request.prompt:
        raise InputError("prompt", "expected at least one token, found none")
    for name, tokens in (("prompt", request.prompt), ("logit_bias", tuple(sampling.logit_bias))):
        if outside := [token for token in tokens if not 0 <= token < spec.vocab_size]:
            raise InputError(name, f"expected token ids from 0 to {spec.vocab_size - 1}, found {outside[0]}")
    for name, count in (("top_k", sampling.top_k), ("logprobs", sampling.logprobs - 1)):
        if count >= spec.vocab_size:
            raise InputError(name, f"expected less than the vocabulary's {spec.vocab_size}, got {count}")
    refusals = {CACHE_INT8: ("int8", spec.int8_refusal), CACHE_ROTATING: ("rotating", spec.rotating_refusal)}
    kind, refusal = refusals.get(request.cache.kind, ("", ""))
    if refusal:
        raise InputError("kv", f"{spec.name} cannot have {kind} caches: {refusal}; use full")
    if sampling.HasField("grammar") and request.decode.kind == "diffusion-fast":
        raise InputError("decode", "expected ar, ngram or diffusion: diffusion-fast cannot keep to a grammar")
    if request.score_from is not None:
        if request.decode.kind != "ar":
            raise InputError("decode", f"expected ar to score the prompt with, got {request.decode.kind}")
        if not 1 <= request.score_from < num_prompt:
            raise InputError("prompt", "expected at least two tokens: the first one follows nothing and has no score")
    least = 1 if request.score_from is None else 0
    if request.max_tokens < least:
        raise InputError("max_tokens", f"expected at least {least}, got {request.max_tokens}")
    if request.repeat_guard == 1 or request.repeat_guard < 0:  # one token is not repeated
        raise InputError("repeat_guard", f"expected 0 for none or at least 2 times, got {request.repeat_guard}")
    if num_prompt >= spec.context:
        found = f"{spec.name} has room for, found {num_prompt}; shorten it"
        raise ContextExceeded("prompt", f"expected less than the {spec.context} tokens that {found}")


def most_rows(request: Request, context: int) -> int:
    """Rows that every cache must have room for until the request is answered, as admission counts them."""
    decoder = request.decode.make_decoder(request.eos, StepCosts())
    return len(request.prompt) + room_for_answer(request, context) + decoder.num_ahead


def room_for_answer(request: Request, context: int) -> int:
    """How many tokens may be generated: `max_tokens`, or less where the context ends. At least 1."""
    return max(1, min(request.max_tokens, context - len(request.prompt)))
