from typing import Any

import pytest

from coordinator.api.body import read
from coordinator.api.completions import Choice, CompletionAnswer, CompletionBody
from coordinator.sessions.output import Output, Scored, Token, Usage
from protos.brigade_pb2 import Alternative, Sample
from worker.errors import InputError

EOS = 9
LETTERS = {0: "a", 1: "bc", 2: "\ufffd", 3: "\ufffd", EOS: "<eos>"}


class Letters:
    """Two half characters make one; nothing is held back otherwise."""

    stopped_by = None

    def __init__(self) -> None:
        self._has_half = False

    def push(self, token: int) -> str:
        if token in (2, 3):
            self._has_half = not self._has_half
            return "" if self._has_half else "é"
        return LETTERS[token]

    def finish(self) -> str:
        return ""


def token(number: int, logprob: float = -1.0, *others: tuple[int, float]) -> Token:
    alternatives = [Alternative(token=other, logprob=value) for other, value in others]
    return Token.of(Sample(token=number, logprob=logprob, alternatives=alternatives))


def delta(text: str, *tokens: Token, finish_reason: str | None = None, num_prompt: int = 3) -> Output:
    usage = Usage(num_prompt, 0, 1, 1, 1, num_generated=2) if finish_reason else None
    return Output(text, tokens, 0, finish_reason, usage, content=text)


def answer(*choices: Choice, **fields: Any) -> CompletionAnswer:
    made = CompletionAnswer(read(CompletionBody, {"prompt": "a"} | fields), "talker")
    made.token_text, made.choices = LETTERS.__getitem__, list(choices)
    return made


def chunks(answer: CompletionAnswer, *outputs: Output) -> list[Any]:
    """The choices of a stream's events."""
    return [event["choices"][0] for output in outputs for event in answer.events(0, output)]


def letters() -> Any:
    return Letters()


def test_each_token_has_its_place_in_the_text_though_some_make_a_character_together() -> None:
    deltas = [delta("abc", token(0), token(1)), delta("", token(2)), delta("é", token(3))]
    deltas.append(delta("a", token(0), token(EOS), finish_reason="stop"))
    whole = answer(Choice(parser=letters(), eos=frozenset({EOS}))).whole([deltas])["choices"][0]
    assert whole["text"] == "abcéa" and whole["logprobs"]
    assert whole["logprobs"]["text_offset"] == [0, 1, 3, 3, 4, 5]
    streaming = answer(Choice(parser=letters(), eos=frozenset({EOS})))
    offsets = [place for chunk in chunks(streaming, *deltas) for place in chunk["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


def test_the_token_that_was_taken_is_among_the_likeliest_and_look_alikes_are_told_once() -> None:
    found = delta("a", token(0, -2.0, (1, -0.5), (2, -1.0), (3, -1.5)), finish_reason="length")
    logprobs: Any = answer(Choice(parser=letters())).whole([[found]])["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"bc": -0.5, "\ufffd": -1.0, "a": -2.0}]
    assert logprobs["tokens"] == ["a"] and logprobs["token_logprobs"] == [-2.0]


def test_infinitely_unlikely_tokens_are_numbers_of_json() -> None:
    found = delta("a", token(0, float("-inf"), (1, float("-inf"))), finish_reason="length")
    logprobs: Any = answer(Choice(parser=letters())).whole([[found]])["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] and logprobs["top_logprobs"][0]["bc"] == -9999.0


def test_usage_counts_each_prompt_once_and_all_that_was_generated() -> None:
    lasts = [delta("a", token(0), finish_reason="stop", num_prompt=length) for length in (3, 3, 5, 5)]
    usage = answer(*[Choice() for _ in lasts], prompt=["a", "b"], n=2).whole([[last] for last in lasts])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 8, 16)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


def test_no_token_at_all_is_only_asked_for_to_score_a_prompt() -> None:
    for more in ({}, {"echo": True}, {"logprobs": 1}):
        with pytest.raises(InputError) as refused:
            read(CompletionBody, {"prompt": "a", "max_tokens": 0} | more)
        assert refused.value.field == "max_tokens"
    assert read(CompletionBody, {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}).scores_prompts


def test_an_echoed_prompt_comes_first_and_moves_the_places() -> None:
    opening, chunk = chunks(answer(Choice("xyz", parser=letters())), delta("a", token(0)))
    assert opening["text"] == "xyz" and chunk["logprobs"]["text_offset"] == [3]
    assert len(chunks(answer(Choice()), delta("a", token(0)))) == 1


def scored(*tokens: Token) -> Output:
    return Output("", (), 0, scores=[Scored(each, is_greedy=True) for each in tokens])


def test_the_tokens_of_an_echoed_prompt_have_log_probabilities_but_for_the_first() -> None:
    outputs = [
        scored(token(1, -0.5, (1, -0.5))), scored(token(0, -2.0, (1, -0.25))),
        delta("a", token(0, -3.0, (0, -3.0)), finish_reason="length"),
    ]  # fmt: skip
    expected = {
        "tokens": ["a", "bc", "a", "a"],
        "token_logprobs": [None, -0.5, -2.0, -3.0],
        "top_logprobs": [None, {"bc": -0.5}, {"bc": -0.25, "a": -2.0}, {"a": -3.0}],
        "text_offset": [0, 1, 3, 4],
    }
    choice = Choice("abca", (0, 1, 0), letters())
    whole = answer(choice, echo=True, logprobs=1).whole([outputs])["choices"][0]
    assert (whole["text"], whole["logprobs"]) == ("abcaa", expected)
    opening, chunk = chunks(answer(Choice("abca", (0, 1, 0), letters()), echo=True, logprobs=1), *outputs)
    assert opening["text"] == "abca" and opening["finish_reason"] is None
    assert {name: [*opening["logprobs"][name], *chunk["logprobs"][name]] for name in expected} == expected


def test_a_prompt_that_is_only_scored_has_no_answer() -> None:
    outputs = [scored(token(1, -0.5, (1, -0.5))), delta("", finish_reason="length")]
    whole = answer(Choice("abc", (0, 1), letters()), echo=True, logprobs=1).whole([outputs])["choices"][0]
    assert whole["text"] == "abc" and whole["logprobs"] and whole["logprobs"]["token_logprobs"] == [None, -0.5]
