"""`GET /openapi.json`: every route, with the types of its bodies and answers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from coordinator.api.anthropic import (
    AnthropicMessage,
    CountBody,
    MessageEvent,
    MessagesBody,
    TokenCount,
)
from coordinator.api.completions import Completion, CompletionBody
from coordinator.api.errors import AnthropicError, Error, JSONResponse
from coordinator.api.openai import ChatBody, ChatCompletion, ChatCompletionChunk
from coordinator.api.response_events import ResponseEvent, ResponseObject
from coordinator.api.responses import ResponsesBody
from coordinator.api.scoring import ClassifyAnswer, ClassifyBody, ScoreAnswer, ScoreBody
from coordinator.api.status import Health, ModelCard, ModelList, Versions
from coordinator.api.tokenizing import DetokenizeBody, Detokenized, TokenizeBody, Tokenized
from worker.platform.installation import version_of

Json = dict[str, Any]

_RETRIED = (429, 503)  # with a Retry-After
_ANSWERED = (400, 404, 408, 413, 415, 429, 500, 503)
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@dataclass(frozen=True)
class Operation:
    """The types of a route's body and answers."""

    answer: Any  # None: an object, or a text, of no one type
    body: Any = None
    events: tuple[Any, ...] = ()  # of a stream, if the body asks for one
    has_done: bool = True  # `data: [DONE]` ends a stream
    errors: tuple[Any, ...] = (Error,)  # the bodies of all other statuses
    statuses: tuple[int, ...] = ()  # of errors, beyond those of every route
    query: tuple[str, ...] = ()
    media: str = "application/json"


OPERATIONS: Mapping[str, Operation] = {
    "/": Operation(None, media="text/html"),
    "/cluster": Operation(None),
    "/health": Operation(Health, errors=(Health, Error), statuses=(429, 500, 503), query=("deep",)),
    "/live": Operation(Health),
    "/metrics": Operation(None, media="text/plain"),
    "/openapi.json": Operation(None),
    "/version": Operation(Versions),
    "/v1/models": Operation(ModelList),
    "/v1/models/{name}": Operation(ModelCard, statuses=(404,)),
    "/v1/chat/completions": Operation(ChatCompletion, ChatBody, (ChatCompletionChunk, Error), statuses=_ANSWERED),
    "/v1/completions": Operation(Completion, CompletionBody, (Completion, Error), statuses=_ANSWERED),
    "/v1/score": Operation(ScoreAnswer, ScoreBody, statuses=_ANSWERED),
    "/v1/classify": Operation(ClassifyAnswer, ClassifyBody, statuses=_ANSWERED),
    "/tokenize": Operation(Tokenized, TokenizeBody, statuses=_ANSWERED),
    "/detokenize": Operation(Detokenized, DetokenizeBody, statuses=_ANSWERED),
    "/v1/messages": Operation(
        AnthropicMessage, MessagesBody, (MessageEvent,), has_done=False, errors=(AnthropicError,), statuses=_ANSWERED
    ),
    "/v1/messages/count_tokens": Operation(TokenCount, CountBody, errors=(AnthropicError,), statuses=_ANSWERED),
    "/v1/responses": Operation(ResponseObject, ResponsesBody, (ResponseEvent,), statuses=_ANSWERED),
}


async def openapi(request: Request) -> Response:
    """This document."""
    app = request.app
    return JSONResponse(describe_routes(app.routes, has_keys=app.state.has_keys))


def describe_routes(routes: Iterable[BaseRoute], *, has_keys: bool) -> Json:
    """Return the OpenAPI 3.1 document of these routes."""
    bodies = {each.body for each in OPERATIONS.values() if each.body}
    answers = {type_ for each in OPERATIONS.values() for type_ in (each.answer, *each.events, *each.errors) if type_}
    exact = {
        name: {"additionalProperties": False} | schema if "properties" in schema else schema
        for name, schema in schemas(answers).items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Brigade", "version": version_of("brigade"), "license": {"name": "Apache-2.0"}},
        "paths": {
            re.sub(r":\w+}", "}", route.path): {
                method.lower(): _operation(route, method, has_keys=has_keys)
                for method in sorted((route.methods or set()) - {"HEAD"})
            }
            for route in routes
            if isinstance(route, Route)
        },
        "components": {"schemas": schemas(bodies) | exact, "securitySchemes": _SECURITY},
        "security": [{name: []} for name in _SECURITY] if has_keys else [],
    }


def schemas(types: Iterable[Any]) -> Json:
    """Return the JSON schemas of these types and of all that they refer to, by name."""
    named = [(type_.__name__, "validation", TypeAdapter(type_)) for type_ in sorted(types, key=lambda t: t.__name__)]
    schemas, document = TypeAdapter.json_schemas(named, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    inline = {name: schema for (name, _), schema in schemas.items() if "$ref" not in schema}
    return inline | dict(document.get("$defs", {}))


def _operation(route: Route, method: str, *, has_keys: bool) -> Json:
    path = re.sub(r":\w+}", "}", route.path)
    described = OPERATIONS[path]
    statuses = sorted({*described.statuses, 403, *([401] if has_keys else [])})  # 403: a Host that is not the server's
    operation: Json = {
        "operationId": f"{method.lower()}_{route.name}",
        "summary": (route.endpoint.__doc__ or route.name).strip().partition("\n")[0],
        "parameters": [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for place, names in (("path", re.findall(r"{(\w+)}", path)), ("query", described.query))
            for name in names
        ],
        "responses": {"200": {"description": "The answer", "content": _content(described)}}
        | {str(status): _error(described, status) for status in statuses},
    }
    if described.body:
        operation["requestBody"] = {"required": True, "content": _json(described.body)}
    return operation


def _error(described: Operation, status: int) -> Json:
    error: Json = {"description": HTTPStatus(status).phrase, "content": _json(*described.errors)}
    if status in _RETRIED:
        error["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    return error


def _content(described: Operation) -> Json:
    if described.answer is None:
        kind = "object" if described.media == "application/json" else "string"
        return {described.media: {"schema": {"type": kind}}}
    if not described.events:
        return _json(described.answer)
    # each event of the stream, as OpenAPI 3.2 describes them
    schema = _any_of(*described.events)
    event: Json = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    stream = {
        "type": "object",
        "description": "Each event of the stream that `stream` asks for",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, event]} if described.has_done else event},
        "required": ["data"],
    }
    return _json(described.answer) | {"text/event-stream": {"schema": stream}}


def _json(*types: Any) -> Json:
    return {"application/json": {"schema": _any_of(*types)}}


def _any_of(*types: Any) -> Json:
    references = [{"$ref": f"#/components/schemas/{type_.__name__}"} for type_ in types]
    return references[0] if len(references) == 1 else {"anyOf": references}
