"""The exception family, its exit codes and its gRPC status table."""

import grpc


class BrigadeError(Exception):
    """Something a user, a file or a peer caused; the message says what was expected, what was found, what to do."""

    exit_code = 3
    status = grpc.StatusCode.INTERNAL


class InputError(BrigadeError):
    """A request that cannot be served as it stands."""

    exit_code = 2
    status = grpc.StatusCode.INVALID_ARGUMENT


class ConfigError(BrigadeError):
    """cluster.yaml, a flag or a layer split is wrong."""

    exit_code = 2
    status = grpc.StatusCode.OUT_OF_RANGE


class ModelError(BrigadeError):
    """A checkpoint is missing, damaged, unsupported, or not the same on every node."""

    exit_code = 2
    status = grpc.StatusCode.FAILED_PRECONDITION


class FrameError(BrigadeError):
    """A peer sent what this stage does not expect."""

    status = grpc.StatusCode.DATA_LOSS


class CacheMismatch(BrigadeError):
    """A slot does not hold the prefix that a window continues."""

    status = grpc.StatusCode.ABORTED


class NodeBusy(BrigadeError):
    """The node already serves another coordinator."""

    status = grpc.StatusCode.ALREADY_EXISTS


class QueueFull(BrigadeError):
    """As many requests wait as may wait."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class StageLost(BrigadeError):
    """A node of the chain closed, fell silent, or was never there."""

    status = grpc.StatusCode.UNAVAILABLE


_FAMILY = (InputError, ConfigError, ModelError, FrameError, CacheMismatch, NodeBusy, QueueFull, StageLost)
_BY_STATUS: dict[grpc.StatusCode, type[BrigadeError]] = {kind.status: kind for kind in _FAMILY}


def name_node(error: BrigadeError, node: str) -> str:
    """The error's message, with the node in front unless it already names one."""
    message = str(error)
    return message if message.startswith("worker ") else f"worker {node}: {message}"


def from_status(error: grpc.RpcError, node: str) -> BrigadeError:
    """The error that `node` meant, or that its silence means, by a failed call's status."""
    code, details = error.code(), error.details() or error.code().name
    kind = _BY_STATUS.get(code, StageLost)
    if kind is StageLost and not details.startswith("worker "):
        details = _in_plain_words(details)
    return kind(name_node(kind(details), node))


def _in_plain_words(details: str) -> str:
    """What gRPC says of a broken connection, for people."""
    if "ping timeout" in details or "keepalive" in details:
        return "stopped answering (hung, asleep, or cut off)"
    if any(sign in details for sign in ("reset by peer", "Socket closed", "GOAWAY", "EOF", "Broken pipe")):
        return "closed the connection (its process has ended)"
    return f"connection lost ({details})"
