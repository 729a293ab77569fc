"""Why a node cannot be asked, as far as can be told from here, and how to mend it. Pure."""

from collections.abc import Iterator

from coordinator.examine.finding import Finding, Kind, mend, note
from coordinator.examine.known import KnownNode
from protos.brigade_pb2 import Way
from worker.errors import CLOSED_AT_ONCE, ConfigError, ModelError, Unanswered
from worker.node.identity import Role

_NO_NAME = -1
_NO_ROUTE_DARWIN = 65  # EHOSTUNREACH; where the local network is not allowed, macOS says so at once
_REFUSED = (61, 111)  # ECONNREFUSED on Darwin and on Linux
_ALLOW = (
    "System Settings, Privacy & Security, Local Network: allow the program that runs it; "
    "Terminal and ssh need no permission (Apple TN3179)"
)
_LOOK = "is it awake, the cable in, the address right (`ipconfig getifaddr bridge0` there), its firewall open?"


def judge_unreached(node: KnownNode, coordinator: KnownNode) -> Finding:
    """Of a node whose facts are not known."""
    error = node.error
    said = error.message if error else "did not answer"
    if isinstance(error, ConfigError):
        return mend(Kind.CERTIFICATE, node.name, said, Role.WORKER.way_to_issue(node.name))
    if isinstance(error, ModelError):
        return mend(Kind.BRIGADE, node.name, said, "install the same version of Brigade on all nodes")
    if node.ways and all(way.error for way in node.ways):
        way = node.ways[0]
        return blocked(node.name, way, coordinator) or _unconnected(node.name, way, node.start)
    if said == CLOSED_AT_ONCE:
        return mend(Kind.UNREACHABLE, node.name, said, _way_to_be_trusted(node, coordinator))
    text = f"{error.found if isinstance(error, Unanswered) else said}, though connections are accepted"
    fix = f"it hangs, sleeps, or is no worker: wake or end it; then {node.start}"
    return mend(Kind.UNREACHABLE, node.name, text, fix)


def judge_addresses(node: KnownNode, coordinator: KnownNode) -> Iterator[Finding]:
    """Of a node that could be asked: those of its addresses at which it was not reached."""
    for way in node.ways:
        if way.error:
            text = f"is not reached at {way.address} ({way.error}), but at another of its addresses"
            yield blocked(node.name, way, coordinator) or note(Kind.UNREACHABLE, node.name, text, _LOOK)


def blocked(about: str, way: Way, caller: KnownNode) -> Finding | None:
    """A finding if it looks as if macOS did not let the caller into the local network."""
    if not (caller.is_mac and way.errno == _NO_ROUTE_DARWIN):
        return None
    return mend(Kind.LOCAL_NETWORK, about, f"{way.address}: no route to host (errno 65) from {caller.name}", _ALLOW)


def _way_to_be_trusted(node: KnownNode, coordinator: KnownNode) -> str:
    """For who closes connections before any reply."""
    if coordinator.facts and coordinator.facts.certificate_expires:
        return f"its log tells which; a certificate that it takes: {Role.COORDINATOR.way_to_issue(coordinator.name)}"
    return "give cluster.yaml here the `tls:` that the worker has, and its cluster's keys; else its log tells why"


def _unconnected(about: str, way: Way, start: str) -> Finding:
    if way.errno in _REFUSED:
        return mend(Kind.UNREACHABLE, about, f"no worker listens at {way.address} (connection refused)", start)
    fix = "correct `address:`, or give the IP address" if way.errno == _NO_NAME else f"{_LOOK} Then {start}"
    return mend(Kind.UNREACHABLE, about, f"{way.address}: {way.error}", fix)
