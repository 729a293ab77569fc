"""`POST /v1/score` and `/v1/classify`, an API of our own: how likely given texts are after a prompt."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from coordinator.api.body import Section, TokenIds, require_one
from coordinator.api.server import Server
from coordinator.engine.scores import score_continuations
from coordinator.sessions.output import Scored

Ids = Annotated[TokenIds, Field(min_length=1)]
NonEmpty = Annotated[str, Field(min_length=1)]
_MAX_CONTINUATIONS = 128  # of one request


class _Prompted(Section):
    model: str | None = None
    prompt: str | None = None
    prompt_tokens: TokenIds | None = None

    @model_validator(mode="after")
    def _agree(self) -> "_Prompted":
        require_one(self, "prompt", "prompt_tokens")
        return self

    async def scores(self, server: Server, continuations: Sequence[str | Ids]) -> list[list[Scored]]:
        """Return the scores of each continuation's tokens."""
        prompt = self.prompt if self.prompt_tokens is None else self.prompt_tokens
        assert prompt is not None
        return await score_continuations(await server.wake_engine(), prompt, continuations)


class ScoreBody(_Prompted):
    """Continuations of a prompt, each as text or as token ids."""

    continuations: list[NonEmpty | Ids] = Field(min_length=1, max_length=_MAX_CONTINUATIONS)


class ClassifyBody(_Prompted):
    """Labels, one of which is to follow the prompt."""

    labels: list[NonEmpty] = Field(min_length=1, max_length=_MAX_CONTINUATIONS)


class Scores(TypedDict):
    """The scores of one continuation: its log-probability in nats, and that of each token."""

    logprob: float
    is_greedy: bool
    tokens: list[int]
    logprobs: list[float]


class ScoreAnswer(TypedDict):
    object: Literal["score"]
    model: str
    scores: list[Scores]


class LabelScore(TypedDict):
    label: str
    logprob: float
    probability: float


class ClassifyAnswer(TypedDict):
    object: Literal["classification"]
    model: str
    label: str
    labels: list[LabelScore]


async def score(server: Server, body: ScoreBody) -> ScoreAnswer:
    """Return the log-probability of each continuation."""
    scores = [
        Scores(
            logprob=math.fsum(each.token.logprob for each in continuation),
            is_greedy=all(each.is_greedy for each in continuation),
            tokens=[each.token.token for each in continuation],
            logprobs=[each.token.logprob for each in continuation],
        )
        for continuation in await body.scores(server, body.continuations)
    ]
    return {"object": "score", "model": server.names[0], "scores": scores}


async def classify(server: Server, body: ClassifyBody) -> ClassifyAnswer:
    """Return the probability of each label."""
    return classification(server.names[0], body.labels, await body.scores(server, body.labels))


def classification(model: str, labels: Sequence[str], scores: Sequence[Sequence[Scored]]) -> ClassifyAnswer:
    """Return the probability of each label, given that one of them follows."""
    logprobs = [math.fsum(each.token.logprob for each in label) for label in scores]
    best = max(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    found: list[LabelScore] = [
        {"label": label, "logprob": logprob, "probability": weight / sum(weights)}
        for label, logprob, weight in zip(labels, logprobs, weights, strict=True)
    ]
    return {"object": "classification", "model": model, "label": labels[logprobs.index(best)], "labels": found}
