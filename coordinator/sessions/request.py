"""A client's request as it came (`RequestSpec`), and the immutable `Request` that is made of it. Pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict  # pydantic needs this one up to Python 3.11

from coordinator.decoding.decode_options import LOSSY, Decode, cache_name, suit
from coordinator.planning.costs import ChainCosts
from coordinator.sessions.output import NO_TOKENS, KnownTokens
from protos.brigade_pb2 import CACHE_ROTATING, Cache, Sampling
from worker.errors import ContextExceeded, InputError, ModelError
from worker.model.model_spec import ModelSpec, text_config

_MIN_POSITIVE = 1e-6  # less would overflow or vanish in float32
_ZERO_OR_MIN_POSITIVE = ("temperature", "top_p", "repetition_penalty")
_MOST_NUMBER = 2**63 - 1  # of tokens or repeats: what journals hold
_OFF_AT_ONE = ("top_p", "repetition_penalty")

PoolingKind = Literal["mean", "last"]  # of all rows, or the last one
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]


def _number(low: float, high: float, description: str) -> Any:
    return Field(ge=low, le=high, description=description)


def _tokens(penalty: str) -> Any:
    return _number(1, 2**32 - 1, f"Latest tokens that {penalty} looks at.")


@with_config(ConfigDict(extra="forbid"))
class SamplingParams(TypedDict, total=False):
    """How tokens are drawn, named as in the proto message: the only definition of the ranges and descriptions."""

    seed: Annotated[int, _number(0, 2**64 - 1, "The same seed gives the same tokens, on any split.")]
    temperature: Annotated[float, _number(0, 100, "Temperature; 0 takes the likeliest token.")]
    top_p: Annotated[float, _number(0, 1, "Sample from the likeliest tokens of this total; 0 or 1: off.")]
    top_k: Annotated[int, _number(0, 2**32 - 1, "Sample from the k likeliest tokens; 0: off.")]
    min_p: Annotated[float, _number(0, 1, "Sample from tokens at least this times as likely as the best; 0: off.")]
    top_n_sigma: Annotated[float, _number(0, 100, "Sample from tokens this many deviations below the best; 0: off.")]
    xtc_probability: Annotated[float, _number(0, 1, "How often to leave out all likely tokens but the last; 0: off.")]
    xtc_threshold: Annotated[float, _number(0, 0.5, "XTC: the probability from which a token is likely.")]
    repetition_penalty: Annotated[float, _number(0, 100, "Divide the logits of the latest tokens; 0 or 1: off.")]
    repetition_context_size: Annotated[int, _tokens("repetition_penalty")]
    presence_penalty: Annotated[float, _number(-100, 100, "Subtract from the logits of the latest tokens.")]
    presence_context_size: Annotated[int, _tokens("presence_penalty")]
    frequency_penalty: Annotated[float, _number(-100, 100, "Subtract per use among the latest tokens.")]
    frequency_context_size: Annotated[int, _tokens("frequency_penalty")]
    dry_multiplier: Annotated[float, _number(0, 100, "DRY: subtract from what would repeat a sequence; 0: off.")]
    dry_base: Annotated[float, _number(1, 10, "DRY: multiply the penalty by this per token more.")]
    dry_allowed_length: Annotated[int, _number(1, 2**32 - 1, "DRY: penalise repetitions from this many tokens on.")]
    dry_penalty_last_n: Annotated[int, _number(1, 2**32 - 1, "DRY: latest tokens that are looked at.")]
    min_tokens: Annotated[int, _number(0, 2**32 - 1, "The least tokens before the answer may end.")]
    logit_bias: Annotated[
        dict[UInt32, Annotated[float, Field(ge=-1e9, le=1e9)]],
        Field(description="Add to the logits of these tokens."),
    ]
    logprobs: UInt32  # 1 + the number of alternatives to each drawn token; 0: no logprobs


def sampling_field(name: str) -> FieldInfo:
    """Return the description and the bounds of a sampling parameter."""
    return FieldInfo.from_annotation(SamplingParams.__annotations__[name])


_PARAMS: TypeAdapter[SamplingParams] = TypeAdapter(SamplingParams)
FILTERS = ("top_p", "top_k", "min_p", "top_n_sigma", "xtc_probability")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier")
_DEFAULTS = {  # of parameters that matter only with the first of each: those of mlx-lm, and of DRY's author
    "xtc_probability": {"xtc_threshold": 0.1},
    "dry_multiplier": {"dry_base": 1.75, "dry_allowed_length": 2},
}
BREAKERS = ("\n", ":", '"', "*")  # of DRY by default, likewise
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # read from generation_config.json


@dataclass(frozen=True)
class Calls:
    """Which of the tools an answer may call, and whether it must."""

    are_forced: bool = False
    only: str | None = None  # the tool that must be called
    is_parallel: bool = True  # whether one answer may hold several calls


AUTO_CALLS = Calls()


@dataclass(frozen=True)
class Request:
    """A checked prompt and how to continue it; see `check_request`."""

    prompt: tuple[int, ...]
    max_tokens: int  # 0: only the prompt is scored or pooled
    sampling: Sampling = field(default_factory=Sampling)
    decode: Decode = Decode()  # noqa: RUF009 - immutable
    cache: Cache = field(default_factory=Cache)
    stops: tuple[str, ...] = ()
    eos: frozenset[int] = frozenset()
    repeat_guard: int = 0  # end once the last tokens repeat this many times; 0: never
    priority: int = 0  # lower numbers go first
    score_from: int | None = None  # index of the first prompt token to score, at least 1
    pool_from: int | None = None  # index of the first prompt row whose state behind the final norm is summed up
    known: KnownTokens = NO_TOKENS  # the answer so far, from a journal
    tools: tuple[Mapping[str, Any], ...] = ()  # that the answer may call
    calls: Calls = AUTO_CALLS
    turn_ends: tuple[int, ...] = ()  # lengths at which later prompts of the conversation may part from this one
    continues_text: bool = False  # the prompt is raw, and its continuation may begin with a space
    not_enforced: tuple[str, ...] = ()  # `schema.KEYWORD`, or `schema` if no grammar keeps to those of tools


@dataclass(frozen=True)
class Conversation:
    """Messages in the form of chat templates, the tools that may be called, and further template arguments."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, system: str | None = None) -> "Conversation":
        """Return the conversation that begins with this message of the user, after a system prompt if there is one."""
        first = ({"role": "system", "content": system},) if system else ()
        return cls((*first, {"role": "user", "content": text}))


Prompt = Conversation | str | tuple[int, ...]  # messages, raw text, or token ids


@dataclass(frozen=True)
class RequestSpec:
    """A client's request, unchecked, in the terms that all front ends share; see `InputProcessor.make_request`.

    The model's defaults apply to what is left out.
    """

    prompt: Prompt
    max_tokens: int | None = None  # None: the default of `InputProcessor`
    sampling: Mapping[str, Any] = field(default_factory=dict)  # by the names of `SamplingParams`
    decode: Decode = Decode("auto")  # noqa: RUF009 - immutable
    cache: Cache = field(default_factory=Cache)
    keeps_system: bool = False  # the cache never drops the system prompt, however long it is
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # they end an answer as end-of-sequence tokens do, even with `ignore_eos`
    ignore_eos: bool = False
    dry_sequence_breakers: tuple[str, ...] = BREAKERS  # the last token of each is one that no repetition goes beyond
    grammar: str | None = None  # an llguidance grammar that the answer must match
    calls: Calls = AUTO_CALLS
    repeat_guard: int = 0
    priority: int | None = None  # lower numbers go first; None: 0, or the lowest that the API key may ask for
    score_from: int | None = None  # index of the first prompt token to score, at least 1
    pooling: PoolingKind | None = None  # which states of the prompt are summed up

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must match a grammar."""
        return self.calls.are_forced or self.grammar is not None

    @property
    def allows_thinking(self) -> bool:
        """Whether the template's arguments let the model think first."""
        return isinstance(self.prompt, Conversation) and bool(self.prompt.template_arguments.get("enable_thinking"))

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        return self.prompt.tools if isinstance(self.prompt, Conversation) else ()


def require_text(name: str, text: str, most: int | None = None) -> None:
    """Raise InputError for more than `most` characters, and for lone surrogates: bytes that are not UTF-8."""
    if most is not None and len(text) > most:
        raise InputError(name, f"expected at most {most} characters, found {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(name, "expected UTF-8 text, found other bytes") from error


def make_sampling(*, seed: int | None = None, **parameters: Any) -> Sampling:
    """Return sampling parameters, with a random seed unless one is given.

    Raises:
        InputError: a value is outside its range; the error names the parameter.
    """
    given = {**parameters, "seed": random.getrandbits(32) if seed is None else seed}
    try:
        checked = _PARAMS.validate_python(given)
    except ValidationError as error:
        raise _range_error(error) from error
    for name in _ZERO_OR_MIN_POSITIVE:
        if 0 < (value := float(checked.get(name, 0.0))) < _MIN_POSITIVE:  # type: ignore[arg-type]
            raise InputError(name, f"expected 0 or at least {_MIN_POSITIVE:g}, got {value:g}")
    used = [defaults for name, defaults in _DEFAULTS.items() if checked.get(name)]
    return Sampling(**reduce(or_, used, {}) | checked)  # type: ignore[arg-type]


def check_sampling(sampling: Sampling) -> None:
    """Raise InputError, naming the parameter, for a value outside its range. Zeros are what was not given."""
    given = {name: value for name in SamplingParams.__annotations__ if (value := getattr(sampling, name))}
    make_sampling(**given | {"logit_bias": dict(sampling.logit_bias)})


def _range_error(error: ValidationError) -> InputError:
    """Return the first problem as an InputError that states the parameter's range."""
    first = error.errors(include_url=False)[0]
    name, value = str(first["loc"][0]), first["input"]
    annotation = SamplingParams.__annotations__.get(name)
    if annotation is None or not isinstance(value, int | float):
        return InputError(name, first["msg"])
    if name == "logit_bias":
        key, bias = get_args(get_args(annotation)[0])
        annotation = key if first["loc"][-1] == "[key]" else bias
    number, limits = get_args(annotation)
    low, high = (limit.ge if hasattr(limit, "ge") else limit.le for limit in limits.metadata)
    if number is int:
        return InputError(name, f"expected a whole number from {low} to {high}, got {value}")
    return InputError(name, f"expected a number from {low:g} to {high:g}, got {value:g}")


def sampling_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters of a generation_config.json; none unless it sets `do_sample`.

    Raises:
        ModelError: a parameter is not a number.
    """
    if config.get("do_sample") is not True:
        return {}
    defaults: dict[str, float] = {"temperature": 1.0}  # the default of transformers
    for name in MODEL_DEFAULTS:
        value = config.get(name)
        if value is None or (value == 1 and not isinstance(value, bool) and name in _OFF_AT_ONE):
            continue
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ModelError(f"generation_config.json: {name}: expected a number, found {value!r}")
        defaults[name] = value
    return defaults


def eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Return all end-of-sequence ids that config.json and generation_config.json name.

    Raises:
        ModelError: one of them is no whole number.
    """
    ids: set[int] = set()
    for place in (config, text_config(config), generation_config):
        value = place.get("eos_token_id")
        named = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) for each in named):
            file = "generation_config.json" if place is generation_config else "config.json"
            raise ModelError(f"{file}: eos_token_id: expected a token id or a list of them, found {value!r}")
        ids.update(named)
    return frozenset(ids)


def check_request(request: Request, spec: ModelSpec) -> None:
    """Refuse what the model cannot serve.

    Raises:
        ContextExceeded: the prompt leaves no room for an answer.
        InputError: anything else, such as an empty prompt, ids outside the vocabulary or an unsupported cache.
    """
    sampling, num_prompt = request.sampling, len(request.prompt)
    check_sampling(sampling)
    if not request.prompt:
        raise InputError("prompt", "expected at least one token, found none")
    check_token_ids("prompt", request.prompt, spec.vocab_size)
    check_token_ids("logit_bias", tuple(sampling.logit_bias), spec.vocab_size)
    for name, count in (("top_k", sampling.top_k), ("logprobs", sampling.logprobs - 1)):
        if count >= spec.vocab_size:
            raise InputError(name, f"expected less than the vocabulary's {spec.vocab_size}, got {count}")
    kind = cache_name(request.cache)
    refusal = spec.rotating_refusal if request.cache.kind == CACHE_ROTATING else spec.quantised_refusal
    if refusal and kind != "full":
        raise InputError("kv", f"{spec.name} cannot have {kind} caches: {refusal}; use full")
    if sampling.HasField("grammar") and request.decode.kind in LOSSY:
        kinds = "ar, ngram, draft or diffusion"
        raise InputError("decode", f"expected {kinds}: {request.decode.kind} cannot keep to a grammar")
    if request.decode.kind == "canvas":
        _check_canvas(request, spec)
    if request.score_from is not None:
        if request.decode.kind != "ar":
            raise InputError("decode", f"expected ar to score the prompt with, got {request.decode.kind}")
        if not 1 <= request.score_from < num_prompt:
            raise InputError("prompt", "expected at least two tokens: the first one follows nothing and has no score")
    if request.pool_from is not None and request.decode.kind != "ar":
        raise InputError("decode", f"expected ar for an embedding, got {request.decode.kind}")
    least = 1 if request.score_from is None and request.pool_from is None else 0
    if request.max_tokens < least:
        raise InputError("max_tokens", f"expected at least {least}, got {request.max_tokens}")
    if sampling.min_tokens > request.max_tokens:
        raise InputError("min_tokens", f"expected at most max_tokens, {request.max_tokens}, got {sampling.min_tokens}")
    if sampling.min_tokens and sampling.HasField("grammar"):
        raise InputError("min_tokens", "expected none with a grammar, which says itself when the answer may end")
    for name, number in (("max_tokens", request.max_tokens), ("repeat_guard", request.repeat_guard)):
        if number > _MOST_NUMBER:
            raise InputError(name, f"expected at most {_MOST_NUMBER}, got {number}")
    if request.repeat_guard == 1 or request.repeat_guard < 0:  # one token is not repeated
        raise InputError("repeat_guard", f"expected 0 for none or at least 2 times, got {request.repeat_guard}")
    check_length(num_prompt, most_prompt(spec, request.max_tokens), spec)


def _check_canvas(request: Request, spec: ModelSpec) -> None:
    """Raise InputError for a canvas unlike the model's, or a sampling parameter that canvas cannot honour."""
    if suit(request.decode, request.cache, spec) != request.decode:  # it comes from a journal
        raise InputError("decode", f"expected a canvas as {spec.name} was trained for, found another")
    sampling = request.sampling
    for name in (*PENALTIES, "logit_bias", "logprobs", "min_tokens"):
        if getattr(sampling, name) and not (name == "repetition_penalty" and sampling.repetition_penalty == 1):
            raise InputError(name, "expected none with canvas, whose places are decided together")
    if refinement := request.decode.training and request.decode.training.refinement:
        for name in FILTERS:
            if getattr(sampling, name) and not (name == "top_p" and sampling.top_p == 1):
                raise InputError(name, f"expected none: {spec.name} draws from all tokens at its own temperatures")
        if images := sorted(refinement.not_text & set(request.prompt)):
            raise InputError("prompt", f"expected text only, found token {images[0]}, a part of an image")


def check_length(num_prompt: int, most: int, spec: ModelSpec) -> None:
    """Raise ContextExceeded for a prompt of more than `most` tokens."""
    if num_prompt > most:
        expected = f"expected at most {most} tokens{' beside an answer' if most < spec.context else ''}"
        reason = f"{expected} in {spec.name}'s context of {spec.context}, found {num_prompt}; shorten it"
        raise ContextExceeded("prompt", reason, num_tokens=num_prompt, most=most, context=spec.context)


def check_token_ids(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise InputError for an id outside the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        outside = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InputError(name, f"expected token ids from 0 to {vocab_size - 1}, found {outside}")


def most_prompt(spec: ModelSpec, max_tokens: int | None) -> int:
    """Return how many tokens a prompt may have: all of the context where nothing is generated."""
    return spec.context - (max_tokens != 0)


def most_rows(request: Request, context: int) -> int:
    """Return the rows that admission reserves in every cache for the request and its whole answer."""
    decoder = request.decode.make_decoder(request.eos, ChainCosts(1))
    return len(request.prompt) + room_for_answer(request, context) + decoder.num_ahead


def room_for_answer(request: Request, context: int) -> int:
    """Return how many tokens may be generated: `max_tokens`, cut to the context, and at least 1."""
    return max(1, min(request.max_tokens, context - len(request.prompt)))
