"""Receiving weights: what a coordinator sends of a model is checked and put into the cache.

The event loop only takes messages in; files are written, and digests made, on threads of their own.
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
from worker.node.file_locks import Lease
from worker.node.framing import MOST_CHUNK_BYTES, Chunk, checksum_of, read_feeding
from worker.node.model_sources import check_layers, check_model
from worker.node.weights_cache import PartialFile, WeightsCache
from worker.node.weights_pieces import Piece, pieces_of
from worker.platform.tasks import shielded
from worker.platform.threads import CallThread

_BATCH_BYTES = 1 << 21  # that are written at once, while as many more come in
_MOST_FILES = 32
MOST_ON_THE_WAY = 1 << 26  # bytes that a sender may have sent without hearing of them
SAY_BYTES = 1 << 20  # between two words of how much is here
_NOTHING = -SAY_BYTES  # told of a file: the first word says how much is here already
_ENDED_S = 10.0
_SILENT_S = 300.0  # the longest that a coordinator may make a digest
_ASK_AGAIN_S = 0.2  # whether another process has done with a file

T = TypeVar("T")


async def receive_weights(
    cache: WeightsCache, first_message: bytes, messages: AsyncIterator[bytes], log: Logger, *, has_checksums: bool
) -> AsyncGenerator[Held, None]:
    """Yield how much is here of each announced file. Files that came whole, or in part, stay if this is cut.

    Args:
        messages: those behind the first one.
        log: is told in the end how many bytes came in how many seconds.
    Raises:
        FrameError: the messages are in no order, or damaged.
        ModelError: something does not belong to the model, or there is no room.
    """
    try:
        first = read_feeding(first_message)
        if isinstance(first, Chunk) or first.WhichOneof("what") != "model":
            raise FrameError("expected the model first that is to be fed")
        yield Held()
        model, began = first.model, time.monotonic()
        async with Receiver(cache, model, has_checksums=has_checksums) as receiver:
            while (message := await next_message(messages)) is not None:
                await receiver.take(read_feeding(message))
                if news := receiver.news():
                    yield news
            await receiver.end()
        shard = f"layers [{model.start}, {model.end}) of {model.model}"
        log.info("was sent %.1f MiB of %s in %.1f s", receiver.num_bytes / 2**20, shard, time.monotonic() - began)
    except BrigadeError:
        yield Held(refused=True)  # a sender whose write fails gets no status
        await _wait_ended(messages)
        raise


async def next_message(messages: AsyncIterator[bytes]) -> bytes | None:
    """Return None at their end. Raises FrameError after a long silence: others may wait for what is held meanwhile."""
    try:
        async with asyncio.timeout(_SILENT_S):
            return await anext(messages, None)
    except TimeoutError:
        raise FrameError(f"expected more of what it is fed, got nothing for {_SILENT_S:.0f} s") from None


async def _wait_ended(messages: AsyncIterator[bytes]) -> None:
    """Let pass what was on its way, at most as much as may be."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ENDED_S):
            async for message in messages:
                num_bytes += len(message)
                if num_bytes > MOST_ON_THE_WAY:
                    return


class Receiver:
    """The files of one call, one after another. Use as an async context manager. All raises as `receive_weights`."""

    def __init__(self, cache: WeightsCache, request: LoadRequest, *, has_checksums: bool) -> None:
        self.num_bytes = 0  # that came
        self._told = _NOTHING  # bytes of the latest file
        self._size = 0  # of that
        self._cache = cache
        self._request = request
        self._has_checksums = has_checksums
        self._writer = CallThread("writing")
        self._finisher = CallThread("finishing")
        self._finishing: asyncio.Future[None] | None = None
        self._lease = Lease()  # of whole files
        self._pieces: dict[int, Piece] | None = None
        self._num_files = 0  # beside the pieces
        self._incoming: Incoming | None = None  # the file that comes now
        self._begun: PartialFile | None = None  # the latest that the writer opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await shielded(self._close())

    def news(self) -> Held | None:
        """Return how much is here of the latest file, where the coordinator should hear of it."""
        has_come = self._incoming.offset if self._incoming else self._size
        if has_come < self._size and has_come - self._told < SAY_BYTES:
            return None
        self._told = has_come
        return Held(bytes=has_come)

    async def take(self, message: Feeding | Chunk) -> None:
        """Take the next message."""
        if isinstance(message, Chunk):
            await self._add(message)
        elif message.WhichOneof("what") == "announcement":
            await self._announce(message.announcement)
        else:
            raise FrameError("expected an announcement or data")

    async def end(self) -> None:
        """Return once all is on the disk."""
        if self._incoming is not None:
            raise FrameError(f"expected {self._incoming.left} more bytes, got the end")
        await self._wait_finished()

    async def _announce(self, announcement: Announcement) -> None:
        """Find how much of this file is here already."""
        if self._incoming is not None:
            raise FrameError(f"expected {self._incoming.left} more bytes, got the next file")
        if announcement.WhichOneof("what") == "file":
            self._num_files += 1
            if self._num_files > _MOST_FILES:
                raise FrameError(f"expected at most {_MOST_FILES} files beside the pieces")
        if self._pieces is None:
            await self._wait_finished()  # the files before the pieces say what the pieces are
        # None while another process of this machine receives or removes it
        while (found := await _explained(self._writer.submit(partial(self._begin, announcement)))) is None:  # noqa: ASYNC110
            await asyncio.sleep(_ASK_AGAIN_S)
        self._size, self._told = announcement.size, _NOTHING
        if isinstance(found, PartialFile):
            self._incoming = Incoming(found, self._writer)
            await self._end_if_whole()

    async def _add(self, chunk: Chunk) -> None:
        incoming, data = self._incoming, chunk.data
        if incoming is None or not 0 < len(data) <= min(incoming.left, MOST_CHUNK_BYTES):
            expected = incoming.left if incoming else 0
            raise FrameError(f"expected some of at most {expected} more bytes of a file, got {len(data)}")
        if self._has_checksums and chunk.checksum != checksum_of([data], incoming.offset):
            raise FrameError(f"expected bytes as they were sent, got {len(data)} with a wrong checksum")
        self.num_bytes += len(data)
        await incoming.add(data)
        await self._end_if_whole()

    async def _end_if_whole(self) -> None:
        """Go on with the next file while this one is finished."""
        incoming = self._incoming
        if incoming is None or incoming.left:
            return
        await incoming.flush()
        await self._wait_finished()
        self._incoming = None
        self._finishing = self._finisher.submit(partial(self._finish, incoming.file))

    async def _wait_finished(self) -> None:
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            await _explained(finishing)

    async def _close(self) -> None:
        """Keep what has come, and hold no file any more, whatever the threads were at when this was cut."""
        if self._incoming is not None:
            await asyncio.gather(self._incoming.flush(), return_exceptions=True)
        await self._writer.run(lambda: None)
        await self._finisher.run(self._let_go)
        for thread in (self._writer, self._finisher):
            thread.close(timeout_s=0)

    # On the finishing thread

    def _finish(self, file: PartialFile) -> None:
        try:
            file.finish()
            file.hand_over(self._lease)
        finally:
            file.close()

    def _let_go(self) -> None:
        if self._begun is not None:
            self._begun.close()
        self._lease.close()

    # On the writing thread

    def _begin(self, announcement: Announcement) -> PartialFile | Path | None:
        """As the cache's `begin_piece`, of whatever is announced."""
        try:
            found = self._look_up(announcement)
        except FileNotFoundError:  # it was removed while it was looked at
            return None
        if isinstance(found, Path):
            return found if self._lease.add(found) else None  # what is being removed is received anew
        self._begun = found or self._begun
        return found

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
        """Return the pieces of the requested layers, by place, as the headers of the coordinator's copy say."""
        request = self._request
        known = unpack_headers(request.contents.headers)
        checkpoint = self._cache.open(request.model, request.fingerprint, known, {})
        check_model(request, checkpoint)
        check_layers(request, checkpoint)
        pieces = pieces_of(checkpoint, request.start, request.end)
        self._cache.require_room(sum(piece.nbytes for piece in pieces))
        self._cache.name_model(request.fingerprint, request.model)
        return {piece.place: piece for piece in pieces}


class Incoming:
    """A file that comes: one batch of it is written while the next one comes in."""

    def __init__(self, file: PartialFile, writer: CallThread) -> None:
        self.file = file
        self.offset = file.offset
        self.left = file.nbytes - file.offset
        self._writer = writer
        self._batch: list[memoryview] = []
        self._batch_bytes = 0
        self._writing: asyncio.Future[None] | None = None

    async def add(self, data: memoryview) -> None:
        """Wait while the disk is behind. Raises ModelError if it takes no more."""
        self._batch.append(data)
        self._batch_bytes += len(data)
        self.offset += len(data)
        self.left -= len(data)
        if self._batch_bytes >= _BATCH_BYTES:
            await self._write()

    async def flush(self) -> None:
        """Return once all is written. Raises as `add`."""
        await self._write()
        await self._wait_written()

    async def _write(self) -> None:
        await self._wait_written()
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        self._writing = self._writer.submit(partial(self.file.write, batch))

    async def _wait_written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await _explained(writing)


async def _explained(work: "asyncio.Future[T]") -> T:
    """Return its result. Raises ModelError, which tells the user what to do, for an error of the disk."""
    try:
        return await work
    except OSError as error:
        remedy = "let it write there, or set XDG_CACHE_HOME to another folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room there, or see `brigade cache ls`"
        what = f"cannot keep what it receives: {error.strerror or error} ({error.filename or 'its cache folder'})"
        raise ModelError(f"{what}; {remedy}") from error
