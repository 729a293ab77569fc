"""What loading one shard reads and allocates, against the shard's size. Linux only: it asks /proc.

python -m tools.load_sparse FOLDER --layers 10:14

FOLDER is any checkpoint: one of tools/sparse_model.py has real tensor shapes and takes no room on the disk.
"""

import asyncio
import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import mlx.core as mx
import typer

from worker.compute import shard as shard_module
from worker.errors import InputError
from worker.model.headers import TensorInfo
from worker.node.loading import load_shard, open_checkpoint
from worker.platform.run import run_command
from worker.platform.threads import MlxThread

_PROC = Path("/proc/self")


@dataclass(frozen=True)
class Loaded:
    """Bytes. `read` is what system calls read, from the disk or from the system's cache."""

    checkpoint: int
    shard: int
    read: int
    peak_rss: int  # more than before the load
    peak_mlx: int  # as MLX's allocator counts


def main(
    folder: Annotated[Path, typer.Argument(help="A model folder.")],
    layers: Annotated[str, typer.Option(metavar="START:END", help="The shard's layers, from 0.")],
) -> None:
    """Load the shard in this process and print what it took as one JSON object."""
    start, separator, end = layers.partition(":")
    if not (separator and start.isdigit() and end.isdigit()):
        raise InputError("layers", f"expected START:END, got {layers!r}")
    print(json.dumps(asdict(asyncio.run(measure(folder, int(start), int(end))))))


async def measure(folder: Path, start: int, end: int) -> Loaded:
    """Load layers [start, end) as a worker does, in a process that has loaded nothing before."""
    checkpoint = open_checkpoint(str(folder))
    with closing(MlxThread()) as thread:
        await thread.run(mx.reset_peak_memory)
        (_PROC / "clear_refs").write_text("5")  # the peak counts from here
        rss, read = _rss("VmRSS"), _read_bytes()
        with patch.object(shard_module, "multiplies_experts", lambda dtype: True):  # nothing is computed with them here
            shard = await load_shard(checkpoint, start, end, thread, lambda progress: None)
        return Loaded(
            checkpoint=_nbytes(checkpoint.tensors.values()),
            shard=shard.nbytes,
            read=_read_bytes() - read,
            peak_rss=_rss("VmHWM") - rss,
            peak_mlx=await thread.run(mx.get_peak_memory),
        )


def _nbytes(tensors: Iterable[TensorInfo]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _rss(key: str) -> int:
    """VmRSS: what is resident now; VmHWM: the most that was."""
    return _field("status", key) * 1024


def _read_bytes() -> int:
    return _field("io", "rchar")


def _field(file: str, key: str) -> int:
    """The number in a line such as `VmRSS:  123 kB`."""
    lines = (line.partition(":") for line in (_PROC / file).read_text().splitlines())
    return next(int(value.split()[0]) for name, _, value in lines if name == key)


if __name__ == "__main__":
    run_command(main)
