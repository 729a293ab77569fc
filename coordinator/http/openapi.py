"""`GET /openapi.json`: every route, with the shapes that bodies are read by and answers are told in."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from coordinator.shapes.anthropic_messages import CountBody, MessagesBody
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
from coordinator.shapes.scoring import ClassifyAnswer, ClassifyBody, ScoreAnswer, ScoreBody
from coordinator.shapes.tokenizing import DetokenizeBody, TokenizeBody

Json = dict[str, Any]
Schema = type[BaseModel]


@dataclass(frozen=True)
class Described:
    """What a route reads and tells."""

    answer: Schema | None  # None: as the API says that it is taken from
    body: Schema | None = None
    event: Schema | None = None  # of a stream, where the body asks for one
    failures: tuple[Schema, ...] = (Error,)  # of any other status


SHAPES: Mapping[str, Described] = {
    "/health": Described(Health, failures=(Health, Error)),
    "/live": Described(Health),
    "/version": Described(Versions),
    "/v1/models": Described(ModelList),
    "/v1/models/{name}": Described(ModelCard),
    "/v1/chat/completions": Described(ChatCompletion, ChatBody, ChatCompletionChunk),
    "/v1/completions": Described(Completion, CompletionBody, Completion),
    "/v1/score": Described(ScoreAnswer, ScoreBody),
    "/v1/classify": Described(ClassifyAnswer, ClassifyBody),
    "/tokenize": Described(Tokenized, TokenizeBody),
    "/detokenize": Described(Detokenized, DetokenizeBody),
    "/v1/messages": Described(None, MessagesBody, failures=()),
    "/v1/messages/count_tokens": Described(None, CountBody, failures=()),
    "/v1/responses": Described(None, ResponsesBody),
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


async def openapi(request: Request) -> Response:
    """This document."""
    app = request.app
    return JSONResponse(describe(app.routes, has_keys=app.state.has_keys))


def describe(routes: Iterable[BaseRoute], *, has_keys: bool) -> Json:
    """OpenAPI 3.1 of these routes; what no shape is known of is named without one."""
    components = {"schemas": _schemas(), "securitySchemes": _SECURITY}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Brigade", "version": version("brigade"), "license": {"name": "Apache-2.0"}},
        "paths": {_path(route): _operations(route) for route in routes if isinstance(route, Route)},
        "components": components,
        "security": [{name: []} for name in _SECURITY] if has_keys else [],
    }


def _schemas() -> Json:
    bodies = {shape.body for shape in SHAPES.values() if shape.body}
    told = {each for shape in SHAPES.values() for each in (shape.answer, shape.event, *shape.failures) if each}
    inputs = [(shape, "validation") for shape in [*bodies, *told]]
    _, document = models_json_schema(
        sorted(inputs, key=lambda each: each[0].__name__),  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    return dict(document["$defs"])


def _path(route: Route) -> str:
    return re.sub(r":\w+}", "}", route.path)


def _operations(route: Route) -> Json:
    """What may be done at a path; HEAD goes without saying."""
    return {method.lower(): _operation(route, method) for method in sorted((route.methods or set()) - {"HEAD"})}


def _operation(route: Route, method: str) -> Json:
    path, shape = _path(route), SHAPES.get(_path(route))
    operation: Json = {
        "operationId": f"{method.lower()}_{route.name}",
        "summary": (route.endpoint.__doc__ or route.name).strip().partition("\n")[0],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "responses": {
            "200": {"description": "The answer", "content": _content(shape)},
            "default": {"description": "Why there is none", "content": _json(*(shape.failures if shape else (Error,)))},
        },
    }
    if shape and shape.body and method == "POST":
        operation["requestBody"] = {"required": True, "content": _json(shape.body)}
    return operation


def _content(shape: Described | None) -> Json:
    if shape is None or shape.answer is None:
        return {}
    if shape.event is None:
        return _json(shape.answer)
    said = f"With `stream`: events `data: ...`, each of them a {shape.event.__name__}, and at last `data: [DONE]`."
    return _json(shape.answer) | {"text/event-stream": {"schema": {"type": "string", "description": said}}}


def _json(*shapes: Schema) -> Json:
    if not shapes:
        return {}
    references = [{"$ref": f"#/components/schemas/{shape.__name__}"} for shape in shapes]
    return {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}
