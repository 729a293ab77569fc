"""The application: its routes, and the responses to errors."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import wraps
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.api.anthropic import AnthropicMessage, MessageEvent, count_tokens, messages
from coordinator.api.auth import AuthMiddleware, Key
from coordinator.api.body import read_body
from coordinator.api.completions import Completion, completions
from coordinator.api.embeddings import embeddings
from coordinator.api.errors import Error, HttpError, JSONResponse, error_response, http_error
from coordinator.api.left_out import HEADER as LEFT_OUT
from coordinator.api.left_out import begin_request
from coordinator.api.metrics import metrics
from coordinator.api.openai import ChatCompletion, ChatCompletionChunk, chat_completions
from coordinator.api.openapi import Operation, describe
from coordinator.api.responses import ResponseEvent, ResponseObject, responses
from coordinator.api.server import Server
from coordinator.api.sse import ApiAnswer, ClientLeft, respond, unless_left
from coordinator.api.status import Health, cluster, health, live, models, one_model, page, versions
from coordinator.api.texts import classify, detokenize, score, tokenize
from worker.errors import BrigadeError


async def openapi(server: Server, request: Request) -> Response:
    """This document."""
    return JSONResponse(describe(OPERATIONS, has_keys=request.app.state.has_keys))


OPERATIONS = (
    Operation("/health", health, Health, errors=(Health, Error), statuses=(400, 429, 500, 503)),
    Operation("/live", live),
    Operation("/version", versions),
    Operation("/v1/models", models),
    Operation("/v1/models/{name:path}", one_model, statuses=(404,)),
    Operation("/v1/chat/completions", chat_completions, ChatCompletion, (ChatCompletionChunk, Error)),
    Operation("/v1/completions", completions, Completion, (Completion, Error)),
    Operation("/v1/embeddings", embeddings),
    Operation("/tokenize", tokenize),
    Operation("/detokenize", detokenize),
    Operation("/openapi.json", openapi),
    Operation("/v1/messages", messages, AnthropicMessage, (MessageEvent,), has_done=False),
    Operation("/v1/messages/count_tokens", count_tokens),
    Operation("/v1/responses", responses, ResponseObject, (ResponseEvent,)),
    Operation("/v1/score", score),
    Operation("/v1/classify", classify),
    Operation("/metrics", metrics, media="text/plain"),
    Operation("/cluster", cluster),
    Operation("/", page, media="text/html"),
)
_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(
    server: Server, *, keys: Sequence[Key] | None = None, hosts: Collection[str] = (), origins: Collection[str] = ()
) -> ASGIApp:
    """Return all routes of a server behind its authentication; web pages of the `origins` may use it too."""
    routes = [Route(each.path, _endpoint(each), methods=[each.method]) for each in OPERATIONS]
    handlers = dict.fromkeys((BrigadeError, HttpError, Exception), _failed)
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unrouted, ClientLeft: _left} | handlers)
    app.state.server = server
    app.state.has_keys = keys is not None
    guarded = AuthMiddleware(app, server.stats.refuse, keys=keys, hosts=hosts)
    if not origins:
        return guarded
    return CORSMiddleware(
        guarded, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After", LEFT_OUT),
    )  # fmt: skip


def _endpoint(operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    """Return the route's function: it reads the body and the parameters, and sends what the operation returns."""

    @wraps(operation.function)
    async def endpoint(request: Request) -> Response:
        server: Server = request.app.state.server
        known: dict[str, Any] = {**request.query_params, **request.path_params, "request": request}
        given = {name: value for name, value in known.items() if name in operation.parameters}
        if operation.body:
            given["body"], ignored = await read_body(
                request, operation.body, server.limits.body_bytes, server.long_bodies
            )
            server.seen.note("ignored_field", "a request has a field that this server ignores", ignored)
        left_out = begin_request()
        found = await unless_left(request, operation.function(server, **given))
        if isinstance(found, ApiAnswer):
            found = await respond(request, found)
        response = found if isinstance(found, Response) else JSONResponse(found)
        if left_out:
            response.headers[LEFT_OUT] = ", ".join(left_out)
            server.seen.note("left_out", "a request has what this server leaves out", left_out)
        return response

    return endpoint


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, http_error(error))


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never read: the client is gone


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{HTTPStatus(status).phrase}: {request.method} {request.url.path}"
    meant = f"/v1/{request.url.path.strip('/').removeprefix('v1/').removeprefix('v1/')}"
    if status == HTTPStatus.NOT_FOUND and meant in [each.path for each in OPERATIONS]:
        message += f"; did you mean {meant}? The base URL may lack /v1, or have it twice"
    return error_response(
        request.url.path, HttpError(status, message, _CODES.get(status), headers=dict(error.headers or {}))
    )
