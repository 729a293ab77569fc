"""Real processes of the product: started, watched, signalled and ended by tests. Every wait has a deadline."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import grpc
import psutil

from protos.brigade_pb2 import StatusReply, StatusRequest
from protos.brigade_pb2_grpc import NodeStub

ROOT = Path(__file__).parents[2]
START_S = 60.0  # imports alone take seconds on a busy machine
FINISH_S = 90.0


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    code: int
    out: str
    err: str


class Stream:
    """What a process writes to one of its streams, read as it comes."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pieces: list[bytes] = []
        self._pipe = pipe
        self._changed = threading.Condition()
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return b"".join(self.pieces).decode(errors="backslashreplace")

    def wait_match(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first match in all that was written so far."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or re.search(pattern, self.text), timeout_s)
        match = re.search(pattern, self.text)
        assert match, f"no {pattern!r} within {timeout_s} s in: {self.text!r}"
        return match

    def close(self) -> None:
        self._reader.join(5.0)
        self._pipe.close()

    def _read(self) -> None:
        while piece := os.read(self._pipe.fileno(), 65536):
            with self._changed:
                self.pieces.append(piece)
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Running:
    """A python process with its streams."""

    def __init__(self, *arguments: str | Path, stdin: str | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout and self.process.stderr
        self.out, self.err = Stream(self.process.stdout), Stream(self.process.stderr)
        if self.process.stdin and stdin is not None:
            self.process.stdin.write(stdin.encode(errors="surrogateescape"))
            self.process.stdin.close()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = FINISH_S) -> Outcome:
        """How it ended; fails the test if it has not after `timeout_s`."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            told = f"stdout {self.out.text[-500:]!r}, stderr {self.err.text[-500:]!r}"
            raise AssertionError(f"{self.process.args} runs after {timeout_s:.0f} s: {told}") from None
        self.out.close()
        self.err.close()
        return Outcome(code, self.out.text, self.err.text)

    def end(self) -> None:
        """End it whatever state it is in."""
        if self.is_running:
            self.send_signal(signal.SIGCONT)
            self.process.kill()
        self.wait(10.0)


class Starter:
    """Starts processes and ends those that are left over."""

    def __init__(self) -> None:
        self._started: list[Running] = []
        self._children: list[psutil.Process] = []

    def python(self, *arguments: str | Path, stdin: str | None = None) -> Running:
        self._started.append(Running(*arguments, stdin=stdin))
        return self._started[-1]

    def brigade(self, *arguments: str | Path, stdin: str | None = None) -> Running:
        return self.python("-m", "coordinator", *arguments, stdin=stdin)

    def worker(self, name: str, *arguments: str | Path, program: tuple[str | Path, ...] = ("-m", "worker")) -> "Worker":
        """A worker on a free port, or where `arguments` say; not yet listening. It tells nobody, unless they say so."""
        place = () if {"--bind", "--config"} & set(arguments) else ("--bind", "127.0.0.1:0")
        silence = () if "--announce" in arguments else ("--no-announce",)
        return Worker(name, self.python(*program, "--name", name, *place, *silence, *arguments))

    def children(self, running: Running, count: int) -> list[psutil.Process]:
        """Its child processes, once there are so many; ended in the end if they do not end by themselves."""
        deadline = time.monotonic() + START_S
        parent = psutil.Process(running.process.pid)
        while len(found := parent.children()) < count:
            assert time.monotonic() < deadline and running.is_running, running.err.text
            time.sleep(0.1)  # to look at all processes takes several milliseconds
        self._children += found
        return list(found)

    def end(self) -> None:
        for running in self._started:
            running.end()
        for child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


class Worker:
    """A separately started worker."""

    def __init__(self, name: str, running: Running) -> None:
        self.name = name
        self.running = running

    @property
    def address(self) -> str:
        """Where it listens; waits until it does."""
        return self.running.err.wait_match(r"listens on (\S+)\n", START_S)[1]

    def send_signal(self, number: signal.Signals) -> None:
        self.running.send_signal(number)

    def status(self) -> StatusReply:
        """What it says of itself."""
        with grpc.insecure_channel(self.address) as channel:
            return NodeStub(channel).Status(StatusRequest(), timeout=30.0, wait_for_ready=True)

    def wait_slots(self, count: int, timeout_s: float) -> None:
        """Return once it has this many sessions."""
        deadline = time.monotonic() + timeout_s
        while (slots := self.status().slots) != count:
            assert time.monotonic() < deadline, f"{self.name} has {slots} slots after {timeout_s} s, expected {count}"
            time.sleep(0.05)


@contextlib.contextmanager
def starting() -> Iterator[Starter]:
    starter = Starter()
    try:
        yield starter
    finally:
        starter.end()


def run(*arguments: str | Path, stdin: str | None = None, timeout_s: float = FINISH_S) -> Outcome:
    """Run `python -m coordinator ...` to its end."""
    with starting() as start:
        return start.brigade(*arguments, stdin=stdin).wait(timeout_s)


def write_cluster(path: Path, *nodes: tuple[str, str] | tuple[str, str, str], **keys: str) -> Path:
    """A cluster.yaml with workers of (name, address) or (name, address, memory), and top-level keys."""
    lines = [f"{key}: {value}" for key, value in keys.items()] + (["workers:"] if nodes else [])
    for name, address, *memory in nodes:
        lines.append(f"  - {{name: {name}, address: '{address}'" + (f", memory: {memory[0]}" if memory else "") + "}")
    path.write_text("\n".join(lines) + "\n")
    return path


def status_of(worker: psutil.Process) -> StatusReply | None:
    """What a worker says of itself, at whichever of its ports is not that of its hops; None if it does not listen."""
    for each in worker.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN:
            with grpc.insecure_channel(f"127.0.0.1:{each.laddr.port}") as channel, contextlib.suppress(grpc.RpcError):
                return NodeStub(channel).Status(StatusRequest(), timeout=30.0, wait_for_ready=True)
    return None
