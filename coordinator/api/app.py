"""The application: its routes, and the responses to errors."""

from collections.abc import Collection
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.api.anthropic import count_tokens, messages
from coordinator.api.auth import AuthMiddleware, Keys
from coordinator.api.completions import completions
from coordinator.api.errors import HttpError, Refusal, error_response, http_error
from coordinator.api.metrics import metrics
from coordinator.api.openai import chat_completions
from coordinator.api.openapi import openapi
from coordinator.api.responses import responses
from coordinator.api.scoring import classify, score
from coordinator.api.server import Server
from coordinator.api.sse import ClientLeft
from coordinator.api.status import cluster, health, live, models, one_model, page, versions
from coordinator.api.tokenizing import detokenize, tokenize
from worker.errors import BrigadeError

ROUTES = [
    Route("/health", health),
    Route("/live", live),
    Route("/version", versions),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", one_model),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/openapi.json", openapi),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/score", score, methods=["POST"]),
    Route("/v1/classify", classify, methods=["POST"]),
    Route("/metrics", metrics),
    Route("/cluster", cluster),
    Route("/", page),
]
_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(
    server: Server, *, keys: Keys | None = None, hosts: Collection[str] = (), origins: Collection[str] = ()
) -> ASGIApp:
    """Return all routes of a server behind its authentication; web pages of the `origins` may use it too."""
    handlers = dict.fromkeys((BrigadeError, Refusal, Exception), _failed)
    app = Starlette(routes=ROUTES, exception_handlers={HTTPException: _unrouted, ClientLeft: _left} | handlers)
    app.state.server = server
    app.state.has_keys = keys is not None
    guarded = AuthMiddleware(app, keys=keys, hosts=hosts)
    if not origins:
        return guarded
    return CORSMiddleware(
        guarded, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After"),
    )  # fmt: skip


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(request.scope, http_error(error))


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never read: the client is gone


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{HTTPStatus(status).phrase}: {request.method} {request.url.path}"
    refusal = HttpError(status, "invalid_request_error", message, _CODES.get(status), headers=dict(error.headers or {}))
    return error_response(request.scope, refusal)
