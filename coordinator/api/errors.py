"""Errors in HTTP: statuses, OpenAI's and Anthropic's error objects, and JSON responses."""

from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.responses import JSONResponse as StarletteJSONResponse
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import TypedDict

from worker.errors import (
    BrigadeError,
    ConfigError,
    ContextExceeded,
    InputError,
    InternalError,
    ModelError,
    NodeBusy,
    QueueFull,
    SamplingError,
    WaitedTooLong,
    internal_error_text,
)
from worker.platform.text import json_bytes

_SOON_S, _LATER_S = 1, 5
_ANTHROPIC_TYPES: dict[int, "AnthropicErrorType"] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
AnthropicErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
    "rate_limit_error", "overloaded_error", "api_error",
]  # fmt: skip


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """OpenAI's error object; in the middle of a stream its last event."""

    error: ErrorBody


class AnthropicErrorBody(TypedDict):
    type: AnthropicErrorType
    message: str


class AnthropicError(TypedDict):
    """Before an answer or, as an event, in the middle of one."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str | None


class JSONResponse(StarletteJSONResponse):
    """Sends half of a surrogate pair, which a model may say and UTF-8 cannot hold, as its escape."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class HttpError:
    """An error as a client gets it. `type` and `code` are OpenAI's words."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def to_headers(self) -> dict[str, str]:
        if self.retry_after_s is not None:
            return self.headers | {"Retry-After": str(self.retry_after_s)}
        return self.headers | {"x-should-retry": "false"}

    def to_openai(self) -> Error:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_anthropic(self, request_id: str | None = None) -> AnthropicError:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


class Refusal(Exception):
    """A request that is refused by the API itself."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def refuse(status: int, message: str, code: str, **rest: Any) -> Refusal:
    """Return the refusal of a request that is wrong, or not allowed."""
    return Refusal(HttpError(status, "invalid_request_error", message, code, **rest))


def unavailable(why: str, code: str) -> Refusal:
    """Return the refusal of a request that may be tried again later."""
    return Refusal(HttpError(503, "service_unavailable", why, code, retry_after_s=_LATER_S))


# By class, the first that fits: status, type, code, and after how many seconds to try again.
_KINDS: list[tuple[type[BaseException], int, str, str, int | None]] = [
    (ContextExceeded, 400, "invalid_request_error", "context_length_exceeded", None),
    (InputError, 400, "invalid_request_error", "invalid_value", None),
    (
        SamplingError,
        400,
        "invalid_request_error",
        "invalid_value",
        None,
    ),  # found by a stage, in the middle of an answer
    (WaitedTooLong, 503, "service_unavailable", "queue_timeout", _LATER_S),
    (QueueFull, 429, "rate_limit_error", "rate_limit_exceeded", _SOON_S),
    (NodeBusy, 503, "service_unavailable", "draining", _LATER_S),
    (InternalError, 500, "server_error", "internal_error", None),
    (ModelError, 500, "server_error", "internal_error", None),
    (ConfigError, 500, "server_error", "internal_error", None),
    (BrigadeError, 503, "service_unavailable", "cluster_failed", _LATER_S),
]


def http_error(error: BaseException) -> HttpError:
    """Return the error as a client gets it."""
    if isinstance(error, Refusal):
        return error.error
    for kind, status, type_, code, retry_after_s in _KINDS:
        if isinstance(error, kind):
            message = str(error)
            if isinstance(error, ContextExceeded):  # litellm knows it by these words, whatever the code
                message += " (it is longer than the model's context length)"
            param = (error.field or None) if isinstance(error, InputError) else None
            return HttpError(status, type_, message, code, param, retry_after_s)
    return HttpError(500, "server_error", internal_error_text(error), "internal_error")


def error_response(scope: Scope, error: HttpError) -> Response:
    """Return Anthropic's error object on the paths of its API, OpenAI's on all others."""
    is_anthropic = f"{scope['path']}/".startswith("/v1/messages/")
    body = error.to_anthropic(scope["state"]["request_id"]) if is_anthropic else error.to_openai()
    return JSONResponse(body, error.status, error.to_headers())
