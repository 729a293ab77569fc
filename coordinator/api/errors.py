"""Errors in HTTP: their statuses, OpenAI's and Anthropic's error objects, and JSON responses."""

from collections.abc import Mapping
from typing import Any, Literal

from starlette.responses import JSONResponse as StarletteJSONResponse
from starlette.responses import Response
from typing_extensions import TypedDict

from coordinator.engine.caller import REQUEST_ID
from worker.errors import (
    BrigadeError,
    ConfigError,
    ContextExceeded,
    InputError,
    InternalError,
    ModelError,
    NodeBusy,
    PoisonRequest,
    QueueFull,
    SamplingError,
    WaitedTooLong,
    internal_error_text,
)
from worker.platform.text import json_bytes

AnthropicErrorType = Literal[
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
    "rate_limit_error", "overloaded_error", "api_error",
]  # fmt: skip
# By status: the error's type in OpenAI's API and in Anthropic's, and the seconds after which a retry makes sense.
_TYPES: dict[int, tuple[str, AnthropicErrorType, int | None]] = {
    401: ("authentication_error", "authentication_error", None),
    403: ("invalid_request_error", "permission_error", None),
    404: ("invalid_request_error", "not_found_error", None),
    413: ("invalid_request_error", "request_too_large", None),
    429: ("rate_limit_error", "rate_limit_error", 1),
    500: ("server_error", "api_error", None),
    503: ("service_unavailable", "overloaded_error", 5),
}
# By class, the first that fits: the status and OpenAI's code.
_STATUSES: tuple[tuple[type[BrigadeError], int, str], ...] = (
    (ContextExceeded, 400, "context_length_exceeded"),
    (InputError, 400, "invalid_value"),
    (SamplingError, 400, "invalid_value"),  # a stage found it in the middle of an answer
    (WaitedTooLong, 503, "queue_timeout"),
    (QueueFull, 429, "rate_limit_exceeded"),
    (NodeBusy, 503, "draining"),
    (InternalError, 500, "internal_error"),
    (ModelError, 500, "internal_error"),
    (ConfigError, 500, "internal_error"),
    (PoisonRequest, 500, "internal_error"),  # sent again it would take further nodes down
    (BrigadeError, 503, "cluster_failed"),
)


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """OpenAI's error object. In a stream it is the last event."""

    error: ErrorBody


class AnthropicErrorBody(TypedDict):
    type: AnthropicErrorType
    message: str


class AnthropicError(TypedDict):
    """Anthropic's error object. In a stream it is the last event."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str | None


class HttpError(Exception):
    """An error as a client gets it. `code` and `param` are OpenAI's words for its cause and the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: str = "",
    ) -> None:
        """`anthropic` is the message in Anthropic's API, if clients look for other words there."""
        super().__init__(message)
        self._anthropic = anthropic or message
        self.status, self.message, self.code, self.param = status, message, code, param
        self.type, self._anthropic_type, retry_after_s = _TYPES.get(
            status, ("invalid_request_error", "invalid_request_error", None)
        )
        retry = {"x-should-retry": "false"} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        self.headers = {**(headers or {}), **retry}

    def to_openai(self) -> Error:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_anthropic(self) -> AnthropicError:
        error: AnthropicErrorBody = {"type": self._anthropic_type, "message": self._anthropic}
        return {"type": "error", "error": error, "request_id": REQUEST_ID.get() or None}


def http_error(error: BaseException) -> HttpError:
    """Return the error as a client gets it."""
    if isinstance(error, HttpError):
        return error
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            message = anthropic = str(error)
            # Clients recognise a context that is exceeded by these words, litellm by "is longer than" and what follows.
            if isinstance(error, ContextExceeded) and error.most:
                found = f"{error.field}: found {error.num_tokens} tokens, which is longer than"
                limit = f"This model's maximum context length is {error.context} tokens"
                if error.most < error.context:
                    limit += f", of which a prompt may have {error.most}: an answer has at least one"
                message = f"{found} the model's context length; shorten it. {limit}."
                anthropic = f"prompt is too long: {error.num_tokens} tokens > {error.most} maximum; shorten it"
            elif isinstance(error, ContextExceeded):
                message = f"{error} (it is longer than the model's context length)"
                anthropic = f"prompt is too long ({error})"
            return HttpError(status, message, code, param=getattr(error, "field", None) or None, anthropic=anthropic)
    return HttpError(500, internal_error_text(error), "internal_error")


class JSONResponse(StarletteJSONResponse):
    """JSON that may hold half of a surrogate pair: a model can generate it, and UTF-8 cannot encode it."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content, separators=(",", ":"), allow_nan=False)


def is_anthropic(path: str) -> bool:
    """Return whether the path belongs to Anthropic's API."""
    return f"{path}/".startswith("/v1/messages/")


def error_response(path: str, error: HttpError) -> Response:
    """Return Anthropic's error object on the paths of its API, OpenAI's on all others."""
    body = error.to_anthropic() if is_anthropic(path) else error.to_openai()
    return JSONResponse(body, error.status, error.headers)
