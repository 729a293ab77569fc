"""Errors as statuses: what is raised on one node is raised on another, of the same kind and naming the same node."""

import asyncio
import re
from typing import Any, NoReturn

import grpc
import pytest

from worker import errors
from worker.errors import BrigadeError, InputError, NodeSilent, QueueFull, ReaderLost, ServerFailed, StageLost, again
from worker.node.rpc_errors import abort, closed_before_reply, error_of, is_unconnected, unresolved_name

KINDS = sorted(BrigadeError.__subclasses__(), key=lambda kind: kind.__name__)
OWN = (InputError, QueueFull, ReaderLost, ServerFailed)  # the coordinator's: no node means them
OF_NODES = [kind for kind in KINDS if kind not in OWN]


class Aborted(grpc.RpcError):
    """A call as its caller sees it, and as grpc raises it."""

    def __init__(self, code: grpc.StatusCode, details: str | None, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata


class Context:
    """The call as its servicer sees it."""

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]) -> NoReturn:
        raise Aborted(code, details, metadata)


def travelled(error: BrigadeError, node: str) -> BrigadeError:
    """The error as whoever called `node` gets it."""
    context: Any = Context()
    with pytest.raises(Aborted) as caught:
        asyncio.run(abort(context, error))
    return error_of(caught.value, node)


@pytest.mark.parametrize("kind", OF_NODES, ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_what_it_was_with_its_node_however_many_pass_it_on(kind: type[BrigadeError]) -> None:
    found = travelled(kind("expected one thing, got another (step 41)").at("mini"), "mini")
    assert (type(found), found.message, found.node) == (kind, "expected one thing, got another (step 41)", "mini")
    assert str(found) == "worker mini: expected one thing, got another (step 41)"
    at_mini = travelled(kind("worker bees are no node").at("studio"), "studio")
    found = travelled(at_mini.at("mini"), "mini")
    assert (found.node, str(found)) == ("studio", "worker studio: worker bees are no node")


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_no_worker_can_blame_the_request_or_the_queue_of_a_coordinator(kind: type[BrigadeError]) -> None:
    metadata = (("brigade-error", kind.__name__), ("brigade-node", "mini"))
    found = error_of(Aborted(grpc.StatusCode.RESOURCE_EXHAUSTED, "message too large", metadata), "mini")
    assert type(found) is StageLost and found.node == "mini"


@pytest.mark.parametrize(
    "metadata", [(), (("brigade-error", "ConfigError"), ("brigade-node", "mi\x1bni"))], ids=["grpc", "ours"]
)
def test_another_nodes_words_do_not_control_the_terminal(metadata: tuple[tuple[str, str], ...]) -> None:
    found = error_of(Aborted(grpc.StatusCode.UNAVAILABLE, "its \x1b[2Jdisk\x07 is\nfull", metadata), "mini")
    assert "its [2Jdisk is\nfull" in str(found) and str(found).replace("\n", "").isprintable()


BROKEN = ("recvmsg:Connection reset by peer (104)", "Socket closed", "Cancelling all calls", "Internal error from Core")


@pytest.mark.parametrize(
    ("details", "kind", "words"),
    [
        ("Stream removed (ping timeout)", NodeSilent, "stopped answering (hung, asleep, or cut off)"),
        *((details, StageLost, "closed the connection (its process has ended)") for details in BROKEN),
    ],
)
def test_a_broken_connection_is_told_in_plain_words(details: str, kind: type[BrigadeError], words: str) -> None:
    found = error_of(Aborted(grpc.StatusCode.UNAVAILABLE, details), "mini")
    assert (type(found), str(found)) == (kind, f"worker mini: {words}")
    passed_on = travelled(found.at("studio"), "studio")
    assert (type(passed_on), passed_on.node) == (kind, "mini")


def unconnected(why: str) -> Aborted:
    """As gRPC says that no connection came about."""
    details = f"failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:5: {why}"
    return Aborted(grpc.StatusCode.UNAVAILABLE, details)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed.", "name"),
        ("Tls handshake failed: SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "has expired"),
        ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "not valid yet"),
        ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", "other authority"),
        ("Tls handshake failed: error:1a000064:ECDSA routines:BAD_SIGNATURE", "other authority"),
        ("Tls handshake failed: SSL_ERROR_SSL: WRONG_VERSION_NUMBER", "it does not encrypt"),
        ("Tls handshake failed: out of luck", "no encrypted connection .*out of luck"),
    ],
)
def test_a_handshake_that_this_side_ended_is_told_in_plain_words(why: str, words: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"^worker mini: .*{words}"):
        raise error_of(unconnected(why), "mini")
    by_hand, launched = (str(error_of(unconnected(why), "mini", launch=launch)) for launch in ("", "from here: launch"))
    fixed = ("has expired", "other authority", "it does not encrypt")
    assert launched == (f"{by_hand.partition('; ')[0]}; from here: launch" if words in fixed else by_hand)


def test_somebody_who_closes_is_told_from_nobody() -> None:
    closed, refused = unconnected("Socket closed"), unconnected("Connection refused (111)")
    lost = Aborted(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert [closed_before_reply(call) for call in (closed, refused, lost)] == [True, False, False]
    assert [is_unconnected(call) for call in (closed, refused, lost)] == [True, True, False]
    for call in (closed, unconnected("recvmsg:Connection reset by peer (104)")):
        found = error_of(call, "mini")
        words = "closed the connection before any reply: it refused our certificate, expects TLS, or has ended"
        assert type(found) is StageLost and str(found) == f"worker mini: {words}"


@pytest.mark.parametrize(
    "details",
    [
        "errors resolving {}:50070: [field:hostname lookup error:address lookup failed for {}:50070: Domain name not "
        "found]",
        "errors resolving {}:50070: [field:hostname lookup error:Address lookup failed for {}:50070 os_error: Name or "
        "service not known syscall: getaddrinfo]",
        "DNS resolution failed for {}:50070: C-ares status is not ARES_SUCCESS qtype=A name={}: Domain name not found",
    ],
    ids=["c-ares", "getaddrinfo", "older"],
)
def test_a_name_that_does_not_resolve_is_told_without_grpcs_words(details: str) -> None:
    call = Aborted(grpc.StatusCode.UNAVAILABLE, details.replace("{}", "mini.local"))
    assert unresolved_name(call) == "mini.local" and not is_unconnected(call)
    assert str(error_of(call, "mini")).startswith("worker mini: the name mini.local of its address does not resolve")
    assert not unresolved_name(unconnected("Connection refused (111)"))


@pytest.mark.parametrize(
    "call",
    [
        Aborted(grpc.StatusCode.UNIMPLEMENTED, "Received http2 header with status: 404"),
        unconnected("Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 79)"),
    ],
    ids=["HTTP/2", "HTTP/1"],
)
def test_a_web_server_in_a_workers_place_is_told(call: Aborted) -> None:
    assert re.fullmatch(
        "worker mini: what answers there is no worker, .*; correct the address, end .*another port",
        str(error_of(call, "mini")),
    )


@pytest.mark.parametrize("why", ["Connection refused (111)", "connection attempt timed out before receiving SETTINGS"])
def test_a_port_that_nothing_answers_at_is_no_lost_connection(why: str) -> None:
    assert str(error_of(unconnected(why), "mini")).startswith("worker mini: nothing answers at its address (failed to")
    found = error_of(unconnected(why), "mini", hops="10.0.0.2:60071")
    assert type(found) is StageLost
    assert re.fullmatch(r"worker mini: nothing answers at 10\.0\.0\.2:60071, .* open this port, .*", str(found))
    lost = error_of(Aborted(grpc.StatusCode.UNAVAILABLE, "out of luck"), "mini", hops="10.0.0.2:60071")
    assert str(lost) == "worker mini: connection lost (out of luck)"


def test_a_status_that_no_node_of_ours_gave_is_a_lost_stage_with_a_name_and_a_reason() -> None:
    for code in grpc.StatusCode:
        for details in ("out of luck", "", None):
            found = error_of(Aborted(code, details), "mini")
            assert type(found) is StageLost
            assert str(found) == f"worker mini: connection lost ({details or code.name})"


def test_an_error_is_named_once_and_an_input_error_names_its_parameter() -> None:
    assert str(StageLost("fell").at("studio").at("mini")) == "worker studio: fell"
    assert str(StageLost("fell")) == "fell"
    assert str(InputError("top_k", "expected less")) == "top_k: expected less"
    assert str(InputError("", "expected less")) == "expected less"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_for_several_places_is_one_object_per_place(kind: type[BrigadeError]) -> None:
    error = kind("top_p", "fell") if kind is InputError else kind("fell", node="mini")
    error.__cause__ = KeyError("x")
    with pytest.raises(kind):
        raise error
    other = again(error)
    assert other is not error and other.__traceback__ is None
    assert (type(other), str(other), vars(other), other.__cause__) == (kind, str(error), vars(error), error.__cause__)
