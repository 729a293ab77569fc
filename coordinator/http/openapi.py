"""`GET /openapi.json`: every route, with the shapes that bodies are read by and answers are told in."""

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from coordinator.http.described import DESCRIBED, Described, Schema
from coordinator.http.json_response import JSONResponse
from worker.process.own_code import version_of

Json = dict[str, Any]

_RETRIED = (429, 503)  # whose answers say when to try again
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


async def openapi(request: Request) -> Response:
    """This document."""
    app = request.app
    return JSONResponse(describe(app.routes, has_keys=app.state.has_keys))


def describe(routes: Iterable[BaseRoute], *, has_keys: bool) -> Json:
    """OpenAPI 3.1 of these routes."""
    found = [route for route in routes if isinstance(route, Route)]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Brigade", "version": version_of("brigade"), "license": {"name": "Apache-2.0"}},
        "paths": {_path(route): _operations(route, has_keys=has_keys) for route in found},
        "components": {"schemas": _schemas(), "securitySchemes": _SECURITY},
        "security": [{name: []} for name in _SECURITY] if has_keys else [],
    }


def _schemas() -> Json:
    bodies = {shape.body for shape in DESCRIBED.values() if shape.body}
    told = {each for shape in DESCRIBED.values() for each in (shape.answer, *shape.events, *shape.failures) if each}
    inputs = [(shape, "validation") for shape in [*bodies, *told]]
    _, document = models_json_schema(
        sorted(inputs, key=lambda each: each[0].__name__),  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    return dict(document["$defs"])


def _path(route: Route) -> str:
    return re.sub(r":\w+}", "}", route.path)


def _operations(route: Route, *, has_keys: bool) -> Json:
    """What may be done at a path; HEAD goes without saying."""
    methods = sorted((route.methods or set()) - {"HEAD"})
    return {method.lower(): _operation(route, method, has_keys=has_keys) for method in methods}


def _operation(route: Route, method: str, *, has_keys: bool) -> Json:
    path = _path(route)
    told = DESCRIBED[path]
    operation: Json = {
        "operationId": f"{method.lower()}_{route.name}",
        "summary": (route.endpoint.__doc__ or route.name).strip().partition("\n")[0],
        "parameters": [
            *(_parameter(name, "path") for name in re.findall(r"{(\w+)}", path)),
            *(_parameter(name, "query") for name in told.query),
        ],
        "responses": {"200": {"description": "The answer", "content": _content(told)}} | _refusals(told, has_keys),
    }
    if told.body:
        operation["requestBody"] = {"required": True, "content": _json(told.body)}
    return operation


def _parameter(name: str, place: str) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _refusals(told: Described, has_keys: bool) -> Json:
    """By status; 403 is for a Host that the server is not known by."""
    statuses = sorted({*told.statuses, 403, *([401] if has_keys else [])})
    return {str(status): _refusal(told, status) for status in statuses}


def _refusal(told: Described, status: int) -> Json:
    refusal: Json = {"description": HTTPStatus(status).phrase, "content": _json(*told.failures)}
    if status in _RETRIED:
        refusal["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    return refusal


def _content(told: Described) -> Json:
    if told.answer is None:
        kind = "object" if told.media == "application/json" else "string"
        return {told.media: {"schema": {"type": kind}}}
    if not told.events:
        return _json(told.answer)
    return _json(told.answer) | {"text/event-stream": {"schema": _event(told)}}


def _event(told: Described) -> Json:
    """Of each event, as OpenAPI 3.2 describes them."""
    said: Json = {"type": "string", "contentMediaType": "application/json", "contentSchema": _one_of(told.events)}
    return {
        "type": "object",
        "description": "Each event of the stream that `stream` asks for",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, said]} if told.is_done_told else said},
        "required": ["data"],
    }


def _json(*shapes: Schema) -> Json:
    return {"application/json": {"schema": _one_of(shapes)}}


def _one_of(shapes: Sequence[Schema]) -> Json:
    references = [{"$ref": f"#/components/schemas/{shape.__name__}"} for shape in shapes]
    return references[0] if len(references) == 1 else {"anyOf": references}
