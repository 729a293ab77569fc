"""Requests: which are refused, and how many rows they need."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from coordinator.decoding.decode_options import Decode
from coordinator.sessions.request import (
    Request,
    SamplingParams,
    check_request,
    check_sampling,
    make_sampling,
    most_rows,
    room_for_answer,
)
from protos.brigade_pb2 import DTYPE_BFLOAT16, Grammar, Sampling
from worker.errors import InputError
from worker.model.cache_spec import Memory
from worker.model.model_spec import LayerSpec, ModelSpec

VOCAB, CONTEXT = 97, 128
SPEC = ModelSpec(
    "tiny", "qwen3", (LayerSpec(1, (Memory(None, 1, 1, 1, 1),)),), 1, 1, False, 8, VOCAB, CONTEXT, DTYPE_BFLOAT16
)
GOOD = Request(prompt=(1, 2, 3), max_tokens=5)

NUMBERS = {  # the field of Sampling, and its range
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "top_n_sigma": (0, 100),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 10),
}


def test_every_number_of_the_proto_has_a_range_with_its_ends() -> None:
    fields = Sampling.DESCRIPTOR.fields_by_name
    assert NUMBERS.keys() == {name for name, field in fields.items() if field.cpp_type == field.CPPTYPE_DOUBLE}
    for field, (low, high) in NUMBERS.items():
        for value in (low, high):
            check_sampling(Sampling(**{field: value}))
        for value in (low - 0.01, high + 0.01, math.inf, -math.inf, math.nan):
            with pytest.raises(InputError, match=f"^{field}: expected a number from {low} to {high}, got"):
                check_sampling(Sampling(**{field: value}))


@pytest.mark.parametrize(
    "parameters",
    [
        *({name: -1000} for name in sorted(SamplingParams.__annotations__.keys() - {"logit_bias"})),
        {"top_k": -1}, {"top_k": 2**32}, {"seed": -1}, {"seed": 2**64}, {"top_p": 1.5},
        {"top_p": 1e-50}, {"repetition_penalty": 1e-40}, {"temperature": 1e-7},
        *({"logit_bias": {token: 1.0}} for token in (-1, 2**32)),
        *({"logit_bias": {1: bias}} for bias in (1e10, math.nan, math.inf, -math.inf)),
    ],
    ids=str,
)  # fmt: skip
def test_a_parameter_outside_its_range_is_refused_with_its_name(parameters: dict) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(parameters))}: "):
        check_sampling(make_sampling(**{"seed": 0, "top_k": 0} | parameters))


def test_parameters_become_a_sampling_as_they_are_and_a_seed_that_is_not_given_is_another_each_time() -> None:
    made = make_sampling(seed=2**64 - 1, top_k=40, temperature=0.7, logit_bias={5: -1.5}, logprobs=3)
    assert made == Sampling(seed=2**64 - 1, top_k=40, temperature=0.7, logit_bias={5: -1.5}, logprobs=3)
    assert len({make_sampling(seed=None, top_k=0).seed for _ in range(20)}) > 15
    assert {make_sampling(seed=0, top_k=0).seed for _ in range(20)} == {0}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, VOCAB)}, "prompt"),
        ({"prompt": (1, -1)}, "prompt"),
        ({"prompt": (1,) * CONTEXT}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"repeat_guard": 1}, "repeat_guard"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"sampling": Sampling(top_k=VOCAB)}, "top_k"),
        ({"sampling": Sampling(logprobs=VOCAB + 1)}, "logprobs"),
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"sampling": Sampling(min_tokens=GOOD.max_tokens + 1)}, "min_tokens"),
        ({"sampling": Sampling(min_tokens=1, grammar=Grammar(text="x"))}, "min_tokens"),
        ({}, None),
        ({"prompt": (0, VOCAB - 1)}, None),
        ({"prompt": (1,) * (CONTEXT - 1)}, None),
        ({"max_tokens": 10**6}, None),
        ({"sampling": Sampling(min_tokens=GOOD.max_tokens)}, None),
        ({"sampling": Sampling(top_k=VOCAB - 1, logprobs=VOCAB, logit_bias={0: 1.0, VOCAB - 1: -1.0})}, None),
        ({"sampling": Sampling(temperature=0.7, top_p=1.0, min_p=0.05, repetition_penalty=1.1)}, None),
    ],
)
def test_a_request_is_refused_only_where_the_model_cannot_serve_it(changes: dict[str, Any], field: str | None) -> None:
    with pytest.raises(InputError) if field else nullcontext() as caught:
        check_request(replace(GOOD, **changes), SPEC)
    assert caught is None or caught.value.field == field


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"), [(3, 5, 5), (120, 5, 5), (123, 5, 5), (124, 5, 4), (127, 5, 1), (1, 1, 1)]
)
def test_an_answer_ends_where_the_context_ends(num_prompt: int, max_tokens: int, expected: int) -> None:
    assert room_for_answer(Request((1,) * num_prompt, max_tokens), CONTEXT) == expected


@pytest.mark.parametrize(
    ("decode", "max_tokens", "rows"),
    [
        (Decode("ar"), 20, 30 + 20),
        (Decode("ngram"), 20, 30 + 20),
        (Decode("diffusion"), 20, 30 + 20 + 47),
        (Decode("diffusion", 4), 20, 30 + 20 + 5),
        (Decode("diffusion-fast"), 20, 30 + 20 + 15),
        (Decode("ar"), 1000, 128),  # the context ends there
    ],
)
def test_a_request_needs_rows_for_its_tokens_and_its_decoder(decode: Decode, max_tokens: int, rows: int) -> None:
    assert most_rows(Request(tuple(range(30)), max_tokens, decode=decode), 128) == rows
