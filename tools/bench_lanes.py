"""What a step of eight slots costs by the lengths of their windows, and what the end of a slot costs.

python -m tools.bench_lanes FOLDER [--held 1800] [--turns 7]

Every turn runs each kind of step once, on the same slots; ratios are of medians of one run. Windows of 1 to 16 rows
are those of drafts whose lengths differ; the step beside it has as many rows in windows of equal length.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import mlx.core as mx
import typer

from protos.brigade_pb2 import Cache
from worker.compute.batching import LaneWindow
from worker.compute.shard import Shard
from worker.memory.slot_caches import Caches, close_all
from worker.model.checkpoint import open_folder
from worker.model.describe import layout_of
from worker.platform.machine import machine_name
from worker.platform.run import run_command

_SLOTS = 8
_MIXED = (1, 16, 4, 1, 8, 1, 16, 9)  # 56 rows, as in windows of 7
_LENGTHS = {
    "1 row each": (1,) * _SLOTS,
    "7 rows each": (7,) * _SLOTS,
    "1 to 16 rows, as many in all": _MIXED,
    "1 to 16 rows, others at every step": None,
}


def main(
    folder: Annotated[Path, typer.Argument(help="A model folder; its weights do not matter.")],
    held: Annotated[int, typer.Option(min=1, help="Tokens that every slot holds.")] = 1800,
    turns: Annotated[int, typer.Option(min=1)] = 7,
) -> None:
    """Measure steps of eight slots of one model in this process."""
    checkpoint = open_folder(folder)
    shard = Shard(checkpoint, 0, layout_of(checkpoint).info.num_layers)
    shard.materialise(lambda num_bytes: None)
    slots = [_filled(shard, held) for _ in range(_SLOTS)]
    _step(shard, slots, held, (1,) * _SLOTS)
    took: dict[str, list[float]] = {name: [] for name in (*_LENGTHS, "7 rows each, one slot after another")}
    for turn in range(turns):
        for name, lengths in _LENGTHS.items():
            shifted = (*_MIXED[turn % _SLOTS :], *_MIXED[: turn % _SLOTS])
            took[name].append(_step(shard, slots, held, lengths or shifted))
        alone = [_step(shard, [slot], held, (7,)) for slot in slots]
        took["7 rows each, one slot after another"].append(sum(alone))
    equal = median(took["7 rows each"])
    print(f"{machine_name()}: {_SLOTS} slots of {held} tokens, medians of {turns} turns")
    for name, each in took.items():
        print(f"{name:36} {median(each):8.1f} ms  {median(each) / equal:5.2f} of equal windows")
    before = time.perf_counter()
    close_all([slots.pop(_SLOTS // 2)])
    mx.synchronize()
    print(f"a slot ends: {(time.perf_counter() - before) * 1e3:.1f} ms; 7 rows of each of the others: ", end="")
    print(f"{median(_step(shard, slots, held, (7,) * len(slots)) for _ in range(turns)):.1f} ms")


def _filled(shard: Shard, held: int) -> Caches:
    caches = shard.make_caches(Cache())
    for base in range(0, held, 256):
        count = min(256, held - base)
        mx.eval(shard(mx.zeros((1, count), mx.int32), [LaneWindow(caches, base, count)]))
    return caches


def _step(shard: Shard, slots: Sequence[Caches], held: int, lengths: Sequence[int]) -> float:
    """One step of these slots, cut back to what they hold; returns its milliseconds."""
    for caches in slots:
        caches.cut(held)
    places = [LaneWindow(caches, held, count) for caches, count in zip(slots, lengths, strict=True)]
    begun = time.perf_counter()
    mx.eval(shard(mx.zeros((1, sum(lengths)), mx.int32), places))
    return (time.perf_counter() - begun) * 1e3


if __name__ == "__main__":
    run_command(main)
