"""Receiving weights: the files that a coordinator sends are verified and put into the cache.

The event loop only takes in messages; two threads write files and finish them.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Self, TypeVar

from protos.brigade_pb2 import Announcement, Feeding, Held, LoadRequest
from worker.errors import BrigadeError, FrameError, ModelError
from worker.model.headers import unpack_headers
from worker.node.framing import MOST_CHUNK_BYTES, Chunk, checksum_of, read_transfer
from worker.node.model_sources import check_layers, check_model
from worker.node.rpc_errors import next_within
from worker.node.weights_cache import Lease, PartialFile, Piece, WeightsCache, as_requested, pieces_of, remove_unused
from worker.platform.tasks import shielded
from worker.platform.threads import CallThread

BATCH_BYTES = 1 << 21  # that are written at once, while the next batch comes in
_MOST_FILES = 32
MOST_IN_FLIGHT = 1 << 26  # bytes that a sender may have sent without an acknowledgement
ACK_BYTES = 1 << 20  # between two acknowledgements
ENDED_S = 10.0
SILENT_S = 300.0  # the longest time between two messages of a coordinator
ASK_AGAIN_S = 0.2  # between two tries to open a file that another process has

T = TypeVar("T")


async def receive_weights(
    cache: WeightsCache, first_message: bytes, messages: AsyncIterator[bytes], log: Logger, *, has_checksums: bool
) -> AsyncGenerator[Held, None]:
    """Yield how many bytes of each announced file are here. What was received stays if this is cut off.

    Args:
        messages: the messages after the first one.
        log: gets a line about bytes and seconds at the end.
    Raises:
        FrameError: a message is out of order or damaged.
        ModelError: something does not belong to the model, or there is no room.
    """
    try:
        first = read_transfer(first_message)
        if isinstance(first, Chunk) or first.WhichOneof("what") != "model":
            raise FrameError("expected the model of the weights first")
        yield Held()
        model, began = first.model, time.monotonic()
        async with Receiver(cache, model, has_checksums=has_checksums) as receiver:
            while (message := await next_within(SILENT_S, messages, "weights")) is not None:
                async for reply in receiver.take(read_transfer(message)):
                    yield reply
            await receiver.end()
        shard = f"layers [{model.start}, {model.end}) of {model.model}"
        log.info("was sent %.1f MiB of %s in %.1f s", receiver.num_bytes / 2**20, shard, time.monotonic() - began)
    except BrigadeError:
        yield Held(refused=True)  # a sender whose write fails gets no status
        await _wait_ended(messages)
        raise


async def _wait_ended(messages: AsyncIterator[bytes]) -> None:
    """Read and drop the messages that were in flight."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENDED_S):
            async for message in messages:
                num_bytes += len(message)
                if num_bytes > MOST_IN_FLIGHT:
                    return


class Receiver:
    """The files of one call, one after another. Use as an async context manager. Raises as `receive_weights`."""

    def __init__(self, cache: WeightsCache, request: LoadRequest, *, has_checksums: bool) -> None:
        self.num_bytes = 0  # received, of all files
        self._cache = cache
        self._request = request
        self._has_checksums = has_checksums
        self._writer = CallThread("writing")
        self._finisher = CallThread("finishing")
        self._lease = Lease()  # of complete files
        self._pieces: dict[int, Piece] | None = None
        self._files: set[str] = set()  # beside the pieces
        # the latest file
        self._size = self._offset = 0  # all of its bytes, and those that are here
        self._acknowledged = 0
        self._file: PartialFile | None = None  # until it is complete
        self._begun: PartialFile | None = None  # as the writer opened it
        self._batch: list[memoryview] = []
        self._batch_bytes = 0
        self._writing: asyncio.Future[None] | None = None
        self._finishing: asyncio.Future[None] | None = None  # of the file before it

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await shielded(self._close())

    async def take(self, message: Feeding | Chunk) -> AsyncIterator[Held]:
        """Take the next message. Yield its acknowledgement if one is due, and while it waits the progress of others."""
        if isinstance(message, Chunk):
            await self._add(message)
        elif message.WhichOneof("what") == "announcement":
            async for reply in self._announce(message.announcement):
                yield reply
        else:
            raise FrameError("expected an announcement or data")
        if self._offset == self._size or self._offset - self._acknowledged >= ACK_BYTES:
            self._acknowledged = self._offset
            yield Held(bytes=self._offset)

    async def end(self) -> None:
        """Return once everything is on the disk."""
        if self._file is not None:
            raise FrameError(f"expected {self._size - self._offset} more bytes, got the end")
        await self._wait_finished()

    async def _announce(self, announcement: Announcement) -> AsyncIterator[Held]:
        """Find out how much of this file is here. Yield what another process of this machine has received meanwhile."""
        if self._file is not None:
            raise FrameError(f"expected {self._size - self._offset} more bytes, got the next file")
        if announcement.WhichOneof("what") == "file":
            self._files.add(announcement.file)
            if len(self._files) > _MOST_FILES:
                raise FrameError(f"expected at most {_MOST_FILES} files beside the pieces")
        if self._pieces is None:
            await self._wait_finished()  # the files before the pieces say what the pieces are
        known = -1
        # None while another process of this machine receives or removes it
        while (found := await _explained(self._writer.submit(partial(self._begin, announcement)))) is None:
            received = await _explained(self._writer.submit(partial(self._partial_bytes, announcement)))
            if received != known:  # a sender gives up after a long silence
                known = received
                yield Held(bytes=received, waits=True)
            await asyncio.sleep(ASK_AGAIN_S)
        self._file = found if isinstance(found, PartialFile) else None
        self._size = announcement.size
        self._offset = self._file.offset if self._file else self._size
        self._acknowledged = -ACK_BYTES  # so the reply to the announcement is due
        await self._end_if_complete()

    async def _add(self, chunk: Chunk) -> None:
        data, left = chunk.data, self._size - self._offset if self._file else 0
        if not 0 < len(data) <= min(left, MOST_CHUNK_BYTES):
            raise FrameError(f"expected some of at most {left} more bytes of a file, got {len(data)}")
        if self._has_checksums and chunk.checksum != checksum_of([data], self._offset):
            raise FrameError(f"expected bytes as they were sent, got {len(data)} with a wrong checksum")
        self.num_bytes += len(data)
        self._offset += len(data)
        self._batch.append(data)
        self._batch_bytes += len(data)
        if self._batch_bytes >= BATCH_BYTES:
            await self._write()
        await self._end_if_complete()

    async def _end_if_complete(self) -> None:
        """Have a complete file finished while the next one comes in."""
        if self._file is None or self._offset < self._size:
            return
        await self._flush()
        await self._wait_finished()
        file, self._file = self._file, None
        self._finishing = self._finisher.submit(partial(self._finish, file))

    async def _write(self) -> None:
        """Write the batch, once the previous one is written: this waits while the disk is behind."""
        await self._wait_written()
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        assert self._file is not None
        self._writing = self._writer.submit(partial(self._file.write, batch))

    async def _flush(self) -> None:
        await self._write()
        await self._wait_written()

    async def _wait_written(self) -> None:
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                await _explained(writing)
        except ModelError:
            self._batch, self._batch_bytes = [], 0  # it would follow a gap
            raise

    async def _wait_finished(self) -> None:
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            await _explained(finishing)

    async def _close(self) -> None:
        """Keep what was received, and hold no file any more, whatever the threads were doing."""
        if self._file is not None:
            await asyncio.gather(self._flush(), return_exceptions=True)
        await self._writer.run(lambda: None)
        await self._finisher.run(self._release)
        for thread in (self._writer, self._finisher):
            thread.close(timeout_s=0)

    # On the finishing thread

    def _finish(self, file: PartialFile) -> None:
        file.finish()
        if not self._lease.add(file.path):
            raise ModelError(f"{file.path} was removed as soon as it was complete; start again")

    def _release(self) -> None:
        if self._begun is not None:
            self._begun.close()
        self._lease.close()

    # On the writing thread

    def _begin(self, announcement: Announcement) -> PartialFile | Path | None:
        """Do as the cache's `begin_piece` for the announced file."""
        try:
            found = self._look_up(announcement)
        except FileNotFoundError:  # removed just now
            return None
        if isinstance(found, Path):
            return found if self._lease.add(found) else None  # a file that is being removed is received anew
        self._begun = found or self._begun
        return found

    def _partial_bytes(self, announcement: Announcement) -> int:
        piece = (self._pieces or {}).get(announcement.place)
        return 0 if piece is None else self._cache.partial_bytes(self._request.fingerprint, piece, announcement.digest)

    def _look_up(self, announcement: Announcement) -> PartialFile | Path | None:
        fingerprint, size, digest = self._request.fingerprint, announcement.size, announcement.digest
        if announcement.WhichOneof("what") == "file":
            return self._cache.begin_file(fingerprint, announcement.file, size, digest)
        if self._pieces is None:
            self._pieces = self._find_pieces()
        piece = self._pieces.get(announcement.place)
        if piece is None or piece.nbytes != size:
            expected = f"{piece.nbytes} bytes of it" if piece else f"one of {sorted(self._pieces)}"
            raise FrameError(f"expected {expected}, got piece {announcement.place} of {size} bytes")
        return self._cache.begin_piece(fingerprint, piece, digest)

    def _find_pieces(self) -> dict[int, Piece]:
        """Return the pieces of the requested layers by place, according to the headers of the coordinator's copy."""
        request = self._request
        known = unpack_headers(request.contents.headers)
        checkpoint = self._cache.open(request.model, request.fingerprint, known, {})
        self._cache.name_model(request.fingerprint, request.model)  # also for the user of what is refused
        for path in checkpoint.tokenizer_files():
            if path.name not in self._files:  # an earlier call's, which would make another model of this one
                remove_unused(path)
        check_model(request, checkpoint)
        check_layers(request, checkpoint)
        pieces = pieces_of(as_requested(checkpoint, request), request.start, request.end)
        self._cache.require_room(sum(piece.nbytes for piece in pieces))
        for piece in pieces:  # those that are here stay: room for the others would else be made of them
            if digest := request.digests.get(piece.place):
                self._lease.add(self._cache.piece_path(request.fingerprint, piece, digest))
        return {piece.place: piece for piece in pieces}


async def _explained(work: "asyncio.Future[T]") -> T:
    """Return the result. Raises ModelError, which says what to do, for an error of the disk."""
    try:
        return await work
    except OSError as error:
        remedy = "let it write there, or set XDG_CACHE_HOME to another folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room there, or see `brigade cache ls`"
        what = f"cannot keep what it receives: {error.strerror or error} ({error.filename or 'its cache folder'})"
        raise ModelError(f"{what}; {remedy}") from error
