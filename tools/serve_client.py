"""Servers as processes, and streams that are read from them."""

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import httpx2

from tools.worker_process import free_port

BRIGADE = ("coordinator",)  # the module that is `brigade`, and its first arguments

_START_S = 120.0
_END_S = 30.0
_DONE = "[DONE]"
_WORDS = ("read", "the", "file", "before", "you", "change", "it", "and", "say", "why", "in", "one", "line")
_TOKENS_PER_WORD = 4.5  # by the bundled tokenizer, about


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
    longest_gap_s: float = 0.0  # between two pieces of text


@contextmanager
def brigade(*flags: str | Path, program: Sequence[str] = BRIGADE) -> Iterator[Server]:
    """`brigade serve` with these flags, once it is ready."""
    port = free_port()
    command = [sys.executable, "-m", *program, "serve", "--port", str(port), *map(str, flags)]
    with _serving(command, f"http://127.0.0.1:{port}", "/health") as server:
        yield server


@contextmanager
def mlx_lm_server(model: Path) -> Iterator[Server]:
    """mlx-lm's own server, once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(model), "--port", str(port)]
    with _serving(command, f"http://127.0.0.1:{port}", "/v1/models") as server:
        yield server


@contextmanager
def _serving(command: Sequence[str], url: str, path: str) -> Iterator[Server]:
    """The command, once `path` answers with 200. What it says goes to a file: a full pipe would stop it."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, text=True)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else the server stays
        try:
            deadline = time.monotonic() + _START_S
            while not _answers(url + path):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    raise RuntimeError(f"{' '.join(command)} does not answer: {said.read()[-2000:]}")
                time.sleep(0.1)
            yield Server(process, url)
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, before)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=_START_S).status_code == 200
    except httpx2.TransportError:
        return False


def long_text(tokens: int, number: int | None = None) -> str:
    """Return about so many tokens of text; each `number` gives another text."""
    words = enumerate(islice(cycle(_WORDS), int(tokens / _TOKENS_PER_WORD)))
    return " ".join(f"{word}{place}" if number is None else f"{word}{number}{place % 90}" for place, word in words)


async def stream(client: httpx2.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> Outcome:
    """Ask for a stream and read it to its end."""
    began, text, num_tokens, is_whole = time.monotonic(), "", 0, False
    pieces_at: list[float] = []
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=asked) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return Outcome(answer.status_code, took_s=time.monotonic() - began)
        async for told in events(answer):
            is_whole = told is None
            if told is None:
                break
            if said := "".join(choice.get("text") or "" for choice in told.get("choices", ())):
                text += said
                pieces_at.append(time.monotonic())
            num_tokens = (told.get("usage") or {}).get("completion_tokens", num_tokens)
    now = time.monotonic()
    first_s = (pieces_at[0] if pieces_at else now) - began
    longest_gap_s = max((after - before for before, after in pairwise(pieces_at)), default=0.0)
    return Outcome(200, text, is_whole, num_tokens, first_s, now - began, longest_gap_s)


async def whole_stream(client: httpx2.AsyncClient, body: dict[str, Any]) -> Outcome:
    """Ask for a stream and read it to its end. Raises RuntimeError if it ends before [DONE]."""
    found = await stream(client, body)
    if not found.is_whole:
        raise RuntimeError(f"expected a whole stream, found status {found.status}")
    return found


async def events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the events of a stream, and None for its mark of the end."""
    async for line in answer.aiter_lines():
        if (event := line.removeprefix("data: ")) != line:
            yield None if event == _DONE else json.loads(event)


def p95(seconds: Sequence[float]) -> float:
    """Return the 95th percentile, which no value exceeds by extrapolation; 0 of nothing."""
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else sum(seconds)


def print_failures(failures: Sequence[str]) -> int:
    """Print the failures; return the exit code."""
    for failure in failures:
        print(f"FAILED: {failure}")
    return int(bool(failures))


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
