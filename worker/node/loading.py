"""From a model's name to a shard in memory, with progress. Used by the coordinator and by workers alike."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx

from protos.brigade_pb2 import LoadProgress
from worker.drafters.kinds import DrafterPart, build_part
from worker.errors import ModelError
from worker.model.checkpoint import DEMO, Checkpoint, open_folder
from worker.model.describe import shard_tensors
from worker.model.headers import TensorInfo
from worker.model.repository import folder_of, is_on_hub, is_repository
from worker.platform.machine import freeze_heap
from worker.platform.mlx_memory import keep_within
from worker.platform.tasks import background
from worker.platform.threads import MlxThread, run_in_thread

READ_BYTES = 1 << 22  # that are read from a file at once
QUIET_S = 10.0  # without a report, after which a load looks for other signs of progress

Progress = Callable[[LoadProgress], None]


def open_checkpoint(model: str, known: Mapping[str, TensorInfo] | None = None) -> Checkpoint:
    """Open `demo` (the bundled model), a local folder, or a hub repository (owner/name, owner/name@revision).

    A name given by a peer is resolved by ModelSources instead.

    Args:
        known: the headers of another node's copy: with them a folder may lack files.
    Raises:
        ModelError: it is not there, or not a model.
    """
    if model == "demo":
        return open_folder(DEMO, name="demo")
    if is_on_hub(model):
        from worker.model.hub import open_repository  # imports huggingface_hub, which folders never need

        return open_repository(model)
    if is_repository(model) and not folder_of(model).exists():
        where = f"where {model.partition('/')[0]} is a folder"
        raise ModelError(
            f"model folder {model} does not exist here, {where}; if you mean a hub repository, give {model}@main"
        )
    return open_folder(folder_of(model).absolute(), known=known)


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
) -> DrafterPart:
    """Download missing files, then build and materialise layers [start, end) on the MLX thread.

    Of a draft head the end is the number of its layers, or 0 for the part that reads tapped layers.

    Args:
        progress: is called on the event loop.
        given_up: once set, GivenUp is raised after the next piece of a file or the next tensor. Cancelling sets it
            too, but returns at once: a caller that needs the files or the memory sets it and waits.
        held: tensors of this very checkpoint, which the shard takes over. If the load is given up, `held` has the
            tensors that were read until then; it is unchanged if reading had not begun.
        memory_bytes: the memory limit of this process; 0 leaves it to MLX.
    """
    given_up = given_up or threading.Event()
    load = _Load(checkpoint, shard_tensors(checkpoint, start, end), progress, given_up)
    try:
        await run_in_thread(load.fetch)
        async with background(load.watch_reading()):
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
    """The steps of a load, each on its own thread. All end with GivenUp once the load is given up."""

    def __init__(
        self, checkpoint: Checkpoint, names: Sequence[str], progress: Progress, given_up: threading.Event
    ) -> None:
        """`names` are those of the wanted tensors."""
        self._checkpoint = checkpoint
        self._names = names
        self._progress = progress
        self._given_up = given_up
        self._loop = asyncio.get_running_loop()
        self._total = 0  # bytes that MLX makes of the tensors, more than they take in the files if these are in fp8
        self._reading: tuple[int, int] | None = None  # bytes that are loaded; size of the tensor that MLX reads now

    def fetch(self) -> None:
        tensors, files = self._checkpoint.tensors, self._checkpoint.files_of(self._names)
        done, total = 0, sum(info.nbytes for info in tensors.values() if info.file in files)

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self._report("download", done, total)

        for file in sorted(files):  # one by one: not every way of downloading lets its progress stop it
            self._go_on()
            self._checkpoint.fetch([name for name in self._names if tensors[name].file == file], advance)

    def build(self, start: int, end: int, held: dict[str, mx.array] | None, memory_bytes: int) -> DrafterPart:
        self._go_on()
        shard = build_part(self._checkpoint, start, end, held)
        sizes = [array.nbytes for array in shard.tensors.values()]
        self._total = sum(sizes)
        keep_within(memory_bytes, self._total)
        order = {name: number for number, name in enumerate(shard.tensors)}
        self._names = sorted(self._names, key=lambda name: order.get(name, len(order)))  # as MLX reads them
        done = num_read = 0
        self._reading = 0, sizes[0]

        def note_read(nbytes: int) -> None:
            nonlocal done, num_read
            done, num_read = done + nbytes, num_read + 1
            self._reading = (done, sizes[num_read]) if num_read < len(sizes) else None
            self._report("load", done, self._total)

        try:
            shard.materialise(note_read)
        except GivenUp:
            if held is not None:
                held.update(islice(shard.tensors.items(), num_read))
            raise
        finally:
            self._reading = None
        freeze_heap()
        return shard

    async def watch_reading(self) -> None:
        """Report progress within a tensor that takes long: MLX reports whole tensors, and silence counts as a stall.

        Its bytes are read a second time, beside MLX, and reported as they arrive. So a disk that hangs still counts as
        a stall.
        """
        watched = None
        while True:
            reading = self._reading
            await asyncio.sleep(QUIET_S)
            if reading is not None and reading == self._reading != watched:
                watched = reading
                with contextlib.suppress(OSError, ModelError, GivenUp):  # `build` reports what ends the load
                    await run_in_thread(partial(self._read_beside, *reading))

    def _read_beside(self, done: int, size: int) -> None:
        read, due = 0, time.monotonic()
        for block in read_spans(spans_of(self._checkpoint, self._names), done, READ_BYTES):
            read += len(block)
            if read > size or self._reading != (done, size):
                return
            if (now := time.monotonic()) >= due:
                due = now + QUIET_S / 2
                self._report("load", done + read, self._total)

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise GivenUp

    def _report(self, phase: str, done: int, total: int) -> None:
        self._go_on()
        report = LoadProgress(phase=phase, done=min(done, total), total=total)
        self._loop.call_soon_threadsafe(self._progress, report)


# Bytes of weight files


@dataclass(frozen=True)
class ByteRange:
    """Consecutive bytes of a file."""

    path: Path
    at: int
    nbytes: int


def spans_of(checkpoint: Checkpoint, names: Sequence[str]) -> list[ByteRange]:
    """Return where the bytes of these tensors are, in this order. Raises ModelError if a file cannot be read."""
    begins = {file: _data_begin(checkpoint.folder / file) for file in checkpoint.files_of(names)}
    infos = [checkpoint.tensors[name] for name in names]
    return [ByteRange(checkpoint.folder / info.file, begins[info.file] + info.begin, info.nbytes) for info in infos]


def read_spans(spans: Sequence[ByteRange], offset: int, block_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of the spans from this offset on, in blocks; the last block of each span may be shorter.

    Raises:
        ModelError: a file ends early. OSError: it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        opened: dict[Path, BinaryIO] = {}
        for span in spans:
            skipped = min(offset, span.nbytes)
            offset -= skipped
            if span.path not in opened:
                opened[span.path] = stack.enter_context(span.path.open("rb", buffering=0))
            file, left = opened[span.path], span.nbytes - skipped
            file.seek(span.at + skipped)
            while left:
                block = file.read(min(left, block_bytes))
                if not block:
                    raise ModelError(f"{span.path} ends early: it changed while it was read; start again")
                left -= len(block)
                yield block


def _data_begin(path: Path) -> int:
    """Return where the tensors of a safetensors file begin."""
    try:
        with path.open("rb") as file:
            return 8 + int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
