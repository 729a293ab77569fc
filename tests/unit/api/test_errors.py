import pytest

from coordinator.api.errors import JSONResponse, http_error
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
    ReaderLost,
    SamplingError,
    StageLost,
    WaitedTooLong,
)


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (ContextExceeded("prompt", "too long"), 400, "context_length_exceeded", None),
        (InputError("stop", "wrong"), 400, "invalid_value", None),
        (SamplingError("the grammar is too complex", node="mini"), 400, "invalid_value", None),
        (ConfigError("no such split"), 500, "internal_error", None),
        (QueueFull("full"), 429, "rate_limit_exceeded", "1"),
        (WaitedTooLong("late"), 503, "queue_timeout", "5"),
        (NodeBusy("draining"), 503, "draining", "5"),
        (StageLost("gone", node="mini"), 503, "cluster_failed", "5"),
        (PoisonRequest("given up", node="mini"), 500, "internal_error", None),
        (ReaderLost("unread"), 503, "cluster_failed", "5"),
        (ModelError("no text"), 500, "internal_error", None),
        (InternalError("bug"), 500, "internal_error", None),
        (ZeroDivisionError(), 500, "internal_error", None),
        (BrigadeError("else"), 503, "cluster_failed", "5"),
    ],
)
def test_every_error_has_a_status_and_retry(error: Exception, status: int, code: str, retry_after: str | None) -> None:
    found = http_error(error)
    assert (found.status, found.code) == (status, code)
    assert found.headers == ({"Retry-After": retry_after} if retry_after else {"x-should-retry": "false"})
    assert found.to_openai()["error"]["param"] == getattr(error, "field", None)
    # litellm raises its ContextWindowExceededError by these words only
    assert ("is longer than the model's context length" in found.message) == (code == "context_length_exceeded")


def test_half_of_a_character_is_sent_as_its_escape() -> None:
    assert JSONResponse({"say": "é\ud800"}).body == '{"say":"é\\ud800"}'.encode()
