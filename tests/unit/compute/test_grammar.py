"""What is kept of grammars, and which are refused, on the bundled model's tokenizer."""

import pytest
from llguidance import LLMatcher

from protos.brigade_pb2 import Grammar
from worker.compute.grammar import Grammars, _read_tokenizer
from worker.errors import SamplingError
from worker.model.checkpoint import DEMO

VOCAB = 2048
DIGITS = LLMatcher.grammar_from_regex("[0-9]+")


def test_a_tokenizer_for_every_choice_of_ends_is_not_kept_for_ever() -> None:
    grammars = Grammars(DEMO, VOCAB)
    for eos in range(8):
        grammars.guide(Grammar(text=DIGITS, eos=[eos]))
    assert _read_tokenizer.cache_info().currsize == 4


def test_an_end_that_is_no_token_is_refused() -> None:
    with pytest.raises(SamplingError, match=f"below {VOCAB}, got {VOCAB}"):
        Grammars(DEMO, VOCAB).guide(Grammar(text=DIGITS, eos=[1, VOCAB]))


def test_a_grammar_whose_compilation_would_hold_up_every_session_is_refused() -> None:
    rules = [f'r{n}: "a{n}" | "b{n}"' for n in range(8000)]
    lark = "\n".join(["start: " + " ".join(f"r{n}" for n in range(8000)), *rules])
    with pytest.raises(SamplingError, match=r"grammar size .* too big"):
        Grammars(DEMO, VOCAB).guide(Grammar(text=LLMatcher.grammar_from_lark(lark), eos=[2]))
