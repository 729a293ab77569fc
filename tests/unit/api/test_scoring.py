"""What classes are told of."""

import pytest

from coordinator.api.body import read
from coordinator.api.scoring import ScoreBody, classification
from coordinator.sessions.output import Scored, Token
from worker.errors import InputError


def test_probabilities_are_over_the_labels() -> None:
    answers = [[Scored(Token(1, -1000.0), False)], [Scored(Token(2, -500.0), True), Scored(Token(3, -500.0), False)]]
    told = classification("m", ["no", "yes"], answers)
    assert told["label"] == "no" and [each["probability"] for each in told["labels"]] == [0.5, 0.5]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "prompt_tokens": [1]}, {"prompt": "a", "continuations": [""]}])
def test_a_body_without_one_prompt_and_continuations_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(InputError):
        read(ScoreBody, {"continuations": ["b"]} | body)
