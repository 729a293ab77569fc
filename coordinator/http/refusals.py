"""Refusals: errors as responses, in the shape of the path that was asked for, whoever found them."""

import json

from starlette.responses import Response
from starlette.types import Scope

from coordinator.http.errors import HttpError
from coordinator.shapes.anthropic_answer import error_object

_ANTHROPIC = "/v1/messages"


def refusal_response(scope: Scope, error: HttpError) -> Response:
    """An error that came before any answer: Anthropic's object on the paths of its API, OpenAI's on all others."""
    body = error.to_json()
    if f"{scope['path']}/".startswith(f"{_ANTHROPIC}/"):
        body = json.dumps(error_object(error.status, error.message, scope["state"]["request_id"])).encode()
    return Response(body, error.status, error.to_headers(), "application/json")
