"""What is kept of grammars, and which are refused, on the bundled model's tokenizer."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from protos.brigade_pb2 import Grammar
from worker.compute import grammar
from worker.compute.grammar import Grammars, Guide, read_tokenizer
from worker.errors import SamplingError
from worker.model.checkpoint import DEMO

VOCAB = 2048
TAGS = ("<b>", "</b>")  # of Gemma's tokenizer, for example
DIGITS = LLMatcher.grammar_from_regex("[0-9]+")


def answer(guide: Guide, num_tokens: int, eos: int | None = None) -> list[int]:
    """The first allowed token at each place, up to the end."""
    tokens: list[int] = []
    while len(tokens) < num_tokens and eos not in tokens:
        [allowed] = guide.allowed(tokens, [len(tokens)], 1).tolist()
        tokens.append(allowed.index(True))
    return tokens


def test_a_tokenizer_for_every_choice_of_ends_is_not_kept_for_ever() -> None:
    grammars = Grammars(DEMO, VOCAB)
    for eos in range(8):
        grammars.guide(Grammar(text=DIGITS, eos=[eos]))
    assert read_tokenizer.cache_info().currsize == 4


@pytest.mark.parametrize(("num_sessions", "num_text", "num_kept"), [(100, 10**6, 100), (100, 1000, 16), (10, 1, 10)])
def test_a_grammar_is_kept_for_every_session_that_may_wait_within_so_much_text(
    num_sessions: int, num_text: int, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MOST_TEXT", num_text)
    grammars, compiled, compile_one = Grammars(DEMO, VOCAB), list[str](), Grammars.compile

    def noted(self: Grammars, given: Grammar) -> LLMatcher:
        compiled.append(given.text)
        return compile_one(self, given)

    monkeypatch.setattr(Grammars, "compile", noted)
    asked = [Grammar(text=LLMatcher.grammar_from_regex(f"[0-9]{{{n}}}"), eos=[2]) for n in range(1, num_sessions + 1)]
    for each in (*asked, *reversed(asked)):
        grammars.guide(each)
    assert len(compiled) == num_sessions + num_sessions - num_kept


def test_a_grammar_that_was_compiled_for_one_key_saves_no_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled, compile_one = Grammars(DEMO, VOCAB), list[str](), Grammars.compile

    def noted(self: Grammars, given: Grammar) -> LLMatcher:
        compiled.append(given.owner)
        return compile_one(self, given)

    monkeypatch.setattr(Grammars, "compile", noted)
    for owner in ("", "alice", "bob", "alice", ""):
        grammars.guide(Grammar(text=DIGITS, eos=[2], owner=owner))
    assert compiled == ["", "alice", "bob"]


def test_an_answer_that_does_not_match_its_grammar_is_an_error_and_a_draft_that_does_not_is_none() -> None:
    guide = Grammars(DEMO, VOCAB).guide(Grammar(text=DIGITS, eos=[2]))
    [allowed] = guide.allowed([], [0], 1).tolist()
    wrong = allowed.index(False)
    assert guide.allowed([wrong], [0, 1], 2).tolist() == [allowed, [True] * VOCAB]
    with pytest.raises(SamplingError, match="does not match its grammar from its token 0 on"):
        guide.allowed([wrong], [1], 1)


def test_an_end_that_is_no_token_and_a_grammar_that_would_hold_up_every_session_are_refused() -> None:
    rules = [f'r{n}: "a{n}" | "b{n}"' for n in range(8000)]
    long = LLMatcher.grammar_from_lark("\n".join(["start: " + " ".join(f"r{n}" for n in range(8000)), *rules]))
    for text, end, said in ((DIGITS, VOCAB, f"below {VOCAB}, got {VOCAB}"), (long, 2, r"grammar size .* too big")):
        with pytest.raises(SamplingError, match=said):
            Grammars(DEMO, VOCAB).guide(Grammar(text=text, eos=[1, end]))


def test_a_grammar_that_became_too_complex_says_so_and_is_compiled_anew_for_the_next_answer() -> None:
    parts = [f"[abc]*{'abc'[i % 3]}[abc]{{{200 + 7 * i}}}{chr(100 + i % 20)}" for i in range(90)]
    grammar = Grammar(text=LLMatcher.grammar_from_regex("(" + "|".join(parts) + ")"), eos=[2])
    grammars = Grammars(DEMO, VOCAB)

    first, other = grammars.guide(grammar), grammars.guide(grammar)
    with pytest.raises(SamplingError, match=r"^the grammar cannot go on: .*too many"):
        answer(first, 250)
    with contextlib.suppress(SamplingError):
        answer(other, 12)
    assert len(answer(grammars.guide(grammar), 12)) == 12


@pytest.mark.parametrize("num_drafts", [1, 3, 15])
def test_after_rejected_drafts_the_same_tokens_are_allowed_as_without_them(num_drafts: int) -> None:
    """The drafts go down one branch of the grammar, the tokens that were drawn instead down the other."""
    text = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    a, seven, c, x = (text.encode(letter, add_special_tokens=False).ids[0] for letter in "a7cx")
    grammars, regex = Grammars(DEMO, VOCAB), LLMatcher.grammar_from_regex("a[0-9]+b|c[x-z]+d")
    guide, other = (grammars.guide(Grammar(text=regex, eos=[2])) for _ in range(2))
    drafts = [a, *[seven] * num_drafts]
    assert not guide.allowed(drafts, range(len(drafts) + 1), len(drafts) + 1).all().item(), "the grammar takes them"
    expected = other.allowed([c, x], [0, 1, 2], 3).tolist()
    assert expected[1][x] and not expected[1][seven]
    assert guide.allowed([c, x], [0, 1, 2], 3).tolist() == expected
    guide.allowed([c, x, x], [3], 1)
    assert guide.allowed_next([c]).tolist() == expected[1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text", ["a <|mask|> b", "<|im_end|>", "[<|im_start|>]<|im_end|>", "<b>ab</b>", "e\u0301 \uff5e"]
)
def test_a_text_in_a_grammar_is_spelled_without_special_tokens_and_as_it_is(text: str, tmp_path: Path) -> None:
    """Though the tokenizer writes it otherwise: llguidance asks it where only one text may follow."""
    content = json.loads((DEMO / "tokenizer.json").read_text())
    added = [
        {**content["added_tokens"][0], "id": VOCAB + n, "content": tag, "special": False} for n, tag in enumerate(TAGS)
    ]
    content |= {"added_tokens": [*content["added_tokens"], *added], "normalizer": {"type": "NFKC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    guide = Grammars(tmp_path, VOCAB + len(TAGS)).guide(
        Grammar(text=LLMatcher.grammar_from_regex(re.escape(text)), eos=[2])
    )
    *tokens, end = answer(guide.copy(), 60, eos=2)
    plain = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert end == 2 and plain.decode(tokens, skip_special_tokens=True) == text


def test_a_special_token_that_a_grammar_asks_for_ends_the_answer_too() -> None:
    grammar = LLMatcher.grammar_from_lark('start: "7" <[2]> "8"')
    assert answer(Grammars(DEMO, VOCAB).guide(Grammar(text=grammar, eos=[2])), 9, eos=2)[1:] == [2]
