"""The document of `GET /openapi.json`: every operation, with the types of its body and answers."""

import re
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from typing_extensions import is_typeddict

from coordinator.api.errors import AnthropicError, Error, is_anthropic
from worker.platform.installation import version_of
from worker.platform.text import Json

_POST_STATUSES = (400, 404, 408, 413, 415, 429, 500, 503)
_RETRIED = (429, 503)  # with a Retry-After
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@dataclass(frozen=True)
class Operation:
    """A route, and what the document tells about it.

    `function` takes the server, the parameters of the path and the query by their names, and as `body` the request's
    body. It returns a JSON object, an ApiAnswer, or a Response. Its docstring is the operation's summary.
    """

    route: str  # in starlette's syntax
    function: Callable[..., Coroutine[Any, Any, Any]]
    whole: Any = None  # the type of the answer, if the function's annotation is not it
    events: tuple[Any, ...] = ()  # the types of a stream's events, if the body may ask for a stream
    has_done: bool = True  # `data: [DONE]` ends a stream
    errors: tuple[Any, ...] = ()  # the types of the bodies of all other statuses, if they are not the API's
    statuses: tuple[int, ...] = ()  # of a GET's errors, beyond those of every route
    media: str = "application/json"

    @property
    def path(self) -> str:
        """The route as the document writes it."""
        return re.sub(r":\w+}", "}", self.route)

    @cached_property
    def hints(self) -> Json:
        """The types of the function's parameters, and of its `return`."""
        return get_type_hints(self.function)

    @property
    def parameters(self) -> list[str]:
        """The names of parameters of the path and the query, and `request` if the function wants all of it."""
        return [name for name in self.hints if name not in ("server", "body", "return")]

    @property
    def body(self) -> Any:
        """The type of the body; None for a GET."""
        return self.hints.get("body")

    @property
    def method(self) -> str:
        return "POST" if self.body else "GET"

    @property
    def answer(self) -> Any:
        """The type of the whole answer; None for an object, or a text, of no one type."""
        return self.whole or (self.hints["return"] if is_typeddict(self.hints["return"]) else None)

    @property
    def error_types(self) -> tuple[Any, ...]:
        return self.errors or ((AnthropicError,) if is_anthropic(self.path) else (Error,))


def describe(operations: Iterable[Operation], *, has_keys: bool) -> Json:
    """Return the OpenAPI 3.1 document of these operations."""
    bodies = schemas({each.body for each in operations if each.body})
    answers = schemas({kind for each in operations for kind in (each.answer, *each.events, *each.error_types) if kind})
    exact = {"additionalProperties": False}  # bodies may have unknown fields, answers have none
    answers = {name: exact | schema if "properties" in schema else schema for name, schema in answers.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Brigade", "version": version_of("brigade"), "license": {"name": "Apache-2.0"}},
        "paths": {each.path: {each.method.lower(): _operation(each, has_keys=has_keys)} for each in operations},
        "components": {"schemas": answers | bodies, "securitySchemes": _SECURITY},
        "security": [{name: []} for name in _SECURITY] if has_keys else [],
    }


def schemas(types: Iterable[Any]) -> Json:
    """Return the JSON schemas of these types and of all that they refer to, by name."""
    named = [(type_.__name__, "validation", TypeAdapter(type_)) for type_ in sorted(types, key=lambda t: t.__name__)]
    schemas, document = TypeAdapter.json_schemas(named, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    inline = {name: schema for (name, _), schema in schemas.items() if "$ref" not in schema}
    return inline | dict(document.get("$defs", {}))


def _operation(operation: Operation, *, has_keys: bool) -> Json:
    found = operation.statuses or (_POST_STATUSES if operation.body else ())
    statuses = sorted({*found, 403, *([401] if has_keys else [])})  # 403: a Host that is not the server's
    document: Json = {
        "operationId": f"{operation.method.lower()}_{operation.function.__name__}",
        "summary": (operation.function.__doc__ or "").partition("\n")[0],
        "parameters": [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name in operation.parameters
            if name != "request"
            for place in ("path" if f"{{{name}}}" in operation.path else "query",)
        ],
        "responses": {"200": {"description": "The answer", "content": _content(operation)}}
        | {str(status): _error(operation, status) for status in statuses},
    }
    if operation.body:
        document["requestBody"] = {"required": True, "content": _json(operation.body)}
    return document


def _error(operation: Operation, status: int) -> Json:
    error: Json = {"description": HTTPStatus(status).phrase, "content": _json(*operation.error_types)}
    if status in _RETRIED:
        error["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
    return error


def _content(operation: Operation) -> Json:
    if operation.answer is None:
        kind = "object" if operation.media == "application/json" else "string"
        return {operation.media: {"schema": {"type": kind}}}
    if not operation.events:
        return _json(operation.answer)
    # OpenAPI 3.2's way to describe each event of a stream
    event = {"type": "string", "contentMediaType": "application/json", "contentSchema": _any_of(*operation.events)}
    stream = {
        "type": "object",
        "description": "Each event of the stream that `stream` asks for",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, event]} if operation.has_done else event},
        "required": ["data"],
    }
    return _json(operation.answer) | {"text/event-stream": {"schema": stream}}


def _json(*types: Any) -> Json:
    return {"application/json": {"schema": _any_of(*types)}}


def _any_of(*types: Any) -> Json:
    references = [{"$ref": f"#/components/schemas/{type_.__name__}"} for type_ in types]
    return references[0] if len(references) == 1 else {"anyOf": references}
