"""Feeding, the receiving side: what a coordinator sends of a model, checked and put into the store.

The event loop only takes messages in; files are written, and digests made, on threads of their own.
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from protos.brigade_pb2 import Announcement, Feeding, Held, LoadRequest
from worker.errors import BrigadeError, FrameError, ModelError
from worker.model.headers import unpack_headers
from worker.node.chunks import MOST_CHUNK_BYTES, Chunk, checksum_of, read_feeding
from worker.node.loader import check_layers, check_model
from worker.process.call_thread import CallThread
from worker.process.to_the_end import to_the_end
from worker.store.locks import Lease
from worker.store.pieces import Piece, pieces_of
from worker.store.receiving import Receiving
from worker.store.store import Store

_BATCH_BYTES = 1 << 21  # that are written at once, while as many more come in
_MOST_FILES = 32
MOST_ON_THE_WAY = 1 << 26  # bytes that a sender may have sent without hearing of them
SAY_BYTES = 1 << 20  # between two words of how much is here
_NOTHING = -SAY_BYTES  # told of a file: the first word says how much is here already
_ENDED_S = 10.0
_SILENT_S = 300.0  # the longest that a coordinator may make a digest
_ASK_AGAIN_S = 0.2  # whether another process has done with a file

T = TypeVar("T")


async def be_fed(
    store: Store,
    first_message: bytes,
    messages: AsyncIterator[bytes],
    *,
    has_checksums: bool,
    received: Callable[[LoadRequest, int, float], None] = lambda request, num_bytes, took_s: None,
) -> AsyncGenerator[Held, None]:
    """How much is here of each file that is announced. What was taken whole, or in part, stays if this is cut.

    Args:
        messages: those behind the first one.
        received: is called in the end, with how many bytes came in how many seconds.
    Raises:
        FrameError: the messages are in no order, or damaged.
        ModelError: something does not belong to the model, or there is no room.
    """
    try:
        first = read_feeding(first_message)
        if isinstance(first, Chunk) or first.WhichOneof("what") != "model":
            raise FrameError("expected the model first that is to be fed")
        yield Held()
        began = time.monotonic()
        async with Intake(store, first.model, has_checksums=has_checksums) as intake:
            while (message := await next_message(messages)) is not None:
                await intake.take(read_feeding(message))
                if news := intake.news():
                    yield news
            await intake.end()
        received(first.model, intake.num_bytes, time.monotonic() - began)
    except BrigadeError:
        yield Held(refused=True)  # a sender whose write fails hears of no status
        await _wait_ended(messages)
        raise


async def next_message(messages: AsyncIterator[bytes]) -> bytes | None:
    """None at their end. Raises FrameError where there is none for long: others may wait for what is held meanwhile."""
    try:
        async with asyncio.timeout(_SILENT_S):
            return await anext(messages, None)
    except TimeoutError:
        raise FrameError(f"expected more of what it is fed, got nothing for {_SILENT_S:.0f} s") from None


async def _wait_ended(messages: AsyncIterator[bytes]) -> None:
    """Let pass what was on its way, of which there is not more than what may be."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ENDED_S):
            async for message in messages:
                num_bytes += len(message)
                if num_bytes > MOST_ON_THE_WAY:
                    return


class Intake:
    """The files of one call, one after another. Use as an async context manager."""

    def __init__(self, store: Store, request: LoadRequest, *, has_checksums: bool) -> None:
        self.num_bytes = 0  # that came
        self._told = _NOTHING  # bytes of the latest file
        self._size = 0  # of that
        self._store = store
        self._request = request
        self._has_checksums = has_checksums
        self._writer = CallThread("feeding")
        self._finisher = CallThread("feeding's end")
        self._finishing: asyncio.Future[None] | None = None
        self._lease = Lease()  # of what is whole
        self._pieces: dict[int, Piece] | None = None
        self._num_files = 0  # beside the pieces
        self._incoming: Incoming | None = None  # the file that comes now
        self._begun: Receiving | None = None  # the latest that the writer opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await to_the_end(self._close())

    def news(self) -> Held | None:
        """How much is here of the latest file, where the coordinator should hear of it."""
        has_come = self._incoming.offset if self._incoming else self._size
        if has_come < self._size and has_come - self._told < SAY_BYTES:
            return None
        self._told = has_come
        return Held(bytes=has_come)

    async def take(self, message: Feeding | Chunk) -> None:
        """The next message. Raises as `be_fed`."""
        if isinstance(message, Chunk):
            await self.add(message)
        elif message.WhichOneof("what") == "announcement":
            await self.announce(message.announcement)
        else:
            raise FrameError("expected an announcement or data")

    async def announce(self, announcement: Announcement) -> None:
        """See how much of this file is here already. Raises as `be_fed`."""
        if self._incoming is not None:
            raise FrameError(f"expected {self._incoming.left} more bytes, got the next file")
        if announcement.WhichOneof("what") == "file":
            self._num_files += 1
            if self._num_files > _MOST_FILES:
                raise FrameError(f"expected at most {_MOST_FILES} files beside the pieces")
        if self._pieces is None:
            await self._wait_finished()  # what the pieces are is said in the files before them
        found = await self._wait_begun(announcement)
        self._size, self._told = announcement.size, _NOTHING
        if isinstance(found, Receiving):
            self._incoming = Incoming(found, self._writer)
            await self._end_if_whole()

    async def add(self, chunk: Chunk) -> None:
        """Raises as `be_fed`."""
        incoming, data = self._incoming, chunk.data
        if incoming is None or not 0 < len(data) <= min(incoming.left, MOST_CHUNK_BYTES):
            expected = incoming.left if incoming else 0
            raise FrameError(f"expected some of at most {expected} more bytes of a file, got {len(data)}")
        if self._has_checksums and chunk.checksum != checksum_of([data], incoming.offset):
            raise FrameError(f"expected bytes as they were sent, got {len(data)} with a wrong checksum")
        self.num_bytes += len(data)
        await incoming.add(data)
        await self._end_if_whole()

    async def end(self) -> None:
        """Return once all is on the disk. Raises as `be_fed`."""
        if self._incoming is not None:
            raise FrameError(f"expected {self._incoming.left} more bytes, got the end")
        await self._wait_finished()

    async def _wait_begun(self, announcement: Announcement) -> Receiving | Path:
        """Where it is, or what takes it; while another process of this machine receives it there is neither."""
        while True:
            found = await _explained(self._writer.submit(partial(self._begin, announcement)))
            if found is not None:
                return found
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _close(self) -> None:
        """Keep what has come, and hold no file any more, whatever the threads were at when this was cut."""
        if self._incoming is not None:
            await asyncio.gather(self._incoming.flush(), return_exceptions=True)
        await self._writer.run(lambda: None)
        await self._finisher.run(self._let_go)
        for thread in (self._writer, self._finisher):
            thread.close(timeout_s=0)

    def _let_go(self) -> None:
        if self._begun is not None:
            self._begun.close()
        self._lease.close()

    async def _end_if_whole(self) -> None:
        """Go on with the next file while this one is finished."""
        incoming = self._incoming
        if incoming is None or incoming.left:
            return
        await incoming.flush()
        await self._wait_finished()
        self._incoming = None
        self._finishing = self._finisher.submit(partial(self._finish, incoming.receiving))

    async def _wait_finished(self) -> None:
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            await _explained(finishing)

    def _finish(self, receiving: Receiving) -> None:
        try:
            receiving.finish()
            receiving.hand_over(self._lease)
        finally:
            receiving.close()

    def _begin(self, announcement: Announcement) -> Receiving | Path | None:
        """As the store's `begin_piece`, of whatever is announced. Raises likewise."""
        try:
            found = self._look_up(announcement)
        except FileNotFoundError:  # it was removed while it was looked at
            return None
        if isinstance(found, Path) and not self._lease.add(found):
            return None  # it is being removed: it will be taken anew
        self._begun = found if isinstance(found, Receiving) else self._begun
        return found

    def _look_up(self, announcement: Announcement) -> Receiving | Path | None:
        fingerprint, size, digest = self._request.fingerprint, announcement.size, announcement.digest
        if announcement.WhichOneof("what") == "file":
            return self._store.begin_file(fingerprint, announcement.file, size, digest)
        if self._pieces is None:
            self._pieces = self._find_pieces()
        piece = self._pieces.get(announcement.place)
        if piece is None or piece.nbytes != size:
            expected = f"{piece.nbytes} bytes of it" if piece else f"one of {sorted(self._pieces)}"
            raise FrameError(f"expected {expected}, got piece {announcement.place} of {size} bytes")
        return self._store.begin_piece(fingerprint, piece, digest)

    def _find_pieces(self) -> dict[int, Piece]:
        """What the layers that are asked for consist of, by what the headers of the coordinator's copy say."""
        request = self._request
        known = unpack_headers(request.contents.headers)
        checkpoint = self._store.open(request.model, request.fingerprint, known, {})
        check_model(request, checkpoint)
        check_layers(request, checkpoint)
        pieces = pieces_of(checkpoint, request.start, request.end)
        self._store.room.require(sum(piece.nbytes for piece in pieces))
        self._store.call(request.fingerprint, request.model)
        return {piece.place: piece for piece in pieces}


class Incoming:
    """A file that comes: one batch of it is written while the next one comes in."""

    def __init__(self, receiving: Receiving, writer: CallThread) -> None:
        self.receiving = receiving
        self.offset = receiving.offset
        self.left = receiving.nbytes - receiving.offset
        self._writer = writer
        self._batch: list[memoryview] = []
        self._batch_bytes = 0
        self._writing: asyncio.Future[None] | None = None

    async def add(self, data: memoryview) -> None:
        """Waits while the disk is behind. Raises ModelError if it takes no more."""
        self._batch.append(data)
        self._batch_bytes += len(data)
        self.offset += len(data)
        self.left -= len(data)
        if self._batch_bytes >= _BATCH_BYTES:
            await self._write()

    async def flush(self) -> None:
        """Return once all is written. Raises likewise."""
        await self._write()
        await self._wait_written()

    async def _write(self) -> None:
        await self._wait_written()
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        self._writing = self._writer.submit(partial(self.receiving.write, batch))

    async def _wait_written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await _explained(writing)


async def _explained(work: "asyncio.Future[T]") -> T:
    """Its result; an error of the disk as one that its user understands."""
    try:
        return await work
    except OSError as error:
        remedy = "let it write there, or set XDG_CACHE_HOME to another folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room there, or see `brigade cache ls`"
        what = f"cannot keep what it receives: {error.strerror or error} ({error.filename or 'its cache folder'})"
        raise ModelError(f"{what}; {remedy}") from error
