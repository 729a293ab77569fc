"""A grammar's matcher after drafts that were rejected."""

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from protos.brigade_pb2 import Grammar
from worker.compute.grammar import Grammars
from worker.model.checkpoint import DEMO

VOCAB = 2048
REGEX = LLMatcher.grammar_from_regex("a[0-9]+b|c[x-z]+d")


@pytest.mark.parametrize("num_drafts", [1, 3, 15])
def test_after_rejected_drafts_the_same_tokens_are_allowed_as_without_them(num_drafts: int) -> None:
    """The drafts go down one branch of the grammar, the tokens that were drawn instead down the other."""
    text = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    a, seven, c, x = (text.encode(letter, add_special_tokens=False).ids[0] for letter in "a7cx")
    grammars = Grammars(DEMO, VOCAB)
    guide, other = (grammars.guide(Grammar(text=REGEX, eos=[2])) for _ in range(2))
    drafts = [a, *[seven] * num_drafts]
    assert not guide.allowed(drafts, range(len(drafts) + 1), len(drafts) + 1).all().item(), "the grammar takes them"
    expected = other.allowed([c, x], [0, 1, 2], 3).tolist()
    assert expected[1][x] and not expected[1][seven]
    assert guide.allowed([c, x], [0, 1, 2], 3).tolist() == expected
    guide.allowed([c, x, x], [3], 1)
    assert guide.allowed_next([c]).tolist() == expected[1]  # type: ignore[union-attr]
