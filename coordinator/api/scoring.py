"""`POST /v1/score` and `/v1/classify`, an API of our own: how likely given texts are after a prompt."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from coordinator.api.body import Section, read_body
from coordinator.api.errors import JSONResponse
from coordinator.api.server import Server
from coordinator.api.sse import unless_left
from coordinator.engine.scores import score_continuations
from coordinator.sessions.output import Scored

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


class Scores(TypedDict):
    """Of one continuation: log-probabilities in nats, in all and by token."""

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


async def score(request: Request) -> Response:
    """The log-probability of each continuation."""
    server: Server = request.app.state.server
    body = await read_body(request, ScoreBody, server.limits.body_bytes)
    scores = await _scores(request, body, body.continuations)
    answer: ScoreAnswer = {
        "object": "score",
        "model": server.names[0],
        "scores": [
            {
                "logprob": math.fsum(each.token.logprob for each in continuation),
                "is_greedy": all(each.is_greedy for each in continuation),
                "tokens": [each.token.token for each in continuation],
                "logprobs": [each.token.logprob for each in continuation],
            }
            for continuation in scores
        ],
    }
    return JSONResponse(answer)


async def classify(request: Request) -> Response:
    """The probability of each label."""
    server: Server = request.app.state.server
    body = await read_body(request, ClassifyBody, server.limits.body_bytes)
    scores = await _scores(request, body, body.labels)
    return JSONResponse(classification(server.names[0], body.labels, scores))


async def _scores(request: Request, body: _Prompted, continuations: Sequence[str | Ids]) -> list[list[Scored]]:
    server: Server = request.app.state.server
    server.require_name(body.model)
    engine = await unless_left(request, server.wake_model())
    return await unless_left(request, score_continuations(engine, body.given, continuations))


def classification(model: str, labels: Sequence[str], scores: Sequence[Sequence[Scored]]) -> ClassifyAnswer:
    """Return the probability of each label, given that one of them comes."""
    logprobs = [math.fsum(each.token.logprob for each in label) for label in scores]
    best = max(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    found: list[LabelScore] = [
        {"label": label, "logprob": logprob, "probability": weight / sum(weights)}
        for label, logprob, weight in zip(labels, logprobs, weights, strict=True)
    ]
    return {"object": "classification", "model": model, "label": labels[logprobs.index(best)], "labels": found}
