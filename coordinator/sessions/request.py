"""Request: what a user asks for, checked before any node is troubled with it. Pure."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

from coordinator.decoding.decode import Decode
from coordinator.planning.costs import StepCosts
from coordinator.sessions.answer import Known
from coordinator.sessions.session import Session
from protos.brigade_pb2 import CACHE_INT8, CACHE_ROTATING, Cache, Sampling
from worker.errors import ContextExceeded, InputError
from worker.model.modelspec import ModelSpec

_COLDEST = 1e-6  # below it the division by the temperature leaves float32


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    decode: Decode = field(default_factory=Decode)
    cache: Cache = field(default_factory=Cache)
    stops: tuple[str, ...] = ()
    eos: frozenset[int] = frozenset()
    repeat_guard: int = 0  # end once the last tokens repeat so many times; 0 never does
    score_from: int | None = None  # index of the first token of the prompt whose likelihood is asked for, from 1
    known: Known = field(default_factory=Known)  # the answer so far, by its journal


def make_sampling(*, seed: int | None = None, top_k: int = 0, **parameters: Any) -> Sampling:
    """Sampling parameters, with a random seed if none is given. Raises InputError for a value that none can have."""
    biased = [("logit_bias", token, 32) for token in parameters.get("logit_bias", ())]
    for name, number, bits in (("seed", seed or 0, 64), ("top_k", top_k, 32), *biased):
        if not 0 <= number < 2**bits:
            raise InputError(name, f"expected a whole number from 0 to {2**bits - 1}, got {number}")
    sampling = Sampling(seed=random.getrandbits(32) if seed is None else seed, top_k=top_k, **parameters)
    check_sampling(sampling)
    return sampling


def check_sampling(sampling: Sampling) -> None:
    """Raises InputError, naming the parameter, for a value outside its range."""
    for name, value, low, high in (
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, 100.0),
        ("presence_penalty", sampling.presence_penalty, -100.0, 100.0),
        ("frequency_penalty", sampling.frequency_penalty, -100.0, 100.0),
        *(("logit_bias", bias, -1e9, 1e9) for bias in sampling.logit_bias.values()),
    ):
        if not (math.isfinite(value) and low <= value <= high):
            raise InputError(name, f"expected a number from {low:g} to {high:g}, got {value:g}")
    if 0 < sampling.temperature < _COLDEST:
        raise InputError("temperature", f"expected 0 or at least {_COLDEST:g}, got {sampling.temperature:g}")


def check_request(request: Request, spec: ModelSpec) -> None:
    """Refuse what the model cannot serve.

    Raises:
        ContextExceeded: a prompt that leaves no room for an answer.
        InputError: an empty prompt, ids outside the vocabulary, a cache that the model's heads do not suit.
    """
    check_sampling(request.sampling)
    if not request.prompt:
        raise InputError("prompt", "expected at least one token, found none")
    if outside := [token for token in request.prompt if not 0 <= token < spec.vocab_size]:
        raise InputError("prompt", f"expected token ids from 0 to {spec.vocab_size - 1}, found {outside[0]}")
    if outside := [token for token in request.sampling.logit_bias if token >= spec.vocab_size]:
        raise InputError("logit_bias", f"expected token ids from 0 to {spec.vocab_size - 1}, found {outside[0]}")
    for name, count in (("top_k", request.sampling.top_k), ("logprobs", request.sampling.logprobs - 1)):
        if count >= spec.vocab_size:
            raise InputError(name, f"expected less than the vocabulary's {spec.vocab_size}, got {count}")
    refusals = {CACHE_INT8: ("int8", spec.int8_refusal), CACHE_ROTATING: ("rotating", spec.rotating_refusal)}
    kind, refusal = refusals.get(request.cache.kind, ("", ""))
    if refusal:
        raise InputError("kv", f"{spec.name} cannot have {kind} caches: {refusal}; use full")
    if request.sampling.HasField("grammar") and request.decode.kind == "diffusion-fast":
        raise InputError("decode", "expected ar, ngram or diffusion: diffusion-fast cannot keep to a grammar")
    if request.score_from is not None:
        _check_scored(request)
    if request.max_tokens < 1:
        raise InputError("max_tokens", f"expected at least 1, got {request.max_tokens}")
    if len(request.prompt) >= spec.context:
        raise ContextExceeded(
            "prompt",
            f"expected less than the {spec.context} tokens that {spec.name} has room for, found "
            f"{len(request.prompt)}; shorten it",
        )


def _check_scored(request: Request) -> None:
    if request.decode.kind != "ar":
        raise InputError("decode", f"expected ar, which likelihoods of the prompt go with, got {request.decode.kind}")
    if request.score_from is not None and not 1 <= request.score_from < len(request.prompt):
        raise InputError("prompt", "expected at least two tokens: the first one follows nothing that could tell of it")


def most_rows(request: Request, context: int) -> int:
    """Rows that every cache must have room for until the request is answered, as admission counts them."""
    decoder = request.decode.make_decoder(request.eos, StepCosts())
    return Session(request.prompt, room_for_answer(request, context), decoder=decoder).most_rows


def room_for_answer(request: Request, context: int) -> int:
    """How many tokens may be generated: `max_tokens`, or less where the context ends."""
    return min(request.max_tokens, context - len(request.prompt))
