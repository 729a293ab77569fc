from typing import Any

import pytest

from coordinator.resident.channels import Delta
from coordinator.sessions.answer import Piece, Token, Usage
from coordinator.shapes.body import read
from coordinator.shapes.openai_completions import Choice, CompletionAnswer, CompletionBody
from worker.errors import InputError

EOS = 9
LETTERS = {0: "a", 1: "bc", 2: "\ufffd", 3: "\ufffd", EOS: "<eos>"}


class Letters:
    """Two half characters make one; nothing is held back otherwise."""

    is_stopped = False

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
    return Token(number, logprob, tuple(Token(*other) for other in others))


def delta(text: str, *tokens: Token, finish_reason: str | None = None, num_prompt: int = 3) -> Delta:
    usage = Usage(num_prompt, 0, 1, 1, 1, num_generated=2) if finish_reason else None
    return Delta(Piece(text, tokens, 0, finish_reason, usage), text, finish_reason=finish_reason)


def answer(*choices: Choice, num_prompts: int = 1) -> CompletionAnswer:
    return CompletionAnswer("id", "talker", 0, LETTERS.__getitem__, choices, num_prompts)


def test_each_token_has_its_place_in_the_text_though_some_make_a_character_together() -> None:
    deltas = [delta("abc", token(0), token(1)), delta("", token(2)), delta("é", token(3))]
    deltas.append(delta("a", token(0), token(EOS), finish_reason="stop"))
    whole = answer(Choice(text=Letters(), eos=frozenset({EOS}))).whole([deltas])["choices"][0]
    assert whole["text"] == "abcéa"
    assert whole["logprobs"]["text_offset"] == [0, 1, 3, 3, 4, 5]
    streaming = answer(Choice(text=Letters(), eos=frozenset({EOS})))
    chunks = [streaming.chunk(0, each) for each in deltas]
    offsets = [place for chunk in chunks if chunk for place in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


def test_the_token_that_was_taken_is_among_the_likeliest_and_look_alikes_are_told_once() -> None:
    found = delta("a", token(0, -2.0, (1, -0.5), (2, -1.0), (3, -1.5)), finish_reason="length")
    logprobs: Any = answer(Choice(text=Letters())).whole([[found]])["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"bc": -0.5, "\ufffd": -1.0, "a": -2.0}]
    assert logprobs["tokens"] == ["a"] and logprobs["token_logprobs"] == [-2.0]


def test_infinitely_unlikely_tokens_are_numbers_of_json() -> None:
    found = delta("a", token(0, float("-inf"), (1, float("-inf"))), finish_reason="length")
    logprobs: Any = answer(Choice(text=Letters())).whole([[found]])["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] and logprobs["top_logprobs"][0]["bc"] == -9999.0


def test_usage_counts_each_prompt_once_and_all_that_was_generated() -> None:
    lasts = [delta("a", token(0), finish_reason="stop", num_prompt=length) for length in (3, 3, 5, 5)]
    usage = answer(*[Choice() for _ in lasts], num_prompts=2).whole([[last] for last in lasts])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 8, 16)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("more", [{"max_tokens": 0}, {"logprobs": 1}])
def test_who_asks_what_a_prompt_is_worth_is_told_who_tells(more: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"how likely prompts are is told by /v1/score$"):
        read(CompletionBody, {"prompt": "a", "echo": True} | more)


def test_an_echoed_prompt_comes_first_and_moves_the_places() -> None:
    streaming = answer(Choice("xyz", Letters()))
    opening = streaming.opening(0)
    assert opening and opening["choices"][0]["text"] == "xyz"
    chunk = streaming.chunk(0, delta("a", token(0)))
    assert chunk and chunk["choices"][0]["logprobs"]["text_offset"] == [3]
    assert answer(Choice()).opening(0) is None
