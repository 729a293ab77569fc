"""How the cost of a token grows with the context and with the batch: one engine that is the whole model, no sockets.

python -m tools.bench_costs [--model FOLDER] [--contexts 128,1024,8192] [--batches 1,2,4,8,16]
"""

import statistics
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coordinator.cli.flags import parse_counts
from protos.brigade_pb2 import Frame, Opening, Window
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.memory.history import History
from worker.model.describe import describe
from worker.node.loading import open_checkpoint
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_CHUNK = 256  # rows of prompt at a time
_SHORT = 128  # tokens of context in the table of batches


def main(
    model: Annotated[str, typer.Option(help="As for `brigade generate`.")] = "demo",
    contexts: Annotated[str, typer.Option(help="Tokens already in the cache.")] = "128,256,512,1024,2048,4096,8192",
    batches: Annotated[str, typer.Option(help="Sessions that step together.")] = "1,2,4,8,16",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each; the median counts.")] = 30,
) -> None:
    """Milliseconds per step and per token, greedy."""
    checkpoint = open_checkpoint(model)
    spec = describe(checkpoint)
    shard = Shard(checkpoint, 0, spec.num_layers)
    shard.materialise(lambda nbytes: None)
    engine = Executor(shard, 0, spec.dtype)
    rows = [(length, 1) for length in parse_counts("contexts", contexts)]
    rows += [(_SHORT, count) for count in parse_counts("batches", batches)]
    table = Table(title=f"{spec.name}, {spec.num_layers} layers, on {machine_name()}", title_justify="left")
    for column in ("context", "sessions", "ms per step", "ms per token", "tok/s of all"):
        table.add_column(column, justify="right")
    for length, count in rows:
        step_ms = 1e3 * statistics.median(step_seconds(engine, length, count, rounds))
        table.add_row(
            str(length), str(count), f"{step_ms:.2f}", f"{step_ms / count:.2f}", f"{1e3 * count / step_ms:.1f}"
        )
    Console().print(table)


def step_seconds(engine: Executor, length: int, count: int, rounds: int) -> list[float]:
    """Seconds of `rounds` decoding steps of `count` sessions with `length` tokens in their caches."""
    histories = [History(5 + (at + number) % 64 for at in range(length)) for number in range(count)]
    engine.step(Frame(opened=[Opening(slot=number) for number in range(count)]), received=0)
    for base in range(0, length, _CHUNK):
        for slot, history in enumerate(histories):
            engine.step(Frame(windows=[_window(slot, history, base, history.tokens[base : base + _CHUNK])]), received=0)
    times = []
    for _ in range(1 + rounds):
        frame = Frame(windows=[_window(slot, history, length, [7], 1) for slot, history in enumerate(histories)])
        before = time.perf_counter()
        engine.step(frame, received=0)
        times.append(time.perf_counter() - before)
    engine.step(Frame(closed=range(count)), received=0)
    return times[1:]


def _window(slot: int, history: History, base: int, tokens: Sequence[int], wanted: int = 0) -> Window:
    return Window(slot=slot, base=base, prefix_hash=history.prefix_hash(base), tokens=tokens, wanted=wanted)


if __name__ == "__main__":
    run_command(main)
