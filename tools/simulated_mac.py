"""`brigade` or a worker on a Mac that is not there: its device takes as long as `plan` assumes of such a machine.

python -m tools.simulated_mac GBPS TFLOPS ROWS coordinator|worker ARGUMENTS...

Layers compute nothing. A step writes zeros of the real shapes into the caches and ends when the device would be done;
plan, chunks, gRPC and what travels are the product's own. Weights are never read: see tools.sparse_model. Caches have
room for ROWS tokens at once: to copy them when they grow takes a GPU no time and a CPU seconds.
"""

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx

from coordinator.__main__ import main as coordinator
from coordinator.cluster import survey
from coordinator.planning.speeds import NodeSpeed, TimesByRows
from protos.brigade_pb2 import Frame, Result, RowTimes, Speed
from worker.cli import worker
from worker.compute import executor
from worker.compute.batching import LaneWindow
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.compute.step import Step
from worker.memory import kv_cache
from worker.memory.kv_cache import KVCache
from worker.model.checkpoint import Checkpoint
from worker.model.describe import DTYPES, describe
from worker.node import speed_cache
from worker.platform.run import run_command


class Mac:
    """The device: one step at a time, in their order."""

    def __init__(self, gbps: float, tflops: float) -> None:
        self._rates = gbps, tflops
        self._free_at = 0.0  # seconds on the monotonic clock
        self._ends = WeakKeyDictionary[Step, float]()  # of the steps that have begun
        self._end = 0.0  # of the step that is being finished

    def speed(self, checkpoint: Checkpoint, *_: object) -> Speed:
        """What this device would measure of itself."""
        known = NodeSpeed.assumed(describe(checkpoint), *self._rates)
        return Speed(kinds=map(_row_times, known.kinds), head=_row_times(known.head), gbps=known.gbps)

    def begin(self, begin: Any, own: Executor, frame: Frame, *rest: Any) -> Step:
        step: Step = begin(own, frame, *rest)
        shard: Any = own._shard
        up_to = partial(NodeSpeed.assumed(shard.spec, *self._rates).ms_up_to, shard.spec)
        end, ms = shard.end if frame.stays else own._prompt_end or shard.end, 0.0
        for window in step.windows:
            rows, asked = len(window.tokens), window.wanted
            layers_ms = up_to(rows, 0, window.base + rows if rows == 1 else 0, window.base if rows > 1 else 0)
            ms += layers_ms[end] - layers_ms[shard.start] + (up_to(1, asked)[-1] - up_to(1)[-1] if asked else 0.0)
        self._free_at = max(self._free_at, time.monotonic()) + ms / 1e3
        self._ends[step] = self._free_at
        return step

    def finish(self, finish: Any, own: Executor, step: Step) -> tuple[Frame | Result, mx.array | None]:
        self._end = self._ends[step]
        found: tuple[Frame | Result, mx.array | None] = finish(own, step)
        return found

    def eval(self, *arrays: Any) -> None:
        """What the executor waits by."""
        mx.eval(*arrays)
        time.sleep(max(0.0, self._end - time.monotonic()))

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


def _row_times(times: TimesByRows) -> RowTimes:
    return RowTimes(rows=[rows for rows, _ in times], ms=[ms for _, ms in times])


def _step(shard: Any, x: mx.array, places: Sequence[LaneWindow], *_: Any, end: int | None = None) -> mx.array:
    """Append zeros to the caches of the layers before `end`, each layer's after those of the one before."""
    dtype = DTYPES[shard.spec.dtype]
    h = mx.zeros((1, sum(place.num_rows for place in places), shard.row_size), dtype)
    for place in places:
        place.caches.begin()
        place.reserve()
        for number, cache in zip(place.caches.own_numbers, place.caches.own, strict=True):
            if number < (end or shard.end):
                assert isinstance(cache, KVCache)
                [memory] = shard.spec.layers[number].memories
                rows = mx.zeros((1, memory.heads, place.num_rows, memory.key_size), dtype)
                [rows] = mx.depends([rows], [h])
                cache.append(rows, rows)
                [h] = mx.depends([h], cache.arrays())
        place.caches.settle(place.base + place.num_rows)
    return h


def _simulate(mac: Mac, num_rows: int) -> None:
    """Put the device in the place of this process's own, with room for so many rows in each cache."""
    init, begin, finish = Shard.__init__, Executor.begin, Executor.finish

    def describe_too(self: Any, checkpoint: Checkpoint, *args: Any, **kwargs: Any) -> None:
        init(self, checkpoint, *args, **kwargs)
        self.spec = describe(checkpoint)

    replaced: dict[Any, dict[str, Any]] = {
        Shard: {
            "__init__": describe_too,
            "__call__": lambda self, x, places, ids=None, soft=None, end=None: _step(self, x, places, end=end),
            "logits": lambda self, rows: mx.zeros((rows.shape[1], self.info.vocab_size)),
            "materialise": lambda self, progress: progress(self.nbytes),
        },
        Executor: {
            "begin": lambda self, *args: mac.begin(begin, self, *args),
            "finish": lambda self, step: mac.finish(finish, self, step),
            "build_ahead": lambda self: False,  # there is no graph to build
            "launch_ahead": lambda self, step, *, is_finished: None,
        },
        executor: {"mx": mac},
        kv_cache: {"pack_capacity": partial(max, num_rows)},
        speed_cache: {"measure_speed": mac.speed},
        survey: {"is_worth_measuring": lambda peers: True},  # though they are processes of one machine
    }
    for owner, members in replaced.items():
        for name, member in members.items():
            setattr(owner, name, member)


def main() -> None:
    gbps, tflops, num_rows, program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    _simulate(Mac(float(gbps), float(tflops)), int(num_rows))
    if program == "coordinator":
        coordinator()
    run_command(worker)


if __name__ == "__main__":
    main()
