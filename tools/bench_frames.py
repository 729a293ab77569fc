"""What a hop costs: frames of hidden states from this process to another one over loopback, plaintext.

python -m tools.bench_frames [--hidden-size 4096] [--rows 1,512,2048,4096] [--frames 40]

Every frame goes the way of a chain's: an array is put into parts on the MLX thread, sent by a link, joined by a stage
of the other process, taken on its MLX thread and answered. One frame is on its way at a time. On each event loop runs
a ticker that asks for it every half millisecond: the longest that it waits in one frame is a gap. On a busy machine a
gap is mostly that of others; so the loop's own part is shown as well, the processor time of its thread in between.
"""

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import mlx.core as mx
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from coordinator.cli.flags import parse_counts
from protos.brigade_pb2 import Credit, Frame, Result, Timing
from protos.brigade_pb2_grpc import NodeServicer
from worker.node.hop import Link, add_node, pack
from worker.node.network import Network
from worker.node.stage import Stage
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.threads import MlxThread

_TICK_S = 0.0005
_WARM_UP = 5  # frames


def main(
    hidden_size: Annotated[int, typer.Option(min=1, help="Of a row, in bfloat16.")] = 4096,
    rows: Annotated[str, typer.Option(help="Rows per frame.")] = "1,512,2048,4096",
    frames: Annotated[int, typer.Option(min=1, help="Of each size; medians count.")] = 40,
    serve: Annotated[bool, typer.Option("--serve", hidden=True)] = False,
) -> None:
    """Milliseconds per frame and the longest gap of either event loop in it."""
    if serve:
        uvloop.run(_serve())
    else:
        uvloop.run(_measure(hidden_size, parse_counts("rows", rows), frames))


class Ticker:
    """How long the event loop keeps a task waiting beyond what it asked for."""

    def __init__(self) -> None:
        self._longest = [0.0, 0.0]
        self._task = asyncio.create_task(self._tick())

    def take(self) -> tuple[float, float]:
        """The longest wait since the last call, and the most that the loop itself computed in one; milliseconds."""
        gap_s, own_s = self._longest
        self._longest = [0.0, 0.0]
        return 1e3 * gap_s, 1e3 * own_s

    async def _tick(self) -> None:
        before, own_before = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(_TICK_S)
            now, own_now = time.perf_counter(), time.thread_time()
            gaps = now - before - _TICK_S, own_now - own_before
            self._longest = [max(pair) for pair in zip(self._longest, gaps, strict=True)]
            before, own_before = now, own_now


class Answering:
    """An engine that only looks at what it is given."""

    num_slots = cache_bytes = weight_bytes = 0
    runs_ahead = is_whole = False

    def check(self, frame: Frame) -> None:
        pass

    def awaited(self, frame: Frame) -> None:
        pass

    def launch_ahead(self, result: Result, *, is_finished: bool) -> None:
        pass

    def begin(self, frame: Frame, x: mx.array | None, received: int, taken: int) -> Result:
        mx.eval(x)
        return Result(step=frame.step, timings=[Timing(received=received)])

    def finish(self, result: Result) -> tuple[Result, None]:
        return result, None


class Receiver(NodeServicer):
    """The other process: one stage, whose results it writes to standard output."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        async for credit in self._stage.take_hop(parts):
            yield credit


async def _serve() -> None:
    engine: Any = Answering()
    stage = Stage(engine, MlxThread(), 1, None)
    stage.start()
    network = Network()
    server = network.server()
    add_node(Receiver(stage), server)
    print(network.listen(server, "127.0.0.1:0"), flush=True)
    await server.start()
    ticker = Ticker()
    while True:
        await stage.next_result()
        print(json.dumps(ticker.take()), flush=True)


async def _measure(hidden_size: int, rows: Sequence[int], count: int) -> None:
    thread, ticker = MlxThread(), Ticker()
    table = Table(title=f"frames of {hidden_size} x bfloat16 on {machine_name()}, medians", title_justify="left")
    columns = ("rows", "MiB", "ms", "sender gap", "own", "receiver gap", "own", "idle gap", "own")
    for column in columns:
        table.add_column(column, justify="right")
    async with _receiver() as (port, answers):
        link = Link(Network(), "receiver", f"127.0.0.1:{port}", 1, 0)
        await link.wait_open()
        steps = itertools.count()

        async def one(array: mx.array) -> tuple[float, ...]:
            ticker.take()
            before = time.perf_counter()
            header = Frame(epoch=1, step=next(steps), timings=[Timing()])
            await link.send(await thread.run(lambda: pack(header, array)))
            theirs = json.loads(await answers.readline())
            return 1e3 * (time.perf_counter() - before), *ticker.take(), *theirs

        for num_rows in rows:
            array = await thread.run(lambda n=num_rows: hidden(n, hidden_size))  # type: ignore[misc]
            found = [await one(array) for _ in range(_WARM_UP + count)][_WARM_UP:]
            idle = [await _idle(ticker) for _ in range(min(count, 40))]
            medians = [statistics.median(values) for values in (*zip(*found, strict=True), *zip(*idle, strict=True))]
            size = num_rows * hidden_size * 2 / 2**20
            table.add_row(str(num_rows), f"{size:.2f}", *(f"{value:.2f}" for value in medians))
        await link.close()
    thread.close()
    Console().print(table)


async def _idle(ticker: Ticker) -> tuple[float, float]:
    """What the ticker finds while nothing happens, for as long as a large frame takes."""
    ticker.take()
    await asyncio.sleep(0.02)
    return ticker.take()


def hidden(num_rows: int, hidden_size: int) -> mx.array:
    array = mx.random.normal((1, num_rows, hidden_size)).astype(mx.bfloat16)
    mx.eval(array)
    return array


@asynccontextmanager
async def _receiver() -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    command = [sys.executable, "-m", "tools.bench_frames", "--serve"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline()), process.stdout
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    run_command(main)
