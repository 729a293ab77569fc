"""Rig: worker processes kept from case to case, and clusters over them whose coordinator is in this process."""

import asyncio
import contextlib
import io
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc

from coordinator.cluster.open import open_cluster, read_model
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.runner import Runner, generate
from coordinator.cluster.tokenizer import Tokenizer
from coordinator.planning.recovery import Limits
from coordinator.sessions.answer import Answer
from coordinator.sessions.generation_config import eos_ids
from coordinator.sessions.request import Request
from protos.brigade_pb2 import StatusReply, StatusRequest
from protos.brigade_pb2_grpc import NodeStub
from tools.faults.trial import Trial
from worker.config import Cluster, Coordinator, Worker
from worker.model.checkpoint import Checkpoint
from worker.model.modelspec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("first", "last")  # stages 1 and 2
CONTEXT = 1024  # tokens
START_S = 60.0  # imports alone take long where much else runs
_PORTS = range(20_000, 30_000)  # below those that systems give out by themselves
FREED_S = 2.0  # within which nothing is left of a coordinator that has gone


class Node:
    """A worker's place: a port, and the process that listens there now."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None
        self.is_spoiled = False  # it has a failpoint
        self._log = folder / f"{name}.log"
        self._log.touch()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def said(self) -> str:
        """What all its processes have written to standard error."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def start(self, failpoint: str = "") -> None:
        """Start its process, which listens some time later; with a failpoint it is no process of the product."""
        if self.process is not None:
            self.process.wait(5.0)  # it was killed
        program = ["tools.faults.worker", failpoint] if failpoint else ["worker"]
        self._num_said = len(self.said)
        self.is_spoiled = bool(failpoint)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *program, "--name", self.name, "--bind", self.address],
                cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdin=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def wait_listening(self) -> None:
        await until(lambda: f"{self.name} listens on" in self.said[self._num_said :], START_S, f"{self.name} starts")

    async def wait_ended(self, within_s: float) -> int:
        """Its exit code."""
        await until(lambda: not self.is_running, within_s, f"{self.name} ends")
        assert self.process is not None
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


class Rig:
    """Two workers and a model. Use as an async context manager; it ends whatever it has started."""

    def __init__(self, folder: Path, model: str = "demo") -> None:
        self.folder = folder
        self.model = model
        self.nodes = {name: Node(name, folder) for name in NAMES}
        self.checkpoint: Checkpoint
        self.spec: ModelSpec
        self.tokenizer: Tokenizer
        self.eos: frozenset[int]
        self._expected: dict[str, Answer] = {}

    async def __aenter__(self) -> "Rig":
        self.checkpoint, self.spec = await read_model(self.model)
        self.tokenizer = Tokenizer(self.checkpoint)
        self.eos = eos_ids(self.checkpoint.config, self.checkpoint.generation_config) | self.tokenizer.eos
        return self

    async def __aexit__(self, *exc: object) -> None:
        for node in self.nodes.values():
            if node.is_running:
                node.kill()
                node.signal(signal.SIGCONT)
                await node.wait_ended(5.0)

    @property
    def first(self) -> Node:
        return self.nodes["first"]

    @property
    def last(self) -> Node:
        return self.nodes["last"]

    async def make_whole(self, **failpoints: str) -> None:
        """Every worker runs and holds no session; these with these failpoints, the others as they are installed."""
        for node in self.nodes.values():
            failpoint = failpoints.get(node.name, "")
            if node.is_running and (failpoint or node.is_spoiled):
                node.kill()
                await node.wait_ended(5.0)
            if not node.is_running:
                node.start(failpoint)
        for node in self.nodes.values():
            await node.wait_listening()
            await node.wait_free()

    async def end(self) -> list[int]:
        """Tell every worker to end; their exit codes."""
        for node in self.nodes.values():
            node.signal(signal.SIGTERM)
        return [await node.wait_ended(15.0) for node in self.nodes.values()]

    def prompt(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_chat([{"role": "user", "content": text}]))

    def options(
        self,
        limits: Limits,
        *,
        nodes: Sequence[str] = NAMES,
        via: dict[str, str] | None = None,
        memory: int | None = None,
        check_finite: bool = False,
    ) -> ClusterOptions:
        """A configuration over these nodes, some of them at another address (`via`), each with so much memory."""
        addresses = {name: self.nodes[name].address for name in nodes} | (via or {})
        workers = tuple(Worker(name=name, address=(addresses[name],), memory=memory) for name in nodes)
        cluster = Cluster(coordinator=Coordinator(memory=memory), workers=workers)
        return ClusterOptions(cluster, self.model, None, CONTEXT, check_finite=check_finite, limits=limits)

    @contextlib.asynccontextmanager
    async def opened(self, options: ClusterOptions) -> AsyncIterator[Trial]:
        """A cluster that requests can be tried on. What it says on standard error is kept."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            async with open_cluster(options, self.checkpoint, self.spec, CONTEXT) as supervisor:
                trial = Trial(supervisor, self.tokenizer, said)
                async with Runner(supervisor.chain, when_lost=trial.reopen) as trial.runner:
                    yield trial

    async def expected(self, requests: Sequence[Request]) -> list[Answer]:
        """What one process answers to each alone; computed once."""
        if missing := [each for each in requests if _key(each) not in self._expected]:
            options = ClusterOptions(Cluster(), self.model, 0, CONTEXT)
            with contextlib.redirect_stderr(io.StringIO()):
                async with open_cluster(options, self.checkpoint, self.spec, CONTEXT) as one:
                    for each in missing:
                        text = self.tokenizer.stream(each.stops)
                        self._expected[_key(each)] = await generate(one.chain, each, text=text)
        return [self._expected[_key(each)] for each in requests]


def _key(request: Request) -> str:
    return repr(request)


def free_port() -> int:
    """A port that is free now."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("found no free port")


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
