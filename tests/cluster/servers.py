"""Servers, as real processes or in this one, and what tests ask of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from coordinator.api.serve import ServeOptions, serve
from coordinator.cluster.options import ClusterOptions
from tests.cluster.processes import START_S, Running, Starter
from tools.worker_process import free_port

PATIENCE_S = 30.0
TEXTS = "/v1/completions"


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


def start_server(start: Starter, model: Path, *flags: str | Path) -> Server:
    """A server on a free port, once it answers."""
    running = start.brigade("serve", "--model", model, "--port", "0", "--served-model-name", "talker", *flags)
    found = running.err.wait_match(r"serving .* at (\S+), up to \d+ tokens", START_S)
    return Server(running, found[1])


@asynccontextmanager
async def served(
    options: ClusterOptions, **more: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, "asyncio.Task[None]"]]:
    """A client of a server in this process, and the server's task, which ends with the block."""
    serving = ServeOptions("127.0.0.1", free_port(), names=("talker",), **more)
    running = asyncio.create_task(serve(options, serving))
    try:
        async with httpx2.AsyncClient(base_url=serving.url(serving.port), timeout=PATIENCE_S) as client:
            await wait_health(client, 200, running)
            yield client, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def wait_health(client: httpx2.AsyncClient, status: int, running: "asyncio.Task[None] | None" = None) -> str:
    """What it says once it has this status."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                found = await client.get("/health")
            except httpx2.ConnectError:
                assert running is None or not running.done(), running.exception()
            else:
                if found.status_code == status:
                    return str(found.json()["status"])
            await asyncio.sleep(0.02)
