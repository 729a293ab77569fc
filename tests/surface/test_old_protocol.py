"""A worker of an older version is refused before anything is loaded, in one line that says what to do."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from protos.brigade_pb2 import HelloReply, HelloRequest
from protos.brigade_pb2_grpc import NodeServicer, add_NodeServicer_to_server
from tests.cluster.commands import run_here
from tests.cluster.processes import write_cluster

OLD = 5
WAY_OUT = "brigade launch --update"


class OldWorker(NodeServicer):
    """A worker of an older version."""

    def Hello(self, request: HelloRequest, context: grpc.ServicerContext) -> HelloReply:
        return HelloReply(protocol_version=OLD, node="old", memory_bytes=1 << 30, incarnation="1", started=1)


def test_an_old_worker_is_refused_by_every_command_in_one_line(tmp_path: Path) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    add_NodeServicer_to_server(OldWorker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    config = write_cluster(tmp_path / "cluster.yaml", ("old", f"127.0.0.1:{port}"))
    try:
        for command in ("generate Hi", "serve --port 0", "doctor"):
            outcome = run_here(*command.split(), "--config", config, "--model", "demo")
            assert outcome.code == (1 if command == "doctor" else 2)
            [line] = [line for line in (outcome.out + outcome.err).splitlines() if f"protocol {OLD}" in line]
            assert WAY_OUT in line
            if command != "doctor":
                assert line.startswith("error: worker old:") and not outcome.out
                assert outcome.err.rstrip().endswith(line), "nothing is said after it"
    finally:
        server.stop(grace=None).wait(5.0)
