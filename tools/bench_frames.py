"""What a hop costs: frames of hidden states from this process to another one over loopback, plaintext.

python -m tools.bench_frames [--hidden-size 4096] [--rows 1,512,2048,4096] [--frames 40]

Every frame goes the way of a chain's: an array is put into parts and sent by a link on the MLX thread's loop, and
joined, taken and answered by a stage on that of the other process. One frame is on its way at a time. On each loop runs
a ticker that asks for it every half millisecond: the longest that it waits in one frame is a gap. On a busy machine a
gap is mostly that of others; so the loop's own part is shown as well, the processor time of its thread in between.
"""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import mlx.core as mx
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from coordinator.cli.flags import parse_counts
from protos.brigade_pb2 import Credit, Frame, Result, Timing
from protos.brigade_pb2_grpc import HopServicer
from tools.child import child
from tools.worker_process import address_with_hops
from worker.node.hop import Link, add_hops, pack
from worker.node.network import Network
from worker.node.stage import Stage
from worker.platform.machine import machine_name
from worker.platform.run import run_command
from worker.platform.threads import MlxThread

_TICK_S = 0.0005
_WARM_UP = 5  # frames

NextLine = Callable[[], Coroutine[Any, Any, bytes]]


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

    def __init__(self, *, is_ticking: bool = True) -> None:
        """Unless it `is_ticking`, all times are 0."""
        self._longest = [0.0, 0.0]
        self._task = asyncio.create_task(self._tick()) if is_ticking else None

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

    def launch_ahead(self, step: SimpleNamespace, *, is_finished: bool) -> None:
        pass

    def begin(self, frame: Frame, x: mx.array | None, received: int, taken: int) -> SimpleNamespace:
        mx.eval(x)
        result = Result(step=frame.step, timings=[Timing(received=received, taken=taken)])
        return SimpleNamespace(frame=frame, result=result, segments=(), has_drafting=False, goes_on=False)

    def finish(self, step: SimpleNamespace) -> tuple[Result, None]:
        return step.result, None

    def build_ahead(self) -> None:
        pass

    def close(self, *, leaves_slots: bool = False) -> None:
        pass


class Receiver(HopServicer):
    """The other process: one stage, whose results it writes to standard output."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def Relay(self, parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Credit]:
        async for credit in self._stage.receive(parts):
            yield credit


async def _serve() -> None:
    engine: Any = Answering()
    stage, thread = Stage(engine, 1), MlxThread()
    await stage.start(thread)
    await thread.call(_receive(stage))


async def _receive(stage: Stage) -> None:
    """Take frames for ever. Runs on the MLX thread's loop."""
    network = Network()
    server = network.server()
    add_hops(Receiver(stage), server)
    print(network.listen(server, "127.0.0.1:0"), flush=True)
    await server.start()
    ticker = Ticker()
    while True:
        await stage.next_result()
        print(json.dumps(ticker.take()), flush=True)


async def _measure(hidden_size: int, rows: Sequence[int], count: int) -> None:
    loop = asyncio.get_running_loop()
    table = Table(title=f"frames of {hidden_size} x bfloat16 on {machine_name()}, medians", title_justify="left")
    columns = ("rows", "MiB", "ms", "sender gap", "own", "receiver gap", "own", "idle gap", "own")
    for column in columns:
        table.add_column(column, justify="right")
    with closing(MlxThread()) as thread:
        async with child("tools.bench_frames", "--serve") as (port, answers, _):
            for row in await thread.call(_send(int(port), partial(line_of, answers, loop), hidden_size, rows, count)):
                table.add_row(*row)
    Console().print(table)


async def _send(port: int, answer: NextLine, hidden_size: int, rows: Sequence[int], count: int) -> list[list[str]]:
    """Send frames of all sizes; return the rows of the table. Runs on the MLX thread's loop."""
    found, ticker, steps = [], Ticker(), itertools.count()
    link = Link(Network(), "receiver", address_with_hops(port), 1, 0)
    await link.wait_open()

    async def one(array: mx.array) -> tuple[float, ...]:
        ticker.take()
        before = time.perf_counter()
        header = Frame(epoch=1, step=next(steps), timings=[Timing()])
        await link.send(pack(header, array))
        theirs = json.loads(await answer())
        return 1e3 * (time.perf_counter() - before), *ticker.take(), *theirs

    for num_rows in rows:
        array = hidden(num_rows, hidden_size)
        times = [await one(array) for _ in range(_WARM_UP + count)][_WARM_UP:]
        idle = [await _idle(ticker) for _ in range(min(count, 40))]
        medians = [statistics.median(values) for values in (*zip(*times, strict=True), *zip(*idle, strict=True))]
        size = num_rows * hidden_size * 2 / 2**20
        found.append([str(num_rows), f"{size:.2f}", *(f"{value:.2f}" for value in medians)])
    await link.close()
    return found


async def line_of(lines: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> bytes:
    """Read a line of a stream that belongs to another loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(lines.readline(), loop))


async def _idle(ticker: Ticker) -> tuple[float, float]:
    """What the ticker finds while nothing happens, for as long as a large frame takes."""
    ticker.take()
    await asyncio.sleep(0.02)
    return ticker.take()


def hidden(num_rows: int, hidden_size: int) -> mx.array:
    array = mx.random.normal((1, num_rows, hidden_size)).astype(mx.bfloat16)
    mx.eval(array)
    return array


if __name__ == "__main__":
    run_command(main)
