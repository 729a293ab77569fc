"""Errors as HTTP knows them: status, OpenAI's error object, and whether it is worth while to try again. Pure."""

import json
from dataclasses import dataclass, field
from typing import Any

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

_SOON_S, _LATER_S = 1, 5
_TOO_LONG = "it is longer than the model's context length"  # the words by which litellm knows it, whatever the code


@dataclass(frozen=True)
class HttpError:
    """What a client is told of an error. `type` and `code` are OpenAI's words."""

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

    def to_openai(self) -> dict[str, Any]:
        """The error object; a stream sends it as its last event."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_json(self) -> bytes:
        return json.dumps(self.to_openai()).encode()


class Refusal(Exception):
    """A request that ends here, before any shape has read it."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def refuse(status: int, message: str, code: str, **rest: Any) -> Refusal:
    """The refusal of a request that is itself wrong, or not allowed."""
    return Refusal(HttpError(status, "invalid_request_error", message, code, **rest))


def unavailable(why: str, code: str, *, after_s: int = _LATER_S) -> Refusal:
    """It would be served at another time."""
    return Refusal(HttpError(503, "service_unavailable", why, code, retry_after_s=after_s))


def http_error(error: BaseException) -> HttpError:
    """What a client is told of this."""
    if isinstance(error, Refusal):
        return error.error
    if isinstance(error, ContextExceeded):
        said = f"{error} ({_TOO_LONG})"
        return HttpError(400, "invalid_request_error", said, "context_length_exceeded", error.field)
    if isinstance(error, InputError):
        return HttpError(400, "invalid_request_error", str(error), "invalid_value", error.field or None)
    if isinstance(error, SamplingError):  # of a stage that has come to what nobody could know before
        return HttpError(400, "invalid_request_error", str(error), "invalid_value")
    if isinstance(error, WaitedTooLong):
        return HttpError(503, "service_unavailable", str(error), "queue_timeout", retry_after_s=_LATER_S)
    if isinstance(error, QueueFull):
        return HttpError(429, "rate_limit_error", str(error), "rate_limit_exceeded", retry_after_s=_SOON_S)
    if isinstance(error, NodeBusy):
        return HttpError(503, "service_unavailable", str(error), "draining", retry_after_s=_LATER_S)
    if isinstance(error, InternalError | ModelError | ConfigError):
        return HttpError(500, "server_error", str(error), "internal_error")
    if isinstance(error, BrigadeError):
        return HttpError(503, "service_unavailable", str(error), "cluster_failed", retry_after_s=_LATER_S)
    return HttpError(500, "server_error", internal_error_text(error), "internal_error")
