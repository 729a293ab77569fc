"""Described: what every route reads and tells, and with which statuses it refuses."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from coordinator.shapes.anthropic_messages import CountBody, MessagesBody
from coordinator.shapes.anthropic_objects import AnthropicError, AnthropicMessage, MessageEvent, TokenCount
from coordinator.shapes.open_responses import ResponsesBody
from coordinator.shapes.openai_chat import ChatBody
from coordinator.shapes.openai_completions import CompletionBody
from coordinator.shapes.openai_objects import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Detokenized,
    Error,
    Health,
    ModelCard,
    ModelList,
    Tokenized,
    Versions,
)
from coordinator.shapes.response_objects import Response, ResponseEvent
from coordinator.shapes.scoring import ClassifyAnswer, ClassifyBody, ScoreAnswer, ScoreBody
from coordinator.shapes.tokenizing import DetokenizeBody, TokenizeBody

Schema = type[BaseModel]


@dataclass(frozen=True)
class Described:
    """What a route reads and tells."""

    answer: Schema | None  # None: an object, or a text, of no one shape
    body: Schema | None = None
    events: tuple[Schema, ...] = ()  # of a stream, where the body asks for one; the second one is its failure
    is_done_told: bool = True  # by `data: [DONE]`, once a stream has ended
    failures: tuple[Schema, ...] = (Error,)  # of any other status
    statuses: tuple[int, ...] = ()  # of those, beyond what every route may be refused with
    query: tuple[str, ...] = ()
    media: str = "application/json"


_ANTHROPIC = (AnthropicError,)
_ANSWERED = (400, 404, 408, 413, 415, 429, 500, 503)

DESCRIBED: Mapping[str, Described] = {
    "/": Described(None, media="text/html"),
    "/cluster": Described(None),
    "/health": Described(Health, failures=(Health, Error), statuses=(429, 500, 503), query=("deep",)),
    "/live": Described(Health),
    "/metrics": Described(None, media="text/plain"),
    "/openapi.json": Described(None),
    "/version": Described(Versions),
    "/v1/models": Described(ModelList),
    "/v1/models/{name}": Described(ModelCard, statuses=(404,)),
    "/v1/chat/completions": Described(ChatCompletion, ChatBody, (ChatCompletionChunk, Error), statuses=_ANSWERED),
    "/v1/completions": Described(Completion, CompletionBody, (Completion, Error), statuses=_ANSWERED),
    "/v1/score": Described(ScoreAnswer, ScoreBody, statuses=_ANSWERED),
    "/v1/classify": Described(ClassifyAnswer, ClassifyBody, statuses=_ANSWERED),
    "/tokenize": Described(Tokenized, TokenizeBody, statuses=_ANSWERED),
    "/detokenize": Described(Detokenized, DetokenizeBody, statuses=_ANSWERED),
    "/v1/messages": Described(
        AnthropicMessage, MessagesBody, (MessageEvent,), is_done_told=False, failures=_ANTHROPIC, statuses=_ANSWERED
    ),
    "/v1/messages/count_tokens": Described(TokenCount, CountBody, failures=_ANTHROPIC, statuses=_ANSWERED),
    "/v1/responses": Described(Response, ResponsesBody, (ResponseEvent,), statuses=_ANSWERED),
}
