"""Feed: a worker that lacks the model is sent the tensors of its layers, read from this node's files.

Each file is announced with its digest, and the worker says how much of that it has: so after a cut only what is missing
is sent, and for another split only the layers that are new. Files are read, and digests made, beside the event loop.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from coordinator.cluster.log import log
from coordinator.cluster.peer import Peer
from protos.brigade_pb2 import Announcement, Feeding, Held, LoadProgress, LoadRequest
from worker.errors import FrameError, ModelError, ModelLacking, StageLost
from worker.model.checkpoint import Checkpoint
from worker.node.chunks import CHUNK_BYTES, write_chunk
from worker.node.feeding import SAY_BYTES
from worker.node.loading import fetch
from worker.process.call_thread import CallThread, run_aside
from worker.process.sizes import format_bytes
from worker.store.origin import Digests, Origin, gathered
from worker.store.pieces import Piece, pieces_of

_STALL_S = 120.0  # the longest that a worker may take no bytes, or not say what it has
_PAUSE_S = 0.5
_BACK_S = 10.0  # for how long one is asked again that was lost on the way
_BATCH = 2  # messages that are read from the disk at once
_LEAST_ALLOWANCE, _MOST_ALLOWANCE = SAY_BYTES, 1 << 24  # bytes; of fewer a worker may not speak
_MOMENT_S, _LOOK_S = 0.1, 0.02
_LONG_S = 1.0

T = TypeVar("T")
Report = Callable[[LoadProgress], None]
Call = grpc.aio.StreamStreamCall[bytes, Held]
Chunks = Generator[tuple[int, bytes], None, None]


async def load_fed(peer: Peer, request: LoadRequest, checkpoint: Checkpoint, report: Report, *, feeds: bool) -> None:
    """Have a worker load a shard; one that lacks it is sent it before, if this node `feeds`.

    Raises:
        BrigadeError: as the worker refuses. StageLost: it is lost, or stalls.
    """
    try:
        return await peer.load(request, report)
    except ModelLacking as lack:
        if not feeds:
            raise ModelLacking(f"{lack.message}; this node sends it none: its `pull` says so", node=peer.name) from lack
        log("note", f"worker {peer.name}: {lack.message.partition(';')[0]}: it is sent what it lacks")
    await feed(peer, request, checkpoint, report)
    await peer.load(request, report)


async def feed(peer: Peer, request: LoadRequest, checkpoint: Checkpoint, report: Report) -> int:
    """Send a worker what it lacks of the layers that are asked for; after a cut again, as long as bytes come through.

    Returns:
        How many bytes were sent.
    Raises:
        BrigadeError: as `load_fed`.
    """
    began = time.monotonic()
    supply = await _from_disk(run_aside(partial(Supply, checkpoint, request)))
    await fetch(checkpoint, [name for piece in supply.pieces for name in piece.order], report)
    sending = Sending(peer, request, supply, report)
    while True:
        before = sending.num_sent
        try:
            await sending.run()
            break
        except (StageLost, FrameError) as error:
            if sending.num_sent == before:
                raise
            log("note", f"{error}; what it lacks is sent on from there")
            await _wait_back(peer)
    if sending.num_sent and (took_s := time.monotonic() - began) > _LONG_S:
        log("note", _story(peer.name, sending.num_sent, took_s))
    return sending.num_sent


async def _wait_back(peer: Peer) -> None:
    """Return once it answers. Raises StageLost if it does not for long: its name may be gone with its cable, too."""
    until = time.monotonic() + _BACK_S
    while True:
        try:
            await peer.hello(max(_PAUSE_S, until - time.monotonic()))
            return
        except StageLost:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(_PAUSE_S)


class Supply:
    """What may be sent: a model's small files, then the pieces of some layers."""

    def __init__(self, checkpoint: Checkpoint, request: LoadRequest) -> None:
        self.files = [checkpoint.folder / "config.json", *checkpoint.tokenizer_files()]
        self.pieces = pieces_of(checkpoint, request.start, request.end)
        self.nbytes = sum(path.stat().st_size for path in self.files) + sum(piece.nbytes for piece in self.pieces)
        self.digests = Digests(checkpoint)
        self._checkpoint = checkpoint

    def offer(self, what: Path | Piece, given_up: threading.Event) -> "Offer":
        """Read a file, or all of a piece, for its digest, unless that is known."""
        if isinstance(what, Path):
            announcement, origin = Announcement(file=what.name), Origin.of_file(what)
        else:
            announcement, origin = Announcement(place=what.place), Origin.of_piece(self._checkpoint, what)
        announcement.size, announcement.digest = origin.nbytes, self.digests.of(origin, given_up)
        return Offer(announcement, origin)


@dataclass(frozen=True)
class Offer:
    """A file that is ready to be sent."""

    announcement: Announcement
    origin: Origin


class Allowance:
    """How many bytes may be on their way: more would only queue, in front of other connections' signs of life."""

    def __init__(self) -> None:
        self.num_bytes = _LEAST_ALLOWANCE
        self._since = time.monotonic()
        self._num_come = 0

    def note(self, num_bytes: int) -> None:
        """So many have arrived. It follows what the link has taken lately, by half or by twice at most."""
        self._num_come += num_bytes
        if (took_s := time.monotonic() - self._since) >= _LOOK_S:
            per_moment = int(self._num_come / took_s * _MOMENT_S)
            wanted = min(max(per_moment, self.num_bytes // 2), 2 * self.num_bytes)
            self.num_bytes = min(max(wanted, _LEAST_ALLOWANCE), _MOST_ALLOWANCE)
            self._since, self._num_come = time.monotonic(), 0


class Sending:
    """What is sent to one worker, in one call or several."""

    def __init__(self, peer: Peer, request: LoadRequest, supply: Supply, report: Report) -> None:
        self.num_sent = 0
        self._peer = peer
        self._request = request
        self._supply = supply
        self._report = report
        self._total = 0  # bytes that the worker has not, as far as that is known
        self._allowance = Allowance()

    async def run(self) -> None:
        """One call, to its end. Raises as `feed`."""
        self._total = self.num_sent + self._supply.nbytes
        try:
            with self._peer.naming():
                async with self._peer.feeding() as call:
                    await self._say(call, Feeding(model=self._request).SerializeToString())
                    await self._heard(call)  # it takes what belongs to it
                    await self._send_all(call)
                    await call.done_writing()
                    await self._wait_ended(call)
        finally:
            await run_aside(self._supply.digests.keep)

    async def _send_all(self, call: Call) -> None:
        """One file after another; while one is sent, the next one's digest is made."""
        given_up = threading.Event()
        with ExitStack() as stack:
            digester, reader = CallThread("digests"), CallThread("reading")
            for thread in (digester, reader):
                stack.callback(thread.close, timeout_s=0)
            stack.callback(given_up.set)
            prepare = partial(self._supply.offer, given_up=given_up)
            whats = [*self._supply.files, *self._supply.pieces]
            ahead = digester.submit(partial(prepare, whats[0]))
            stack.callback(lambda: ahead.cancel())
            for following in (*whats[1:], None):
                offer = await _from_disk(ahead)
                if following is not None:
                    ahead = digester.submit(partial(prepare, following))
                await self._send(call, offer, reader)

    async def _send(self, call: Call, offer: Offer, reader: CallThread) -> None:
        """Announce a file, and send what the worker has not; no more at once than the link takes in a moment."""
        if offer.announcement.WhichOneof("what") == "place":
            self._request.digests[offer.announcement.place] = offer.announcement.digest  # as it is loaded afterwards
        await self._say(call, Feeding(announcement=offer.announcement).SerializeToString())
        at = held = await self._held(call, range(offer.origin.nbytes + 1))
        self._total -= held
        chunks = _chunks(offer.origin, held, has_checksums=self._peer.wire.has_checksums)
        read = partial(_batch, chunks)
        reading = reader.submit(read)
        try:
            while batch := await _from_disk(reading):
                reading = reader.submit(read)
                await self._say(call, *(message for _, message in batch))
                at = batch[-1][0]
                while at - held > (0 if at == offer.origin.nbytes else self._allowance.num_bytes):
                    before, held = held, await self._held(call, range(held, at + 1))
                    self._note(held - before)
        finally:
            reading.cancel()
            reader.submit(chunks.close)  # its files, once nobody reads them

    async def _held(self, call: Call, expected: range) -> int:
        """How many bytes of a file it has by now."""
        found = (await self._heard(call)).bytes
        if found not in expected:
            said = f"expected it to have {expected.start} to {expected.stop - 1} bytes of a file, it says {found}"
            raise FrameError(said, node=self._peer.name)
        return found

    def _note(self, num_bytes: int) -> None:
        """So many more have arrived."""
        self.num_sent += num_bytes
        self._allowance.note(num_bytes)
        self._report(LoadProgress(phase="feed", done=self.num_sent, total=self._total))

    async def _say(self, call: Call, *messages: bytes) -> None:
        """Raises StageLost if it takes none."""
        try:
            async with asyncio.timeout(_STALL_S):
                for message in messages:
                    await call.write(message)
        except asyncio.InvalidStateError:
            raise StageLost("ended the call by which it was sent its layers", node=self._peer.name) from None
        except TimeoutError:
            raise StageLost(f"took no bytes for {_STALL_S:.0f} s", node=self._peer.name) from None

    async def _heard(self, call: Call) -> Held:
        """Its next reply. Raises what it refuses with, or StageLost."""
        try:
            async with asyncio.timeout(_STALL_S):
                reply = await call.read()
        except TimeoutError:
            raise StageLost(f"did not say for {_STALL_S:.0f} s what it has", node=self._peer.name) from None
        if isinstance(reply, Held):
            if not reply.refused:
                return reply
            await call.done_writing()
            await self._wait_ended(call)
        raise StageLost("ended the call by which it was sent its layers", node=self._peer.name)

    async def _wait_ended(self, call: Call) -> None:
        """Read to the end of the call. Raises what the worker refuses with, or StageLost."""
        try:
            async with asyncio.timeout(_STALL_S):
                while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    pass
        except TimeoutError:
            raise StageLost(f"did not finish within {_STALL_S:.0f} s what it was sent", node=self._peer.name) from None


async def _from_disk(work: Awaitable[T]) -> T:
    """Its result. Raises ModelError where a file cannot be read."""
    try:
        return await work
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or 'the model'}: {error.strerror or error}") from error


def _chunks(origin: Origin, offset: int, *, has_checksums: bool) -> Chunks:
    """What follows this many bytes, as messages, each with how many bytes that makes."""
    for pieces in gathered(origin.blocks(offset, CHUNK_BYTES), CHUNK_BYTES):
        message = write_chunk(pieces, offset if has_checksums else None)
        offset += sum(map(len, pieces))
        yield offset, message


def _batch(chunks: Chunks) -> list[tuple[int, bytes]]:
    return list(islice(chunks, _BATCH))


def _story(name: str, num_bytes: int, took_s: float) -> str:
    speed = format_bytes(int(num_bytes / took_s))
    return f"worker {name}: was sent {format_bytes(num_bytes)} in {took_s:.1f} s, {speed}/s"
