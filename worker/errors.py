"""The exceptions and their exit codes. Other modules decide how errors are sent and printed."""

import traceback
from typing import Self, TypeVar

E = TypeVar("E", bound=BaseException)


class BrigadeError(Exception):
    """An error caused by a user, a file or a peer. It says what was expected, what was found and what to do."""

    exit_code = 3

    def __init__(self, message: str, *, node: str = "") -> None:
        """`node` is the worker where the error occurred; empty for this process."""
        super().__init__(message)
        self.message = message
        self.node = node

    def at(self, node: str) -> Self:
        """Set the worker's name unless the error has one, and return the error."""
        self.node = self.node or node
        return self

    def __str__(self) -> str:
        return f"worker {self.node}: {self.message}" if self.node else self.message


class InputError(BrigadeError):
    """A request with a wrong parameter."""

    exit_code = 2

    def __init__(self, field: str, message: str) -> None:
        """`field` is the parameter's name in a request (`max_tokens`); empty if no single parameter is wrong."""
        super().__init__(message)
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class ContextExceeded(InputError):
    """A prompt leaves no room for an answer, or no node has memory for it."""

    def __init__(self, field: str, message: str, *, num_tokens: int = 0, most: int = 0, context: int = 0) -> None:
        """`num_tokens` is the prompt's length, `most` its limit, `context` that of the whole; 0 means unknown."""
        super().__init__(field, message)
        self.num_tokens = num_tokens
        self.most = most
        self.context = context


class ConfigError(BrigadeError):
    """cluster.yaml, a flag or a layer split is wrong."""

    exit_code = 2


class ModelError(BrigadeError):
    """A checkpoint is missing, damaged, unsupported, or not the same on every node."""

    exit_code = 2


class ModelLacking(ModelError):
    """A node has no copy of the model or of its layers; the coordinator may send it."""


class FrameError(BrigadeError):
    """A peer sent what this stage does not expect."""


class CacheMismatch(BrigadeError):
    """A slot does not hold the prefix that a window continues."""


class PrefixLost(CacheMismatch):
    """A piece of a prefix is not on this node's disk any more, or damaged: the session has to compute its rows."""


class SamplingError(BrigadeError):
    """A session's sampling parameters are invalid, or invalid for this model."""

    exit_code = 2


class OutOfMemory(BrigadeError):
    """A node has too little memory."""


class NodeBusy(BrigadeError):
    """The node already serves another coordinator."""


class QueueFull(BrigadeError):
    """Too many requests are waiting."""


class WaitedTooLong(QueueFull):
    """A request waited for memory until its deadline."""


class ReaderLost(BrigadeError):
    """A client did not read its answer, which was abandoned."""


class StageLost(BrigadeError):
    """A node of the chain has ended, stopped responding, or was never reachable."""


CLOSED_AT_ONCE = "closed the connection before any reply: it refused our certificate, expects TLS, or has ended"
NO_WORKER = (
    "what answers there is no worker, perhaps a web server; correct the address, end that program, or give the worker "
    "another port"
)


class Unanswered(StageLost):
    """Nothing answers at a worker's addresses. Raised by coordinators only; `found` is the message without advice."""

    def __init__(self, found: str, *, node: str = "", start: str = "") -> None:
        """`start` says where and how to start the worker."""
        super().__init__(f"{found}. Start it {start}" if start else found, node=node)
        self.found = found


class CallerRefused(StageLost):
    """A worker answers, but expects TLS or refuses our certificate. Raised by coordinators only."""


class NodeSilent(StageLost):
    """A node of the chain does not respond on an open connection: it is stopped, asleep or disconnected."""


class PoisonRequest(StageLost):
    """A request is abandoned because the chain was lost several times while it ran."""


class ChainReplaced(StageLost):
    """A chain is replaced by another one in an orderly way, which does not count as a loss."""


class NodeReturned(ChainReplaced):
    """A node that the chain lacked has returned and loaded its layers."""


class NodeLeaving(ChainReplaced):
    """A node is about to exit, and the model fits on the other nodes."""


class EngineHung(StageLost):
    """A node of the chain responds, but its current step does not end."""


class ServerFailed(BrigadeError):
    """An HTTP server did not respond, or broke off its response."""


class InternalError(BrigadeError):
    """A bug in Brigade."""


def internal_error_text(error: BaseException) -> str:
    """Describe an unexpected error, with the file and line that raised it."""
    error, place = _origin(error)
    # the repr of a UnicodeError contains the whole text
    found = f"{type(error).__name__}({str(error)!r})" if isinstance(error, UnicodeError) else repr(error)
    return f"internal error: {found}{place}; this is a bug"


def error_text(error: BaseException) -> str:
    """Describe an error that ended a background task."""
    return str(error) if isinstance(error, BrigadeError) else internal_error_text(error)


def internal_error_kind(error: BaseException) -> str:
    """Describe an unexpected error without its own text, which may hold user data."""
    error, place = _origin(error)
    return f"internal error: {type(error).__name__}{place}; this is a bug"


def _origin(error: BaseException) -> tuple[BaseException, str]:
    places = traceback.extract_tb(error.__traceback__)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        places += traceback.extract_tb(error.__traceback__)
    return error, f" at {places[-1].filename.rpartition('/')[2]}:{places[-1].lineno}" if places else ""


def first_line(error: BaseException) -> str:
    """Return another library's error message in one line."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    line = str(error).strip().partition("\n")[0]
    line = line.partition(". The following argument types are supported")[0]  # MLX lists them on the next lines
    return line.rstrip(".") or type(error).__name__


def again(error: E) -> E:
    """Return a copy of an error of ours to raise: an object raised in several places collects all their tracebacks.

    Other errors are returned as they are.
    """
    if not isinstance(error, BrigadeError):
        return error
    other = type(error).__new__(type(error), *error.args)
    other.__dict__.update(error.__dict__)
    other.__cause__ = error.__cause__
    return other


def without_trace(error: BaseException) -> BrigadeError:
    """Return the error without its traceback, which would keep frames alive, to be raised later."""
    if not isinstance(error, BrigadeError):
        return InternalError(internal_error_text(error))
    kept = again(error)
    kept.__cause__ = None
    return kept
