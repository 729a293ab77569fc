"""This node's speed at a model: from the user's cache folder, or measured now and kept there."""

from functools import partial
from importlib.metadata import version
from pathlib import Path

from google.protobuf.message import DecodeError

from protos.brigade_pb2 import Speed
from worker.compute.microbenchmark import measure_speed
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.platform.installation import read_record, record_path, write_record
from worker.platform.machine import machine_name, memory_budget
from worker.platform.mlx_memory import memory_held
from worker.platform.threads import MlxThread, run_in_thread

_COPIES = 3  # of a layer that are in memory while it is made of random numbers


async def kept_speed(checkpoint: Checkpoint) -> Speed | None:
    """Return an earlier measurement of this device, this version of MLX and layers of these shapes, if any."""
    return await run_in_thread(partial(_read, _file_of(checkpoint)))


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
    await run_in_thread(partial(write_record, _file_of(checkpoint), found.SerializeToString()))
    return found


def _file_of(checkpoint: Checkpoint) -> Path:
    """Return the file of a speed, which is named by everything that the speed depends on."""
    fingerprint = checkpoint.fingerprint
    key = [machine_name(), version("mlx"), version("mlx-lm"), fingerprint.config, fingerprint.tensors]
    return record_path("speeds", "\n".join(key).encode())


def _read(path: Path) -> Speed | None:
    """Return the kept speed; None if it is missing or damaged, so that it is measured again."""
    try:
        return Speed.FromString(read_record(path))
    except (DecodeError, TypeError):
        return None
