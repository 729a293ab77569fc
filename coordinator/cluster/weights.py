"""Pushing weights: a worker that lacks the model is sent the tensors of its layers from this node's files.

Each file is announced with its digest, and the worker replies how much of it it has. So after a cut only the missing
bytes are sent, and for another split only the new layers. Files are read and digested on threads.
"""

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
from blake3 import blake3

from coordinator.cluster.log import log
from coordinator.cluster.peer import Peer
from protos.brigade_pb2 import Announcement, Feeding, Held, LoadProgress, LoadRequest
from worker.errors import FrameError, ModelError, ModelLacking, StageLost
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.node.framing import CHUNK_BYTES, write_chunk
from worker.node.loading import READ_BYTES, ByteRange, Progress, fetch, read_spans, spans_of
from worker.node.weights_cache import Piece, as_requested, pieces_of
from worker.node.weights_receive import ACK_BYTES
from worker.platform.installation import read_record, record_path, write_record
from worker.platform.text import format_bytes
from worker.platform.threads import CallThread, run_in_thread

_STALL_S = 120.0  # the longest that a worker may accept no bytes, or not acknowledge any
DIGEST_S = 60.0  # without a message while a digest is computed; the worker waits five times as long
DISK_S = 180.0  # without a byte from this node's disk, after which the transfer fails
PAUSE_S = 0.5
_BACK_S = 10.0  # for how long a worker that was lost on the way is asked again
_BATCH = 2  # messages that are read from the disk at once
_LEAST_ALLOWANCE, _MOST_ALLOWANCE = ACK_BYTES, 1 << 24  # bytes; a worker acknowledges no smaller amount
_MOMENT_S, _LOOK_S = 0.1, 0.02
_LONG_S = 1.0
_MOST_KEPT = 4096  # digests of one model folder; older ones belong to files that have changed since

T = TypeVar("T")
_Transfer = grpc.aio.StreamStreamCall[bytes, Held]
Chunks = Generator[tuple[int, bytes], None, None]


async def load_pushing(
    peer: Peer, request: LoadRequest, checkpoint: Checkpoint, report: Progress, *, feeds: bool
) -> None:
    """Have a worker load a shard; first push what it lacks of it, if this node `feeds`.

    Raises:
        BrigadeError: as the worker refuses. StageLost: it is lost, or stalls.
    """
    try:
        return await peer.load(request, report)
    except ModelLacking as lack:
        if not feeds:
            raise ModelLacking(
                f"{lack.message}; this node does not send it: `pull` in its cluster.yaml says so", node=peer.name
            ) from lack
        log("note", f"worker {peer.name}: {lack.message.partition(';')[0]}: sending it what it lacks")
    await push_weights(peer, request, checkpoint, report)
    await run_in_thread(checkpoint.require_unchanged)
    await peer.load(request, report)


async def push_weights(peer: Peer, request: LoadRequest, checkpoint: Checkpoint, report: Progress) -> int:
    """Send a worker what it lacks of the requested layers. Resume after a cut, as long as each try sends some bytes.

    Returns:
        The number of bytes that were sent.
    Raises:
        BrigadeError: as `load_pushing`.
    """
    began = time.monotonic()
    checkpoint = as_requested(checkpoint, request)
    pieces = await run_in_thread(partial(pieces_of, checkpoint, request.start, request.end))
    await fetch(checkpoint, [name for piece in pieces for name in piece.order], report)
    push = await _from_disk(run_in_thread(partial(Push, peer, request, checkpoint, pieces, report)))
    while True:
        before = push.num_sent
        try:
            await push.run()
            break
        except (StageLost, FrameError) as error:
            if push.num_sent == before:
                raise
            log("note", f"{error}; resuming the transfer")
            await _wait_back(peer)
    if push.num_sent and (took_s := time.monotonic() - began) > _LONG_S:
        sent, speed = (format_bytes(int(n)) for n in (push.num_sent, push.num_sent / took_s))
        log("note", f"worker {peer.name}: was sent {sent} in {took_s:.1f} s, {speed}/s")
    return push.num_sent


async def _wait_back(peer: Peer) -> None:
    """Return once the worker answers again: its name may not resolve for a while. Raises StageLost."""
    until = time.monotonic() + _BACK_S
    while True:
        try:
            await peer.hello(max(PAUSE_S, until - time.monotonic()))
            return
        except StageLost:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(PAUSE_S)


# What is sent


class SourceFile:
    """A file to be sent: a beginning that every node makes itself, then spans of this node's files."""

    def __init__(self, announcement: Announcement, begin: bytes, spans: Sequence[ByteRange]) -> None:
        self.announcement = announcement
        self.nbytes = announcement.size = sum(span.nbytes for span in spans)
        self.num_digested = 0  # bytes, while `digest` runs
        self._begin = begin
        self._spans = spans

    @classmethod
    def of_file(cls, path: Path) -> "SourceFile":
        return cls(Announcement(file=path.name), b"", [ByteRange(path, 0, path.stat().st_size)])

    @classmethod
    def of_piece(cls, checkpoint: Checkpoint, piece: Piece) -> "SourceFile":
        """Raises ModelError if a file is missing."""
        return cls(Announcement(place=piece.place), piece.header, spans_of(checkpoint, piece.order))

    @cached_property
    def stamp(self) -> str:
        """A text that changes when the contents may have changed."""
        stats = {span.path: span.path.stat() for span in self._spans}
        said = [self._begin.hex()]
        said += [f"{span.path} {span.at} {span.nbytes}" for span in self._spans]
        said += [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats.items()]
        return hashlib.sha256("\n".join(said).encode(errors="surrogateescape")).hexdigest()

    def blocks(self, offset: int, block_bytes: int) -> Iterator[bytes]:
        """Yield the bytes from this offset on, which does not count the beginning. Raises as `read_spans`."""
        return read_spans(self._spans, offset, block_bytes)

    def digest(self, given_up: threading.Event) -> str:
        """Return the BLAKE3 of the whole file in hex; empty once it is given up."""
        found = blake3(self._begin)
        for block in self.blocks(0, READ_BYTES):
            if given_up.is_set():
                return ""
            found.update(block)
            self.num_digested += len(block)
        return found.hexdigest()


class DigestCache:
    """Digests of a model's files, kept in the cache folder so that files are not read twice before they are sent."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._path = record_path("digests", os.fsencode(checkpoint.folder.absolute()))
        self._known = self._read()

    def known(self, file: SourceFile) -> str:
        """Return the kept digest, or an empty string."""
        return self._known.get(file.stamp, "") if self._known else ""

    def of(self, file: SourceFile, given_up: threading.Event) -> str:
        """Return the digest, computed if need be. Raises OSError if a file cannot be read."""
        found = self.known(file) or file.digest(given_up)
        if found:
            self._known[file.stamp] = found
        return found

    def keep(self) -> None:
        """Write them. If the folder is read-only they are computed again next time."""
        known = self._read() | self._known.copy()  # another process or thread may have added some meanwhile
        write_record(self._path, dict(list(known.items())[-_MOST_KEPT:]))

    def _read(self) -> dict[str, str]:
        found = read_record(self._path)
        return {str(stamp): str(digest) for stamp, digest in found.items()} if isinstance(found, dict) else {}


def known_digests(checkpoint: Checkpoint) -> dict[int, str]:
    """Return the kept digests of the pieces that workers may hold, by place."""
    digests, found = DigestCache(checkpoint), {}
    for piece in pieces_of(checkpoint, 0, describe(checkpoint).num_layers):
        with contextlib.suppress(ModelError, OSError):  # a file that is still on the hub
            if digest := digests.known(SourceFile.of_piece(checkpoint, piece)):
                found[piece.place] = digest
    return found


def _chunks(file: SourceFile, offset: int, *, has_checksums: bool) -> Chunks:
    """Yield the bytes from this offset on as messages, each with the offset behind it; small tensors are joined."""
    blocks: list[bytes] = []
    size = 0
    for block in file.blocks(offset, CHUNK_BYTES):
        blocks.append(block)
        size += len(block)
        if size >= CHUNK_BYTES or offset + size == file.nbytes:
            message = write_chunk(blocks, offset if has_checksums else None)
            offset += size
            yield offset, message
            blocks, size = [], 0


# Sending


class Allowance:
    """How many bytes may be in flight: more would only queue up and delay the keepalives of other connections."""

    def __init__(self) -> None:
        self.num_bytes = _LEAST_ALLOWANCE
        self._since = time.monotonic()
        self._num_acknowledged = 0

    def note(self, num_bytes: int) -> None:
        """Note that so many were acknowledged. The allowance follows the speed, at most halved or doubled at once."""
        self._num_acknowledged += num_bytes
        if (took_s := time.monotonic() - self._since) >= _LOOK_S:
            per_moment = int(self._num_acknowledged / took_s * _MOMENT_S)
            wanted = min(max(per_moment, self.num_bytes // 2), 2 * self.num_bytes)
            self.num_bytes = min(max(wanted, _LEAST_ALLOWANCE), _MOST_ALLOWANCE)
            self._since, self._num_acknowledged = time.monotonic(), 0


class Push:
    """The transfer of weights to one worker, in one call or several."""

    def __init__(
        self, peer: Peer, request: LoadRequest, checkpoint: Checkpoint, pieces: Sequence[Piece], report: Progress
    ) -> None:
        """Block to open the files. Raises OSError or ModelError for one that is missing."""
        small = [checkpoint.folder / "config.json", *checkpoint.tokenizer_files()]
        self._files = [*map(SourceFile.of_file, small), *(SourceFile.of_piece(checkpoint, piece) for piece in pieces)]
        self._digests = DigestCache(checkpoint)
        self.num_sent = 0
        self._peer = peer
        self._request = request
        self._report = report
        self._total = 0  # bytes that the worker lacks, as far as known
        self._num_passed = 0  # bytes of the files that this call is done with
        self._allowance = Allowance()

    async def run(self) -> None:
        """Make one call, to its end. Raises as `push_weights`."""
        self._total, self._num_passed = self.num_sent + sum(file.nbytes for file in self._files), 0
        try:
            with self._peer.naming():
                async with self._peer.pushing() as call:
                    await self._write(call, Feeding(model=self._request).SerializeToString())
                    await self._read(call)  # the worker accepts the model
                    await self._send_all(call)
                    await call.done_writing()
                    await self._wait_ended(call)
        finally:
            await run_in_thread(self._digests.keep)

    async def _send_all(self, call: _Transfer) -> None:
        """Send one file after another. While one is sent, the digest of the next one is computed."""
        given_up = threading.Event()
        with contextlib.ExitStack() as stack:
            digester, reader = CallThread("digests"), CallThread("reading")
            for thread in (digester, reader):
                stack.callback(thread.close, timeout_s=0)
            stack.callback(given_up.set)
            digesting = digester.submit(partial(self._digests.of, self._files[0], given_up))
            stack.callback(lambda: digesting.cancel())
            for file, following in zip(self._files, [*self._files[1:], None], strict=True):
                num_digested, still_s = 0, 0.0
                while not (await asyncio.wait([digesting], timeout=DIGEST_S))[0]:
                    still_s = 0.0 if file.num_digested > num_digested else still_s + DIGEST_S
                    num_digested = file.num_digested
                    if still_s >= DISK_S:
                        raise _disk_hangs()
                    # a long silence would count as a stall: repeat the announcement of a file that is there already
                    if self._files[0].announcement.digest:
                        await self._announce(call, self._files[0])
                file.announcement.digest = await _from_disk(digesting)
                if following is not None:
                    digesting = digester.submit(partial(self._digests.of, following, given_up))
                await self._send(call, file, reader)
                self._num_passed += file.nbytes

    async def _announce(self, call: _Transfer, file: SourceFile) -> int:
        """Announce a file, and return how much of it the worker has."""
        await self._write(call, Feeding(announcement=file.announcement).SerializeToString())
        return await self._read_held(call, range(file.nbytes + 1))

    async def _send(self, call: _Transfer, file: SourceFile, reader: CallThread) -> None:
        """Send what the worker lacks of a file, with no more bytes in flight than the allowance."""
        if file.announcement.WhichOneof("what") == "place":
            self._request.digests[file.announcement.place] = file.announcement.digest  # for the load that follows
        at = held = await self._announce(call, file)
        self._total -= held
        chunks = _chunks(file, held, has_checksums=self._peer.wire.has_checksums)

        def read() -> list[tuple[int, bytes]]:
            return list(islice(chunks, _BATCH))

        reading = reader.submit(read)
        try:
            while batch := await _from_disk(reading, DISK_S):
                reading = reader.submit(read)
                await self._write(call, *(message for _, message in batch))
                at = batch[-1][0]
                while at - held > (0 if at == file.nbytes else self._allowance.num_bytes):
                    before, held = held, await self._read_held(call, range(held, at + 1))
                    self.num_sent += held - before
                    self._allowance.note(held - before)
                    self._report(LoadProgress(phase="feed", done=self.num_sent, total=self._total))
        finally:
            reading.cancel()
            reader.submit(chunks.close)  # closes its files, once no read is in progress

    async def _read_held(self, call: _Transfer, expected: range) -> int:
        """Return how many bytes of a file the worker has, once no other worker of its machine receives the file."""
        while (reply := await self._read(call)).waits:
            total = sum(file.nbytes for file in self._files)
            self._report(LoadProgress(phase="shared", done=self._num_passed + reply.bytes, total=total))
        if reply.bytes not in expected:
            said = f"expected it to have {expected.start} to {expected.stop - 1} bytes of a file, it says {reply.bytes}"
            raise FrameError(said, node=self._peer.name)
        return reply.bytes

    async def _write(self, call: _Transfer, *messages: bytes) -> None:
        """Write these messages. Raises StageLost if the worker stalls or has ended the call."""
        try:
            async with self._not_stalled("took no bytes for {}"):
                for message in messages:
                    await call.write(message)
        except asyncio.InvalidStateError:
            raise self._ended() from None

    async def _read(self, call: _Transfer) -> Held:
        """Return the worker's next reply. Raises what it refuses with, or StageLost."""
        async with self._not_stalled("did not acknowledge any bytes for {}"):
            reply = await call.read()
        if isinstance(reply, Held):
            if not reply.refused:
                return reply
            await call.done_writing()
            await self._wait_ended(call)
        raise self._ended()

    async def _wait_ended(self, call: _Transfer) -> None:
        """Read to the end of the call. Raises what the worker refuses with, or StageLost."""
        async with self._not_stalled("did not store within {} what it was sent"):
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass

    @contextlib.asynccontextmanager
    async def _not_stalled(self, failure: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_STALL_S):
                yield
        except TimeoutError:
            raise StageLost(failure.format(f"{_STALL_S:.0f} s"), node=self._peer.name) from None

    def _ended(self) -> StageLost:
        return StageLost("ended the transfer of its layers", node=self._peer.name)


async def _from_disk(work: Awaitable[T], within_s: float | None = None) -> T:
    """Return the result. Raises ModelError if a file cannot be read, or not in time."""
    try:
        async with asyncio.timeout(within_s) as limit:
            return await work
    except OSError as error:
        if limit.expired():
            raise _disk_hangs() from None
        raise ModelError(f"cannot read {error.filename or 'the model'}: {error.strerror or error}") from error


def _disk_hangs() -> ModelError:
    return ModelError(f"cannot read the model: no byte came from its disk for {DISK_S:.0f} s")
