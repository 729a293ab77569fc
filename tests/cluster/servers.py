"""Servers as real processes, and what tests ask of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from openai import OpenAI

from protos.brigade_pb2 import StatusReply
from tests.cluster.processes import START_S, Running, Starter, status_of


@dataclass(frozen=True)
class Server:
    """A `brigade serve` that answers, or is about to."""

    running: Running
    url: str

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(f"{self.url}{path}", timeout=30.0)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}{path}", json=body, timeout=60.0)

    def status(self, worker: psutil.Process) -> StatusReply:
        """What a local worker says of itself."""
        found = status_of(worker)
        assert found is not None
        return found


def start_server(start: Starter, model: Path, *flags: str | Path) -> Server:
    """A server on a free port, once it answers."""
    running = start.brigade("serve", "--model", model, "--port", "0", "--served-model-name", "talker", *flags)
    found = running.err.wait_match(r"serving .* at (\S+), up to \d+ tokens", START_S)
    return Server(running, found[1])
