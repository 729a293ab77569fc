"""Nodes of an older version are refused before anything is loaded, in one line that says what to do."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from protos.brigade_pb2 import HelloReply, HelloRequest
from protos.brigade_pb2_grpc import NodeServicer, NodeStub, add_NodeServicer_to_server
from tests.cluster.commands import run_here
from tests.cluster.processes import START_S, starting, write_cluster

OLD = 5
WAY_OUT = "brigade launch --update"


class OldWorker(NodeServicer):
    """A worker of an older version."""

    def Hello(self, request: HelloRequest, context: grpc.ServicerContext) -> HelloReply:
        return HelloReply(protocol_version=OLD, node="old", memory_bytes=1 << 30, incarnation="1", started=1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    server = grpc.server(ThreadPoolExecutor(2))
    add_NodeServicer_to_server(OldWorker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield write_cluster(tmp_path_factory.mktemp("old") / "cluster.yaml", ("old", f"127.0.0.1:{port}"))
    server.stop(grace=None).wait(START_S)


@pytest.mark.parametrize("command", ["generate Hi", "serve --port 0"])
def test_an_old_worker_is_refused_by_the_command(command: str, config: Path) -> None:
    outcome = run_here(*command.split(), "--config", config, "--model", "demo")
    assert outcome.code == 2 and not outcome.out
    [line] = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: worker old:") and f"protocol {OLD}" in line and WAY_OUT in line
    assert outcome.err.rstrip().endswith(line), "nothing is said after it"


def test_doctor_finds_an_old_worker(config: Path) -> None:
    outcome = run_here("doctor", "--config", config, "--model", "demo")
    assert outcome.code == 1
    assert any(f"protocol {OLD}" in line and WAY_OUT in line for line in outcome.out.splitlines()), outcome.out


def test_an_old_coordinator_is_refused_by_a_worker_which_ends_well_by_an_interrupt() -> None:
    with starting() as start:
        worker = start.worker("mini")
        with grpc.insecure_channel(worker.address) as channel, pytest.raises(grpc.RpcError) as caught:
            NodeStub(channel).Hello(HelloRequest(protocol_version=OLD), timeout=START_S, wait_for_ready=True)
        details = caught.value.details()
        assert f"the coordinator speaks {OLD}" in details and WAY_OUT in details and "\n" not in details
        worker.send_signal(signal.SIGINT)
        assert worker.running.wait(START_S).code == 0
