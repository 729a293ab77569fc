"""A microbenchmark of a model's layers on this device, with random weights. Runs on the MLX thread.

It reads no tensor of the checkpoint, and holds one layer at a time.
"""

import math
import time
from collections import Counter
from collections.abc import Callable

import mlx.core as mx

from protos.brigade_pb2 import Cache, RowTimes, Speed
from worker.compute.shard import CutModel
from worker.memory.slot_caches import Caches
from worker.model.build import MLX_DTYPES, absent, build, tensors_of_module
from worker.model.checkpoint import Checkpoint
from worker.model.describe import BACK, FRONT, describe, layout_of
from worker.model.headers import TensorInfo
from worker.model.model_spec import LayerSpec
from worker.model.probe_pass import ModelInfo

ROWS = (1, 512, 8, 64, 2, 4, 16)  # the most important first, since a slow device skips the last ones
_WITHIN_S = 2.0  # in total
MOST_KINDS = 3  # the most frequent kinds of layers are measured; times of others are scaled by their bytes
_AT_ONCE = 8  # layers per measurement, which reduces the share of waiting for the device
_SHORT = 64  # rows; longer frames are measured one layer at a time
_TRIES = 3
_PERIOD = 1_000_003  # of the repeated random numbers; a prime, so that the rows of a matrix differ
_SIZE = 0.01  # of random numbers: small enough for eight layers in float16

TimedStep = Callable[[int, int], float]  # takes the numbers of rows and of repetitions; returns seconds per repetition


def measure_speed(checkpoint: Checkpoint, within_s: float = _WITHIN_S) -> Speed:
    """Measure the milliseconds of a layer of each kind and of the head, by rows, and the resulting GB/s.

    Args:
        within_s: the time limit, which building layers and measuring the smallest frames may exceed.
    """
    spec, info = describe(checkpoint), layout_of(checkpoint).info
    tried = [kind for kind, _ in Counter(spec.layers).most_common(MOST_KINDS)]
    share_s = within_s / (len(tried) + 1)
    times: dict[LayerSpec, RowTimes] = {}
    try:
        for kind in tried:
            numbers = [number for number, layer in enumerate(spec.layers) if layer == kind]
            example = numbers[len(numbers) // 2]  # if possible not the first layer, which includes the embedding
            times[kind] = _layer_times(checkpoint, info, example, share_s)
        head = _head_times(checkpoint, info, share_s)
    finally:
        mx.clear_cache()  # make room for a shard
    first = tried[0]
    for kind in set(spec.kinds) - set(tried):
        factor = kind.read_bytes / first.read_bytes
        times[kind] = RowTimes(rows=times[first].rows, ms=[ms * factor for ms in times[first].ms])
    gbps = max(kind.read_bytes / max(times[kind].ms[0], 1e-6) / 1e6 for kind in tried)
    return Speed(kinds=[times[kind] for kind in spec.kinds], head=head, gbps=gbps)


def _layer_times(checkpoint: Checkpoint, info: ModelInfo, number: int, within_s: float) -> RowTimes:
    began = time.monotonic()
    cut = _cut_random(checkpoint, info, number, {number, FRONT} if number == 0 else {number})
    mx.eval([array for _, array in tensors_of_module(cut.layers[0])])

    def step(num_rows: int, count: int) -> float:
        ids = mx.zeros((1, num_rows), mx.int32)
        x = ids if number == 0 else mx.random.normal((1, num_rows, info.hidden_size)).astype(info.dtype)
        made = []
        for _ in range(count):
            caches = Caches(info.entries, info.entries_of(number, number + 1), Cache())
            caches.reserve(num_rows, None)
            made.append(cut.run(x, ids, caches.listed))
            x = x if number == 0 else made[-1]
        return _seconds(made) / count

    return _by_rows(step, began + within_s)


def _head_times(checkpoint: Checkpoint, info: ModelInfo, within_s: float) -> RowTimes:
    began = time.monotonic()
    last = info.num_layers - 1
    cut = _cut_random(checkpoint, info, last, {BACK, FRONT} if info.tied else {BACK})

    def step(num_rows: int, count: int) -> float:
        made = []
        for _ in range(count):
            caches = Caches(info.entries, (), Cache())
            h = mx.random.normal((1, num_rows, info.hidden_size)).astype(info.dtype)
            made.append(cut.behind(h, caches.listed).argmax(axis=-1))
        return _seconds(made) / count

    return _by_rows(step, began + within_s)


def _cut_random(checkpoint: Checkpoint, info: ModelInfo, number: int, places: set[int]) -> CutModel:
    """Return the model cut to one layer, with random tensors at these places and stand-ins elsewhere."""
    where = layout_of(checkpoint).places
    real = mx.random.normal((_PERIOD,)) * _SIZE
    bits = mx.random.randint(0, 2**31 - 1, (_PERIOD,), mx.int32).view(mx.uint32)

    def tensor(name: str, info: TensorInfo) -> mx.array:
        if where.get(name) not in places:
            return absent(name, info)
        dtype, size = MLX_DTYPES[info.dtype], math.prod(info.shape)
        source = (real if mx.issubdtype(dtype, mx.floating) else bits).astype(dtype)
        return mx.tile(source, -(-size // _PERIOD))[:size].reshape(info.shape)

    return CutModel(build(checkpoint, tensor), info, number, number + 1, has_embedding=FRONT in places)


def _seconds(made: list[mx.array]) -> float:
    """Return the seconds that the device takes to evaluate these arrays."""
    began = time.monotonic()
    mx.eval(made)
    return time.monotonic() - began


def _by_rows(step: TimedStep, deadline: float) -> RowTimes:
    """Measure as many frame sizes as time permits. Times never decrease with the number of rows."""
    found: dict[int, float] = {}
    for done, num_rows in enumerate(ROWS):
        likely_s = max((took * max(1.0, num_rows / rows) for rows, took in found.items()), default=0.0)
        left_s = deadline - time.monotonic()
        if not found or 3 * likely_s < left_s:
            found[num_rows] = _least(step, num_rows, time.monotonic() + left_s / (len(ROWS) - done))
    ascending = dict(sorted(found.items()))
    longest = [max(list(ascending.values())[: n + 1]) for n in range(len(ascending))]
    return RowTimes(rows=ascending, ms=[1e3 * took for took in longest])


def _least(step: TimedStep, num_rows: int, until: float) -> float:
    """Return the least seconds of several runs, without the first one, which compiles kernels."""
    step(num_rows, 1)
    found, count = [step(num_rows, 1)], _AT_ONCE if num_rows <= _SHORT else 1
    while len(found) <= _TRIES and time.monotonic() + count * found[0] < until:
        found.append(step(num_rows, count))
    return min(found)
