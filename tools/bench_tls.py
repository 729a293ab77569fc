"""What encryption costs: frames to another process over loopback, with TLS and without.

python -m tools.bench_tls [--hidden-size 4096] [--steps 300] [--chunks 40]

All ways take turns, one frame each, so that other work on the machine burdens them alike. A frame goes the way of a
chain's, from one MLX thread's loop to another's (parts, gRPC, joined), and is answered by a small message, as the last
stage answers with a token. A gap is the longest that one of these loops kept a task waiting while a frame was on its
way.
"""

import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer
import uvloop

from coordinator.deploy.authority import Authority
from protos.brigade_pb2 import Credit, Frame, Timing
from protos.brigade_pb2_grpc import HopServicer
from tools.child import child
from tools.figures import table
from worker.compute.ahead import received_array
from worker.node.certificates import KeyFile, Role
from worker.node.framing import ENCRYPTED, PLAIN, FrameAssembler, Wire
from worker.node.hop import add_hops, open_relay, pack
from worker.node.network import Network
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.text import format_bytes
from worker.platform.threads import MlxThread

_CHUNK_ROWS = 2048
_WARM_UP = 5  # frames
_TICK_S = 0.0005


@dataclass
class Way:
    """How frames travel, and what they took: milliseconds per frame, and the longest gap of both loops."""

    name: str
    wire: Wire
    network: Network
    found: list[tuple[float, float]] = field(default_factory=list)

    def medians(self) -> list[float]:
        return [statistics.median(values) for values in zip(*self.found, strict=True)]


class Ticker:
    """How long the event loop keeps a task waiting beyond what it asked for."""

    def __init__(self, *, is_ticking: bool) -> None:
        """Unless it `is_ticking`, all times are 0."""
        self._longest_s = 0.0
        self._task = asyncio.create_task(self._tick()) if is_ticking else None

    def take(self) -> float:
        """The longest wait since the last call, milliseconds."""
        gap_s, self._longest_s = self._longest_s, 0.0
        return 1e3 * gap_s

    async def _tick(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.perf_counter()
            self._longest_s, before = max(self._longest_s, now - before - _TICK_S), now


class Receiver(HopServicer):
    """The other process: takes frames in and says so, with the longest gap of its loop."""

    def __init__(self, wire: Wire, ticker: Ticker) -> None:
        self._wire = wire
        self._ticker = ticker

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        joiner = FrameAssembler(lambda frame: None, self._wire)
        self._ticker.take()
        async for part in parts:
            if arrival := joiner.add(part):
                received_array(arrival.header, arrival.payload)
                yield Credit(frames=1)
                print(json.dumps(self._ticker.take()), flush=True)


def main(
    hidden_size: Annotated[int, typer.Option(min=1, help="Of a row, in bfloat16.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Frames of one row, each way.")] = 300,
    chunks: Annotated[int, typer.Option(min=1, help="Frames of 2,048 rows, each way.")] = 40,
    serve: Annotated[Path | None, typer.Option(hidden=True)] = None,
    ticking: Annotated[bool, typer.Option("--ticking", hidden=True)] = False,
) -> None:
    """Milliseconds per frame, with TLS and without, and how they compare."""
    if serve is not None:
        uvloop.run(_serve(serve, is_ticking=ticking))
        return
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.make(Path(folder) / "keys")
        authority.issue("studio", Role.COORDINATOR)
        authority.issue("mini", Role.WORKER)
        print(f"{machine_name()}; load before: {os.getloadavg()[0]:.1f}")
        uvloop.run(_measure(authority.folder, hidden_size, {1: steps, _CHUNK_ROWS: chunks}))
        print(f"load after: {os.getloadavg()[0]:.1f}")


def _ways(keys: Path, name: str, role: Role) -> list[Way]:
    encrypted = KeyFile(keys, name, role)
    links = ("plaintext", PLAIN, Network()), ("TLS", ENCRYPTED, Network(keys=encrypted))
    return [
        Way(link, replace(wire, part_bytes=size), network)
        for link, wire, network in links
        for size in (1 << 17, 1 << 20, wire.part_bytes)
    ]


async def _serve(keys: Path, *, is_ticking: bool) -> None:
    await MlxThread().call(_receive(keys, is_ticking=is_ticking))


async def _receive(keys: Path, *, is_ticking: bool) -> None:
    """Take frames on the MLX thread's loop, as a worker does."""
    servers = []  # gRPC stops one that nobody holds
    ticker, ports = Ticker(is_ticking=is_ticking), []
    for way in _ways(keys, "mini", Role.WORKER):
        server = way.network.server()
        add_hops(Receiver(way.wire, ticker), server)
        ports.append(way.network.listen(server, "127.0.0.1:0"))
        await server.start()
        servers.append(server)
    print(json.dumps(ports), flush=True)
    await asyncio.Event().wait()


async def _measure(keys: Path, hidden_size: int, counts: dict[int, int]) -> None:
    for num_rows, count in counts.items():
        ways = _ways(keys, "studio", Role.COORDINATOR)
        await _send(ways, keys, num_rows, hidden_size, count)
        what = f"{num_rows:,} x {hidden_size:,} x bfloat16 ({num_rows * hidden_size / 2**19:.2f} MiB)"
        _print(f"a frame of {what} there and its answer back, medians of {count}", ways)


async def _send(ways: Sequence[Way], keys: Path, num_rows: int, hidden_size: int, count: int) -> None:
    ticking = ["--ticking"] if num_rows > 1 else []  # it takes time itself, which counts in a small frame
    with closing(MlxThread()) as thread:
        async with child("tools.bench_tls", "--serve", keys, *ticking) as (ports, gaps, _):
            gap = partial(_line_of, gaps, asyncio.get_running_loop())
            await thread.call(_send_from_loop(ways, json.loads(ports), gap, num_rows, hidden_size, count))


async def _line_of(lines: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> bytes:
    """Read a line of a stream that belongs to another loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(lines.readline(), loop))


async def _send_from_loop(
    ways: Sequence[Way],
    ports: Sequence[int],
    next_gap: Callable[[], Coroutine[Any, Any, bytes]],
    num_rows: int,
    hidden_size: int,
    count: int,
) -> None:
    """Send the frames of all ways in turns. Runs on the MLX thread's loop."""
    ticker, steps = Ticker(is_ticking=num_rows > 1), itertools.count()
    array = mx.random.normal((1, num_rows, hidden_size)).astype(mx.bfloat16)
    mx.eval(array)
    async with AsyncExitStack() as stack:
        calls = []
        for way, port in zip(ways, ports, strict=True):
            channel = await stack.enter_async_context(way.network.channel("mini", f"127.0.0.1:{port}"))
            calls.append(open_relay(channel, 1, 0, "studio"))
        for turn in range(_WARM_UP + count):
            for way, call in zip(ways, calls, strict=True):
                ticker.take()
                header, before = Frame(epoch=1, step=next(steps), timings=[Timing()]), time.perf_counter()
                for part in pack(header, array, way.wire):
                    await call.write(part)
                await call.read()
                took_ms = 1e3 * (time.perf_counter() - before)
                gap_ms = max(ticker.take(), json.loads(await next_gap()))
                if turn >= _WARM_UP:
                    way.found.append((took_ms, gap_ms))
        for call in calls:
            call.cancel()


def _print(title: str, ways: Sequence[Way]) -> None:
    base, lines = ways[0].medians()[0], []
    for way in ways:
        took_ms, gap_ms = way.medians()
        cells = f"{took_ms:.2f}", f"{took_ms / base:.2f}", f"{gap_ms:.2f}" if gap_ms else ""
        lines.append((way.name, format_bytes(way.wire.part_bytes), *cells))
    header = "link", "parts", "there and back", "ratio", "longest gap of the two event loops"
    print(title, "", table(header, lines, 1), sep="\n")


if __name__ == "__main__":
    run_command(main)
