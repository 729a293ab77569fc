"""What a worker says of its callers is in its own words, a line for each thing."""

import io

import pytest

from protos.brigade_pb2 import AttachRequest, Coordinator
from worker.errors import NodeBusy
from worker.node.log import Log

NAME = "max\nworker mini: drained\r\x1b[2J\u202e" + 5000 * "x"


def test_no_caller_writes_lines_of_its_own_or_steers_the_terminal() -> None:
    out = io.StringIO()
    log = Log("mini", out)
    with pytest.raises(NodeBusy), log.refusing(f"to load for coordinator {NAME}"):
        raise NodeBusy("is shutting down")
    with log.in_chain(AttachRequest(coordinator=Coordinator(name=NAME))):
        pass
    refused, joined, left = out.getvalue().split("\n")[:-1]
    for line, start in (
        (refused, "refused to load for coordinator"),
        (joined, "joined the chain of coordinator"),
        (left, "left the chain of coordinator"),
    ):
        assert line.startswith(f"worker mini: {start} max worker mini: drained")
        assert line.isprintable() and len(line) < 2100
