"""Routes that generate nothing: vLLM's `/tokenize` and `/detokenize`, and our own `/v1/score` and `/v1/classify`.

Texts and conversations become token ids, and back; texts that may follow a prompt get their log-probabilities.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from coordinator.api.body import ModelName, Section, TokenIds, require_one
from coordinator.api.conversations import offered
from coordinator.api.errors import HttpError
from coordinator.api.openai import Message, Tool
from coordinator.api.server import Server
from coordinator.engine.inputs import renaming
from coordinator.engine.scores import score_continuations
from coordinator.sessions.output import Scored
from coordinator.sessions.request import Conversation, Prompt
from worker.platform.text import Json

_MIN_LIMIT = 32768  # tokens


class TokenizeBody(Section):
    """A text as it stands, or a conversation in the model's chat template."""

    model: ModelName | None = None
    prompt: str | None = None
    add_special_tokens: bool = True  # around a text; templates add their own
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] = Field(default_factory=list)
    add_generation_prompt: bool = True
    chat_template_kwargs: Json = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _agree(self) -> "TokenizeBody":
        require_one(self, "prompt", "messages")
        return self

    def conversation(self) -> Conversation:
        """Return the conversation. Raises InputError for messages that cannot be served."""
        messages = tuple(message.to_template() for message in self.messages or ())
        # without it, a conversation that ends with an answer continues that
        arguments = {} if self.add_generation_prompt else {"add_generation_prompt": False}
        return Conversation(messages, offered(self.tools), arguments | self.chat_template_kwargs)


class DetokenizeBody(Section):
    """Token ids."""

    model: ModelName | None = None
    tokens: list[int]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


async def tokenize(server: Server, body: TokenizeBody) -> Tokenized:
    """Return the token ids of a text or of a conversation."""
    server.name_for(body.model)
    inputs = server.inputs
    prompt = body.conversation() if body.prompt is None else body.prompt
    field = "messages" if body.prompt is None else "prompt"
    tokens = await bounded_ids(server, prompt, field, special=body.add_special_tokens)
    return {
        "count": len(tokens),
        "max_model_len": server.context,
        "tokens": tokens,
        "token_strs": await inputs.token_texts(tokens) if body.return_token_strs else None,
    }


async def bounded_ids(server: Server, prompt: Prompt, field: str, *, special: bool = True) -> list[int]:
    """Return a prompt's token ids. Raises HttpError (413) for far more than the model's context."""
    with renaming({"prompt": field}):
        tokens = list(await server.inputs.prompt_ids(prompt, special=special))
    _require_at_most(_most_tokens(server), tokens, field)
    return tokens


async def detokenize(server: Server, body: DetokenizeBody) -> Detokenized:
    """Return the text of token ids."""
    server.name_for(body.model)
    _require_at_most(_most_tokens(server), body.tokens, "tokens")
    return {"prompt": await server.inputs.text_of(body.tokens)}


def _most_tokens(server: Server) -> int:
    """Return a limit above the model's context: clients count and cut texts that are a little too long."""
    return max(_MIN_LIMIT, 2 * server.inputs.spec.context)


def _require_at_most(most: int, tokens: Sequence[int], field: str) -> None:
    if len(tokens) > most:
        reason = f"{field}: expected at most {most} tokens, found {len(tokens)}"
        raise HttpError(413, reason, "too_many_tokens", param=field)


# --- scores -----------------------------------------------------------------------------------------------------------

Ids = Annotated[TokenIds, Field(min_length=1)]
NonEmpty = Annotated[str, Field(min_length=1)]
_MAX_CONTINUATIONS = 128  # of one request


class _Prompted(Section):
    model: ModelName | None = None
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
    name = server.name_for(body.model)
    scores = [
        Scores(
            logprob=math.fsum(each.token.logprob for each in continuation),
            is_greedy=all(each.is_greedy for each in continuation),
            tokens=[each.token.token for each in continuation],
            logprobs=[each.token.logprob for each in continuation],
        )
        for continuation in await body.scores(server, body.continuations)
    ]
    return {"object": "score", "model": name, "scores": scores}


async def classify(server: Server, body: ClassifyBody) -> ClassifyAnswer:
    """Return the probability of each label."""
    name = server.name_for(body.model)
    return classification(name, body.labels, await body.scores(server, body.labels))


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
