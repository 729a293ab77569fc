"""A worker process at a port of its own, again and again: started, hit by signals, asked, and found ended."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc

from protos.brigade_pb2 import StatusReply, StatusRequest
from protos.brigade_pb2_grpc import NodeStub
from worker.config import split_address
from worker.node.network import hop_address

ROOT = Path(__file__).resolve().parents[1]
START_S = 60.0  # imports alone take long where much else runs
_PORTS = range(12_000, 22_000)  # they and those of hops, 10,000 higher, are below those that systems give out
FREED_S = 2.0  # within which nothing is left of a coordinator that has gone


class WorkerProcess:
    """A worker's place: a port, and the process that listens there now."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str] = (),
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("worker",),
    ) -> None:
        """
        Args:
            arguments, environment: in addition.
            log: takes what it writes to standard error.
            program: the module that is the worker, and its first arguments.
        """
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.is_spoiled = False  # it has a failpoint
        self._log = log
        self._arguments, self._program = arguments, program
        self._environment = os.environ | (environment or {})
        if log is not None:
            log.touch()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def said(self) -> str:
        """What all its processes have written to its log."""
        assert self._log is not None
        return self._log.read_text(encoding="utf-8", errors="replace")

    def start(self, failpoint: str = "") -> None:
        """Start its process, which listens some time later; with a failpoint it is no process of the product."""
        if self.process is not None:
            with self.process:
                self.process.wait(5.0)  # it was killed
        program = ["tools.faults.worker", failpoint] if failpoint else self._program
        self.is_spoiled = bool(failpoint)
        with contextlib.nullcontext() if self._log is None else self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *program, "--name", self.name, "--bind", self.address, *self._arguments],
                cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=log,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def wait_listening(self) -> None:
        await until(lambda: not is_free(self.address), START_S, f"{self.name} starts")

    async def wait_ended(self, within_s: float) -> int:
        """Its exit code."""
        await until(lambda: not self.is_running, within_s, f"{self.name} ends")
        assert self.process is not None
        with self.process:
            return self.process.wait()

    def status(self) -> StatusReply:
        """What it says of itself."""
        with grpc.insecure_channel(self.address) as channel:
            return NodeStub(channel).Status(StatusRequest(), timeout=5.0, wait_for_ready=True)

    async def wait_free(self, within_s: float = FREED_S) -> float:
        """Return once it holds no session; how long that took, seconds."""
        began = time.monotonic()
        while (status := await asyncio.to_thread(self.status)).slots:
            assert time.monotonic() - began < within_s, f"{self.name} still has {status.slots} slots"
            await asyncio.sleep(0.02)
        return time.monotonic() - began


def free_port() -> int:
    """A port of loopback that is free now, and so is that of its hops."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, socket.socket() as hops, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            hops.bind(("127.0.0.1", hop_port(port)))
            return port
    raise OSError("found no free port")


def hop_port(port: int) -> int:
    """Where a node that listens on this port takes hops."""
    return split_address(hop_address(f"127.0.0.1:{port}"))[1]


def address_with_hops(port: int) -> str:
    """The address of a node on loopback that takes hops on this port, one that the system gave out."""
    address = f"127.0.0.1:{port - 10_000}"
    assert hop_address(address) == f"127.0.0.1:{port}"
    return address


def is_free(address: str) -> bool:
    """Whether nobody listens there."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


async def until(condition: Callable[[], object], within_s: float, what: str) -> float:
    """Return once the condition holds; how long that took, seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.02)
    return time.monotonic() - began
