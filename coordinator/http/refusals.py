"""Refusals: errors as responses, in the shape of the path that was asked for, whoever found them."""

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from coordinator.http.errors import HttpError

_ANTHROPIC = "/v1/messages"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def refusal_response(scope: Scope, error: HttpError) -> Response:
    """An error that came before any answer: Anthropic's object on the paths of its API, OpenAI's on all others."""
    body = error.to_json()
    if f"{scope['path']}/".startswith(f"{_ANTHROPIC}/"):
        body = json.dumps(error_object(error.status, error.message, scope["state"]["request_id"])).encode()
    return Response(body, error.status, error.to_headers(), "application/json")


def error_object(status: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    """What Anthropic's clients are told of an error of this HTTP status."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
