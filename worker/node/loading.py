"""From a model's name to a shard in memory, with progress. Used by the coordinator and by workers alike."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from protos.brigade_pb2 import LoadProgress
from worker.compute.shard import Shard
from worker.model.checkpoint import DEMO, Checkpoint, open_folder
from worker.model.describe import shard_tensors
from worker.model.headers import TensorInfo
from worker.model.hub import is_repository, open_repository
from worker.process.call_thread import run_aside
from worker.process.machine import keep_resident
from worker.process.mlx_thread import MlxThread

Progress = Callable[[LoadProgress], None]


def open_checkpoint(model: str, known: Mapping[str, TensorInfo] | None = None) -> Checkpoint:
    """Open `demo` (the bundled model), a local folder, or a hub repository (owner/name, owner/name@revision).

    Args:
        known: the headers of another node's copy: with them a folder may lack files.
    Raises:
        ModelError: it is not there, or not a model.
    """
    if model == "demo":
        return open_folder(DEMO, name="demo")
    folder = Path(model).expanduser()
    if is_repository(model) and not folder.exists():
        return open_repository(model)
    return open_folder(folder.absolute(), known=known)


class GivenUp(Exception):
    """Ends a load that nobody waits for any more, on the thread where it runs."""


async def load_shard(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    num_layers: int,
    thread: MlxThread,
    progress: Progress,
    given_up: threading.Event | None = None,
) -> Shard:
    """Download what is missing, then build and materialise layers [start, end) on the MLX thread.

    Args:
        progress: is called on the event loop.
        given_up: once it is set, GivenUp is raised after the next piece of a file or the next layer. Cancelling sets
            it too, but returns at once: who cares for the files and the memory sets it and waits.
    """
    loop = asyncio.get_running_loop()
    given_up = given_up or threading.Event()
    names = shard_tensors(checkpoint, start, end, num_layers)
    files = checkpoint.files_of(names)

    def go_on() -> None:
        if given_up.is_set():
            raise GivenUp

    def counter(phase: str, total: int) -> Callable[[int], None]:
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            go_on()
            done += nbytes
            loop.call_soon_threadsafe(progress, LoadProgress(phase=phase, done=min(done, total), total=total))

        return advance

    def fetch() -> None:
        advance = counter("download", sum(info.nbytes for info in checkpoint.tensors.values() if info.file in files))
        for file in sorted(files):  # one by one: not every way of downloading lets its progress stop it
            go_on()
            checkpoint.fetch([name for name in names if checkpoint.tensors[name].file == file], advance)

    def build() -> Shard:
        go_on()
        shard = Shard(checkpoint, start, end)
        keep_resident()
        shard.materialise(counter("load", sum(checkpoint.tensors[name].nbytes for name in names)))
        return shard

    try:
        await run_aside(fetch)
        return await thread.run(build)
    except asyncio.CancelledError:
        given_up.set()
        raise
