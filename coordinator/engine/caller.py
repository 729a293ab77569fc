"""The client whose request the present task answers: the request's id, and what its API key is and allows."""

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request that the present task answers
ARRIVED: ContextVar[int] = ContextVar("arrived", default=0)  # when it came, monotonic ns; 0 if it came by no API
BEST_PRIORITY: ContextVar[int] = ContextVar("best_priority", default=0)  # that the request's API key may ask for
KEY_HOLDER: ContextVar[str] = ContextVar("key_holder", default="")  # the name of its API key; empty without keys
KEY_DIGEST: ContextVar[str] = ContextVar("key_digest", default="")  # of the key itself, in hex; empty likewise


def usual_priority() -> int:
    """Return the priority of a request that names none: 0, unless its API key may ask for less only."""
    return max(0, BEST_PRIORITY.get())
