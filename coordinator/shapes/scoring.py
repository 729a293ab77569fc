"""Bodies and answers of `/v1/score` and `/v1/classify`, shapes of our own. Pure."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coordinator.sessions.answer import Scored
from coordinator.shapes.body import Section
from coordinator.shapes.openai_objects import Told

Json = dict[str, Any]
Ids = Annotated[tuple[int, ...], Field(min_length=1)]
Words = Annotated[str, Field(min_length=1)]
_MOST = 128  # continuations of one request


class _Prompted(Section):
    model: str | None = None
    prompt: str | None = None
    prompt_tokens: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _agree(self) -> "_Prompted":
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise ValueError("expected either prompt or prompt_tokens")
        return self

    @property
    def given(self) -> str | tuple[int, ...]:
        """The prompt in its form."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        assert self.prompt is not None
        return self.prompt


class ScoreBody(_Prompted):
    """Continuations of a prompt, each as text or as token ids."""

    continuations: list[Words | Ids] = Field(min_length=1, max_length=_MOST)


class ClassifyBody(_Prompted):
    """Labels of which one is to follow the prompt."""

    labels: list[Words] = Field(min_length=1, max_length=_MOST)


class Scores(Told):
    """Of one continuation: log-probabilities in nats, in all and by token."""

    logprob: float
    is_greedy: bool
    tokens: list[int]
    logprobs: list[float]


class ScoreAnswer(Told):
    object: Literal["score"]
    model: str
    scores: list[Scores]


class LabelScore(Told):
    label: str
    logprob: float
    probability: float


class ClassifyAnswer(Told):
    object: Literal["classification"]
    model: str
    label: str
    labels: list[LabelScore]


def score_answer(model: str, answers: Sequence[Sequence[Scored]]) -> Json:
    """The log-probability of each continuation, and whether it is what the likeliest tokens would make."""
    return {"object": "score", "model": model, "scores": [_score(scores) for scores in answers]}


def classify_answer(model: str, labels: Sequence[str], answers: Sequence[Sequence[Scored]]) -> Json:
    """The probability of each label, if it is one of them."""
    logprobs = [_sum(scores) for scores in answers]
    best = max(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    found = [
        {"label": label, "logprob": logprob, "probability": weight / sum(weights)}
        for label, logprob, weight in zip(labels, logprobs, weights, strict=True)
    ]
    return {"object": "classification", "model": model, "label": labels[logprobs.index(best)], "labels": found}


def _score(scores: Sequence[Scored]) -> Json:
    return {
        "logprob": _sum(scores),
        "is_greedy": all(score.is_greedy for score in scores),
        "tokens": [score.token.token for score in scores],
        "logprobs": [score.token.logprob for score in scores],
    }


def _sum(scores: Sequence[Scored]) -> float:
    return math.fsum(score.token.logprob for score in scores)
