"""From a model's name to a shard in memory, with progress. Used by the coordinator and by workers alike."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

import mlx.core as mx

from protos.brigade_pb2 import LoadProgress
from worker.compute.shard import Shard
from worker.model.checkpoint import DEMO, Checkpoint, open_folder
from worker.model.describe import shard_tensors
from worker.model.headers import TensorInfo
from worker.model.repository import folder_of, is_repository
from worker.platform.mlx_memory import keep_within
from worker.platform.threads import MlxThread, run_in_thread

Progress = Callable[[LoadProgress], None]


def open_checkpoint(model: str, known: Mapping[str, TensorInfo] | None = None) -> Checkpoint:
    """Open `demo` (the bundled model), a local folder, or a hub repository (owner/name, owner/name@revision).

    What a peer names is for ModelSources to find.

    Args:
        known: the headers of another node's copy: with them a folder may lack files.
    Raises:
        ModelError: it is not there, or not a model.
    """
    if model == "demo":
        return open_folder(DEMO, name="demo")
    if is_on_hub(model):
        from worker.model.hub import open_repository  # and with it huggingface_hub, which folders never need

        return open_repository(model)
    return open_folder(folder_of(model).absolute(), known=known)


def is_on_hub(model: str) -> bool:
    """Whether it is the name of a repository, and of no folder here."""
    return is_repository(model) and not folder_of(model).exists()


class GivenUp(Exception):
    """Ends a load that was given up, on the thread where it runs."""


async def load_shard(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    thread: MlxThread,
    progress: Progress,
    given_up: threading.Event | None = None,
    held: dict[str, mx.array] | None = None,
    memory_bytes: int = 0,
) -> Shard:
    """Download what is missing, then build and materialise layers [start, end) on the MLX thread.

    Args:
        progress: is called on the event loop.
        given_up: once it is set, GivenUp is raised after the next piece of a file or the next layer. Cancelling sets
            it too, but returns at once: a caller that needs the files or the memory sets it and waits.
        held: tensors of this very checkpoint, which the shard takes over. If the load is given up, `held` has those
            that have been read by then, or as before if it was not begun.
        memory_bytes: what this process is to keep within; 0 leaves that to MLX.
    """
    given_up = given_up or threading.Event()
    load = _Load(checkpoint, shard_tensors(checkpoint, start, end), progress, given_up)
    try:
        await run_in_thread(load.fetch)
        return await thread.run(partial(load.build, start, end, held, memory_bytes))
    except asyncio.CancelledError:
        given_up.set()
        raise


async def fetch(checkpoint: Checkpoint, names: Sequence[str], progress: Progress) -> None:
    """Download the missing files of these tensors. Cancelling stops after the next piece of a file."""
    given_up = threading.Event()
    try:
        await run_in_thread(_Load(checkpoint, names, progress, given_up).fetch)
    except asyncio.CancelledError:
        given_up.set()
        raise


class _Load:
    """The two halves of a load, each on its thread: both end by GivenUp once the load is given up."""

    def __init__(
        self, checkpoint: Checkpoint, names: Sequence[str], progress: Progress, given_up: threading.Event
    ) -> None:
        """`names` are those of the wanted tensors."""
        self._checkpoint = checkpoint
        self._names = names
        self._progress = progress
        self._given_up = given_up
        self._loop = asyncio.get_running_loop()

    def fetch(self) -> None:
        tensors, files = self._checkpoint.tensors, self._checkpoint.files_of(self._names)
        advance = self._counter("download", sum(info.nbytes for info in tensors.values() if info.file in files))
        for file in sorted(files):  # one by one: not every way of downloading lets its progress stop it
            self._go_on()
            self._checkpoint.fetch([name for name in self._names if tensors[name].file == file], advance)

    def build(self, start: int, end: int, held: dict[str, mx.array] | None, memory_bytes: int) -> Shard:
        self._go_on()
        shard = Shard(self._checkpoint, start, end, held)
        nbytes = sum(self._checkpoint.tensors[name].nbytes for name in self._names)
        keep_within(memory_bytes, nbytes)
        advance, num_read = self._counter("load", nbytes), 0

        def note_read(nbytes: int) -> None:
            nonlocal num_read
            num_read += 1
            advance(nbytes)

        try:
            shard.materialise(note_read)
        except GivenUp:
            if held is not None:
                held.update(islice(shard.tensors.items(), num_read))
            raise
        return shard

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise GivenUp

    def _counter(self, phase: str, total: int) -> Callable[[int], None]:
        """Return a function that takes the bytes of each step, and reports how many there are by then."""
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            self._go_on()
            done += nbytes
            report = LoadProgress(phase=phase, done=min(done, total), total=total)
            self._loop.call_soon_threadsafe(self._progress, report)

        return advance
