"""The application: routes, and what becomes of their errors."""

from collections.abc import Collection
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from coordinator.http.about import health, live, models, one_model, versions
from coordinator.http.chat import chat_completions
from coordinator.http.cluster import cluster
from coordinator.http.completions import completions
from coordinator.http.errors import HttpError, Refusal, http_error
from coordinator.http.guard import Guard
from coordinator.http.keys import Keys
from coordinator.http.messages import count_tokens, messages
from coordinator.http.metrics import metrics
from coordinator.http.openapi import openapi
from coordinator.http.page import page
from coordinator.http.refusals import refusal_response
from coordinator.http.responses import responses
from coordinator.http.score import classify, score
from coordinator.http.served import Served
from coordinator.http.streams import ClientLeft
from coordinator.http.tokens import detokenize, tokenize
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
    served: Served, *, keys: Keys | None = None, hosts: Collection[str] = (), origins: Collection[str] = ()
) -> ASGIApp:
    """All doors of one server, behind its guard. Web pages of these origins may use it, and no others."""
    told = dict.fromkeys((BrigadeError, Refusal, Exception), _failed)
    app = Starlette(routes=ROUTES, exception_handlers={HTTPException: _unrouted, ClientLeft: _left} | told)
    app.state.served = served
    app.state.has_keys = keys is not None
    guarded = Guard(app, keys=keys, hosts=hosts)
    if not origins:
        return guarded
    return CORSMiddleware(
        guarded, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",),
        expose_headers=("X-Request-Id", "Retry-After"),
    )  # fmt: skip


async def _failed(request: Request, error: Exception) -> Response:
    return refusal_response(request.scope, http_error(error))


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # which nobody reads


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    said = f"{HTTPStatus(status).phrase}: {request.method} {request.url.path}"
    told = HttpError(status, "invalid_request_error", said, _CODES.get(status), headers=dict(error.headers or {}))
    return refusal_response(request.scope, told)
