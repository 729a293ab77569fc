"""This node's speed at a model: from the user's cache folder, or measured now and kept there."""

import hashlib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protos.brigade_pb2 import RowTimes, Speed
from worker.compute.microbenchmark import measure_speed
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.platform.installation import cache_folder, read_record, write_record
from worker.platform.machine import machine_name, memory_budget
from worker.platform.mlx_memory import memory_held
from worker.platform.threads import MlxThread, run_in_thread

_FORMAT = 1  # of a kept file
_COPIES = 3  # of a layer that are in memory while it is made of random numbers


async def kept_speed(checkpoint: Checkpoint) -> Speed | None:
    """Return an earlier measurement of this device, this version of MLX and layers of these shapes, if any."""
    return await run_in_thread(partial(_read, _file_of(checkpoint), _key(checkpoint)))


async def measured_speed(checkpoint: Checkpoint, thread: MlxThread, *, anew: bool = False) -> Speed:
    """Return the kept speed, or measure it now on the MLX thread, which takes up to two seconds.

    It is empty if the measured layers do not fit beside what is loaded: paging would falsify it.

    Args:
        anew: ignore what is kept.
    """
    if not anew and (kept := await kept_speed(checkpoint)):
        return kept
    spec = await run_in_thread(partial(describe, checkpoint))
    free_bytes = memory_budget() - memory_held().active
    if _COPIES * max(kind.weight_bytes for kind in spec.kinds) > free_bytes:
        return Speed()
    found = await thread.run(partial(measure_speed, checkpoint))
    await run_in_thread(partial(_write, _file_of(checkpoint), _key(checkpoint), found))
    return found


def _key(checkpoint: Checkpoint) -> list[str]:
    """Return everything that a speed depends on."""
    fingerprint = checkpoint.fingerprint
    return [machine_name(), version("mlx"), version("mlx-lm"), fingerprint.config, fingerprint.tensors]


def _file_of(checkpoint: Checkpoint) -> Path:
    digest = hashlib.sha256("\n".join(_key(checkpoint)).encode()).hexdigest()
    return cache_folder() / "speeds" / f"{digest[:32]}.msgpack"


def _read(path: Path, key: list[str]) -> Speed | None:
    """Return the kept speed; None if it is missing, damaged or of another key, so that it is measured again."""
    record = read_record(path)
    try:
        if record["format"] != _FORMAT or record["key"] != key:
            return None
        return Speed(kinds=map(_times, record["kinds"]), head=_times(record["head"]), gbps=record["gbps"])
    except (ValueError, TypeError, KeyError):
        return None


def _write(path: Path, key: list[str], speed: Speed) -> None:
    """Keep a speed. If the folder is read-only it is measured again next time."""
    record: dict[str, Any] = {
        "format": _FORMAT, "key": key, "kinds": [_pairs(times) for times in speed.kinds], "head": _pairs(speed.head),
        "gbps": speed.gbps,
    }  # fmt: skip
    write_record(path, record)


def _pairs(times: RowTimes) -> list[list[float]]:
    return [[rows, ms] for rows, ms in zip(times.rows, times.ms, strict=True)]


def _times(pairs: list[list[float]]) -> RowTimes:
    return RowTimes(rows=[int(rows) for rows, _ in pairs], ms=[float(ms) for _, ms in pairs])
