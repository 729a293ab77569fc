"""Errors of calls: the class of an error and its node travel in the trailing metadata."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from logging import Logger
from traceback import clear_frames
from typing import Any, TypeVar

import grpc
import grpc.aio

from worker.errors import (
    CLOSED_AT_ONCE,
    NO_WORKER,
    BrigadeError,
    CacheMismatch,
    ConfigError,
    FrameError,
    InternalError,
    ModelError,
    ModelLacking,
    NodeBusy,
    NodeSilent,
    OutOfMemory,
    PrefixLost,
    SamplingError,
    StageLost,
    internal_error_text,
)
from worker.platform.text import printable, printable_lines

T = TypeVar("T")

_ENDED = (
    *("reset by peer", "Socket closed", "GOAWAY", "EOF", "Broken pipe"),
    *("Cancelling all calls", "Internal error from Core"),  # a server that stops, or is killed, within a call
)
_STRANGE = ("Received http2 header with status", "Failed parsing HTTP/2", "http1.x server")
_SILENT = ("ping timeout", "keepalive")
_UNANSWERED = "failed to connect"  # gRPC's text if no connection came about, or it broke before any reply
_UNRESOLVED = re.compile(r"(?:errors resolving|DNS resolution failed for) (?:dns:///)?([^\s\[\]]+?)(?::\d+)?:? ")
_HANDSHAKE = {  # gRPC's texts for a handshake that this side ended, and our messages; the first match counts
    "Hostname Verification Check failed": "its certificate carries another name; on it should be {node}.pem",
    "certificate has expired": "its certificate has expired; {renew}",
    "certificate is not yet valid": "its certificate is not valid yet; compare the clocks of both nodes",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of another authority; {renew}",
    "BAD_SIGNATURE": "its certificate is of another authority; {renew}",
    "WRONG_VERSION_NUMBER": "it does not encrypt, and this node has `tls:`; {encrypt}",
    "handshake failed": "no encrypted connection ({details})",
}
_BY_HAND = {
    "renew": "where the authority is: brigade keys issue {node}, and copy the file to it",
    "encrypt": "start it with a copy of this cluster.yaml and its certificate, or with --keys",
}
_KIND, _NODE = "brigade-error", "brigade-node"

_KINDS = {
    kind.__name__: kind
    for kind in (
        CacheMismatch, ConfigError, FrameError, InternalError, ModelError, ModelLacking, NodeBusy, NodeSilent,
        OutOfMemory, PrefixLost, SamplingError, StageLost,
    )
}  # fmt: skip


async def abort(context: grpc.aio.ServicerContext, error: BrigadeError) -> None:
    """End the call with this error. Never return: grpc ends the call by an exception."""
    _forget_traces(error)
    await context.abort(grpc.StatusCode.ABORTED, error.message, ((_KIND, type(error).__name__), (_NODE, error.node)))


def _forget_traces(error: BaseException | None) -> None:
    """Clear the frames of an error: grpc keeps the error that ends a call, and with it everything the frames hold."""
    while error is not None:
        clear_frames(error.__traceback__)
        error.with_traceback(None)
        error = error.__cause__ or error.__context__


def error_of(call: grpc.RpcError, node: str, hops: str = "", launch: str = "") -> BrigadeError:
    """Return the error that ended a call to `node`: the one that it sent, or StageLost.

    A ConfigError means that this side could not trust the node, or could not encrypt the connection.

    Args:
        hops: the address that was called, if that is where the node takes frames.
        launch: the command that launches the node from here, if one does; it sends configuration and certificate.
    """
    details = printable_lines(call.details() or call.code().name)
    metadata: Any = call.trailing_metadata() or ()
    said = dict(metadata)
    if said.get(_KIND) in _KINDS:
        return error_named(said[_KIND], details, said.get(_NODE) or node)
    if words := next((words for sign, words in _HANDSHAKE.items() if sign in details), None):
        fixes = {what: launch or fix.format(node=node) for what, fix in _BY_HAND.items()}
        return ConfigError(words.format(node=node, details=details, **fixes), node=node)
    if any(sign in details for sign in _STRANGE):
        return StageLost(NO_WORKER, node=node)
    if closed_before_reply(call):
        return StageLost(CLOSED_AT_ONCE, node=node)
    if name := unresolved_name(call):
        return StageLost(f"the name {name} of its address does not resolve on the node that calls it", node=node)
    if any(sign in details for sign in _SILENT):
        return NodeSilent("stopped answering (hung, asleep, or cut off)", node=node)
    if any(sign in details for sign in _ENDED):
        return StageLost("closed the connection (its process has ended)", node=node)
    if is_unconnected(call):
        advice = "where frames go; if the worker runs, open this port, too, in its firewall"
        at = f"{hops}, {advice}" if hops else f"its address ({details})"
        return StageLost(f"nothing answers at {at}", node=node)
    return StageLost(f"connection lost ({details})", node=node)


def is_unconnected(call: grpc.RpcError) -> bool:
    """Return whether nothing answered at the address."""
    return _UNANSWERED in (call.details() or "")


def unresolved_name(call: grpc.RpcError) -> str:
    """Return the host name if the call ended because it does not resolve; else an empty string."""
    found = _UNRESOLVED.search(call.details() or "")
    return found[1] if found else ""


def closed_before_reply(call: grpc.RpcError) -> bool:
    """Return whether a process closed the connection before any reply, or spoke another protocol."""
    details = call.details() or ""
    return _UNANSWERED in details and any(sign in details for sign in (*_ENDED, *_STRANGE))


def error_named(kind: str, message: str, node: str) -> BrigadeError:
    """Return the error of this class, as received from another node; StageLost for a class that no node sends."""
    return _KINDS.get(kind, StageLost)(printable_lines(message), node=printable(node))


async def next_within(within_s: float, messages: AsyncIterator[T], expected: str) -> T | None:
    """Return a call's next message, or None at the end.

    Raises:
        FrameError: there is neither in time. A silent call would keep its place, and what it holds, from others.
    """
    try:
        async with asyncio.timeout(within_s):
            return await anext(messages, None)
    except TimeoutError:
        raise FrameError(f"expected {expected}, got nothing for {within_s:g} s") from None


Context = grpc.aio.ServicerContext


@contextlib.asynccontextmanager
async def reporting(context: Context, node: str, log: Logger) -> AsyncIterator[None]:
    """End the call with a status that names `node` if the body raises. One of the few places that catch anything."""
    try:
        yield
    except BrigadeError as error:
        await abort(context, error.at(node))
    except Exception as error:
        text = internal_error_text(error)
        log.error("%s", text)
        await abort(context, InternalError(text, node=node))
