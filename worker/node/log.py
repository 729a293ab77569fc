"""What a worker says on standard error: one line for each thing that a person would want to know."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TextIO

from protos.brigade_pb2 import AttachRequest, LoadRequest
from worker.errors import BrigadeError, ModelLacking, internal_error_text
from worker.process.printable import printable

_MOST_CHARACTERS = 2000  # of a line


class Log:
    """Lines that begin with the node's name; none at all without somewhere to write them."""

    def __init__(self, name: str, out: TextIO | None) -> None:
        self._name = name
        self._out = out

    def listens(self, address: str) -> None:
        self._write(f"worker {self._name} listens on {address}")

    def listens_later(self, why_not_now: str) -> None:
        self._say(f"{why_not_now}; it is tried again and again")

    def not_announced(self, why: str) -> None:
        self._say(f"cannot announce itself ({why}); give its address in cluster.yaml. It serves all the same")

    @contextlib.contextmanager
    def loading(self, request: LoadRequest) -> Iterator[None]:
        """Say what is loaded, and whether it was given up: its coordinator left, or this node ends."""
        self._say(f"loading {_shard(request)}")
        try:
            yield
        except asyncio.CancelledError:
            self._say(f"gave up loading {_shard(request)}: nobody waits for it any more")
            raise

    def loaded(self, request: LoadRequest, num_bytes: int, took_s: float) -> None:
        self._say(f"loaded {_shard(request)}: {num_bytes / 2**20:.1f} MiB in {took_s:.1f} s")

    def kept(self, request: LoadRequest) -> None:
        self._say(f"kept {_shard(request)}")

    def let_go(self, request: LoadRequest, why: str) -> None:
        self._say(f"let {_shard(request)} go: {why}; it is read again when it is wanted")

    def received(self, request: LoadRequest, num_bytes: int, took_s: float) -> None:
        self._say(f"was sent {num_bytes / 2**20:.1f} MiB of {_shard(request)} in {took_s:.1f} s")

    def failed(self, text: str) -> None:
        self._say(text)

    def say_failed(self, task: "asyncio.Task[None]") -> None:
        """Say why, if it has: what a task that nobody waits for calls in the end."""
        if not task.cancelled() and (error := task.exception()):
            self.failed(str(error) if isinstance(error, BrigadeError) else internal_error_text(error))

    @contextlib.contextmanager
    def refusing(self, what: str) -> Iterator[None]:
        """Say why, if what is done here is refused."""
        try:
            yield
        except ModelLacking as error:
            self._say(f"waits to be sent what it lacks: {error.message.partition(';')[0]}")
            raise
        except BrigadeError as error:
            self._say(f"refused {what}: {error}")
            raise

    @contextlib.contextmanager
    def in_chain(self, request: AttachRequest) -> Iterator[None]:
        """Say that the node has joined, and in the end that it has left; and why, if it failed."""
        chain = f"the chain of coordinator {request.coordinator.name}"
        self._say(f"joined {chain} as stage {request.stage} of {request.num_stages}, epoch {request.epoch}")
        why = ""
        try:
            yield
        except BrigadeError as error:
            why = f": {error}"
            raise
        finally:
            self._say(f"left {chain}{why}")

    def draining(self, num_slots: int, within_s: float) -> None:
        self._say(f"draining: {num_slots} sessions in progress or kept, at most {within_s:.0f} s")

    def drained(self, num_slots: int) -> None:
        self._say(f"ends with {num_slots} sessions in progress" if num_slots else "drained")

    def _say(self, text: str) -> None:
        self._write(f"worker {self._name}: {text}")

    def _write(self, text: str) -> None:
        """One line, whatever callers have put into their names."""
        if self._out is not None:
            line = printable(" ".join(text.splitlines()), _MOST_CHARACTERS)
            with contextlib.suppress(OSError):  # whoever read it has gone: no reason to stop serving
                print(line, file=self._out, flush=True)


def _shard(request: LoadRequest) -> str:
    return f"layers [{request.start}, {request.end}) of {request.model}"
