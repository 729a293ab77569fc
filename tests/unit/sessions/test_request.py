import math
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
from protos.brigade_pb2 import DTYPE_BFLOAT16, Sampling
from worker.errors import InputError
from worker.model.cache_spec import Memory
from worker.model.model_spec import LayerSpec, ModelSpec

VOCAB, CONTEXT = 97, 128
SPEC = ModelSpec(
    name="tiny",
    family="qwen3",
    tied=False,
    layers=(LayerSpec(1, (Memory(None, 1, 1, 1, 1),)),),
    embed_bytes=1,
    head_bytes=1,
    hidden_size=8,
    vocab_size=VOCAB,
    context=CONTEXT,
    dtype=DTYPE_BFLOAT16,
)
GOOD = Request(prompt=(1, 2, 3), max_tokens=5)

NUMBERS = {  # the field of Sampling, and its range
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
}


def test_every_number_of_the_proto_has_a_range_with_its_ends() -> None:
    fields = Sampling.DESCRIPTOR.fields_by_name
    assert NUMBERS.keys() == {name for name, field in fields.items() if field.cpp_type == field.CPPTYPE_DOUBLE}
    for field, (low, high) in NUMBERS.items():
        for value in (low, high):
            check_sampling(Sampling(**{field: value}))
        for value in (low - 0.01, high + 0.01, math.inf, -math.inf, math.nan):
            with pytest.raises(InputError) as caught:
                check_sampling(Sampling(**{field: value}))
            assert str(caught.value) == f"{field}: expected a number from {low} to {high}, got {value:g}"
    for bias in (math.nan, math.inf, -math.inf):
        with pytest.raises(InputError, match=r"^logit_bias: expected a number from .* to .*, got"):
            check_sampling(Sampling(logit_bias={5: bias}))


@pytest.mark.parametrize(
    "parameters",
    [
        *({name: -1000} for name in sorted(SamplingParams.__annotations__.keys() - {"logit_bias"})),
        {"top_k": -1}, {"top_k": 2**32}, {"seed": -1}, {"seed": 2**64}, {"top_p": 1.5},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {2**32: 1.0}}, {"logit_bias": {1: 1e10}},
    ],
)  # fmt: skip
def test_a_parameter_outside_its_range_is_refused_with_its_name_and_range(parameters: dict) -> None:
    with pytest.raises(
        InputError, match=rf"^{next(iter(parameters))}: expected a (whole )?number from \S+ to \S+, got"
    ):
        make_sampling(**{"seed": 0, "top_k": 0} | parameters)


def test_parameters_become_a_sampling_as_they_are_and_a_seed_that_is_not_given_is_another_each_time() -> None:
    made = make_sampling(seed=2**64 - 1, top_k=40, temperature=0.7, logit_bias={5: -1.5}, logprobs=3)
    assert made == Sampling(seed=2**64 - 1, top_k=40, temperature=0.7, logit_bias={5: -1.5}, logprobs=3)
    assert len({make_sampling(seed=None, top_k=0).seed for _ in range(20)}) > 15
    assert {make_sampling(seed=0, top_k=0).seed for _ in range(20)} == {0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ()}, "^prompt: expected at least one token, found none"),
        ({"prompt": (1, VOCAB)}, "^prompt: expected token ids from 0 to 96, found 97"),
        ({"prompt": (1, -1)}, "^prompt: expected token ids from 0 to 96, found -1"),
        ({"max_tokens": 0}, "^max_tokens: expected at least 1, got 0"),
        ({"max_tokens": -5}, "^max_tokens: expected at least 1, got -5"),
        ({"repeat_guard": 1}, "^repeat_guard: expected 0 for none or at least 2 times, got 1"),
        ({"prompt": (1,) * CONTEXT}, "^prompt: expected less than the 128 tokens that tiny .*, found 128"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "^logit_bias: expected token ids from 0 to 96, found 97"),
        ({"sampling": Sampling(top_k=VOCAB)}, "^top_k: expected less than the vocabulary's 97, got 97"),
        ({"sampling": Sampling(logprobs=VOCAB + 1)}, "^logprobs: expected less than .* 97, got 97"),
        ({"sampling": Sampling(temperature=-1)}, "^temperature: expected a number from 0 to 100, got -1"),
        ({}, None),
        ({"prompt": (0, VOCAB - 1)}, None),
        ({"prompt": (1,) * (CONTEXT - 1)}, None),
        ({"max_tokens": 10**6}, None),
        ({"sampling": Sampling(top_k=VOCAB - 1, logprobs=VOCAB, logit_bias={0: 1.0, VOCAB - 1: -1.0})}, None),
        ({"sampling": Sampling(temperature=0.7, top_p=1.0, min_p=0.05, repetition_penalty=1.1)}, None),
    ],
)
def test_a_request_is_refused_where_the_model_cannot_serve_it_and_nowhere_else(
    changes: dict[str, Any], words: str | None
) -> None:
    if words is None:
        check_request(replace(GOOD, **changes), SPEC)
    else:
        with pytest.raises(InputError, match=words):
            check_request(replace(GOOD, **changes), SPEC)


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
def test_the_rows_of_a_request_are_those_of_its_tokens_and_of_what_its_decoder_needs_beyond(
    decode: Decode, max_tokens: int, rows: int
) -> None:
    assert most_rows(Request(tuple(range(30)), max_tokens, decode=decode), 128) == rows
