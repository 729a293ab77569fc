"""Servers as processes, and streams that are read from them: what `load_serve` and `bench_serve` share."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

_START_S = 120.0
_END_S = 30.0
_DONE = "[DONE]"


@dataclass(frozen=True)
class Server:
    """A process that answers at a URL."""

    process: "subprocess.Popen[str]"
    url: str

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx2.AsyncClient]:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        async with httpx2.AsyncClient(base_url=self.url, timeout=300.0, limits=limits) as client:
            yield client


@dataclass(frozen=True)
class Outcome:
    """What came of one stream."""

    status: int
    text: str = ""
    is_whole: bool = False  # up to [DONE]
    num_tokens: int = 0
    first_s: float = 0.0  # until the first text
    took_s: float = 0.0


@contextmanager
def brigade(*flags: str | Path) -> Iterator[Server]:
    """`brigade serve` with these flags, once it answers."""
    command = [sys.executable, "-m", "coordinator", "serve", "--port", "0", *map(str, flags)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while line := process.stderr.readline():
            if found := re.match(r"serving .* at (\S+), ", line):
                break
            print(line, end="", file=sys.stderr)
        else:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {process.wait()}")
        yield Server(process, found[1])
    finally:
        _end(process)


@contextmanager
def mlx_lm_server(model: Path) -> Iterator[Server]:
    """mlx-lm's own server, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, text=True)
    try:
        _wait_answer(f"http://127.0.0.1:{port}/v1/models")
        yield Server(process, f"http://127.0.0.1:{port}")
    finally:
        _end(process)


async def stream(client: httpx2.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> Outcome:
    """Ask for a stream and read it to its end."""
    began, first_at, text, num_tokens, is_whole = time.monotonic(), 0.0, "", 0, False
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=asked) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return Outcome(answer.status_code, took_s=time.monotonic() - began)
        async for line in answer.aiter_lines():
            event = line.removeprefix("data: ")
            is_whole = is_whole or event == _DONE
            if event in (line, _DONE):
                continue
            told = json.loads(event)
            for choice in told.get("choices", ()):
                text += choice.get("text") or ""
                first_at = first_at or (time.monotonic() if text else 0.0)
            num_tokens = (told.get("usage") or {}).get("completion_tokens", num_tokens)
    now = time.monotonic()
    return Outcome(200, text, is_whole, num_tokens, (first_at or now) - began, now - began)


def _wait_answer(url: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            httpx2.get(url, timeout=_START_S)
            return
        except httpx2.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
