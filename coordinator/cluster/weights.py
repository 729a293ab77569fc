"""Pushing weights: a worker that lacks the model is sent the tensors of its layers, read from this node's files.

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
from worker.node.framing import CHUNK_BYTES, write_chunk
from worker.node.loading import fetch
from worker.node.weights_pieces import DigestCache, Origin, Piece, gather, pieces_of
from worker.node.weights_receive import SAY_BYTES
from worker.platform.text import format_bytes
from worker.platform.threads import CallThread, run_in_thread

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


async def load_pushing(
    peer: Peer, request: LoadRequest, checkpoint: Checkpoint, report: Report, *, feeds: bool
) -> None:
    """Have a worker load a shard; push what it lacks of it first, if this node `feeds`.

    Raises:
        BrigadeError: as the worker refuses. StageLost: it is lost, or stalls.
    """
    try:
        return await peer.load(request, report)
    except ModelLacking as lack:
        if not feeds:
            raise ModelLacking(f"{lack.message}; this node sends it none: its `pull` says so", node=peer.name) from lack
        log("note", f"worker {peer.name}: {lack.message.partition(';')[0]}: it is sent what it lacks")
    await push_weights(peer, request, checkpoint, report)
    await peer.load(request, report)


async def push_weights(peer: Peer, request: LoadRequest, checkpoint: Checkpoint, report: Report) -> int:
    """Send a worker what it lacks of the requested layers; after a cut again, as long as each try gets bytes through.

    Returns:
        How many bytes were sent.
    Raises:
        BrigadeError: as `load_pushing`.
    """
    began = time.monotonic()
    supply = await _from_disk(run_in_thread(partial(Supply, checkpoint, request)))
    await fetch(checkpoint, [name for piece in supply.pieces for name in piece.order], report)
    push = Push(peer, request, supply, report)
    while True:
        before = push.num_sent
        try:
            await push.run()
            break
        except (StageLost, FrameError) as error:
            if push.num_sent == before:
                raise
            log("note", f"{error}; what it lacks is sent on from there")
            await _wait_back(peer)
    if push.num_sent and (took_s := time.monotonic() - began) > _LONG_S:
        sent, speed = (format_bytes(int(n)) for n in (push.num_sent, push.num_sent / took_s))
        log("note", f"worker {peer.name}: was sent {sent} in {took_s:.1f} s, {speed}/s")
    return push.num_sent


async def _wait_back(peer: Peer) -> None:
    """Return once the worker answers again: its name may be gone with its cable for a while. Raises StageLost."""
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
    """The files that may be sent: a model's small ones, then the pieces of some layers."""

    def __init__(self, checkpoint: Checkpoint, request: LoadRequest) -> None:
        self.files = [checkpoint.folder / "config.json", *checkpoint.tokenizer_files()]
        self.pieces = pieces_of(checkpoint, request.start, request.end)
        self.nbytes = sum(path.stat().st_size for path in self.files) + sum(piece.nbytes for piece in self.pieces)
        self.digests = DigestCache(checkpoint)
        self._checkpoint = checkpoint

    def offer(self, what: Path | Piece, given_up: threading.Event) -> "WeightsOffer":
        """Read a file, or all of a piece, for its digest, unless that is known."""
        if isinstance(what, Path):
            announcement, origin = Announcement(file=what.name), Origin.of_file(what)
        else:
            announcement, origin = Announcement(place=what.place), Origin.of_piece(self._checkpoint, what)
        announcement.size, announcement.digest = origin.nbytes, self.digests.of(origin, given_up)
        return WeightsOffer(announcement, origin)


@dataclass(frozen=True)
class WeightsOffer:
    """A file that is ready to be sent."""

    announcement: Announcement
    origin: Origin


class Allowance:
    """How many bytes may be on their way: more would only queue up, in front of other connections' signs of life."""

    def __init__(self) -> None:
        self.num_bytes = _LEAST_ALLOWANCE
        self._since = time.monotonic()
        self._num_come = 0

    def note(self, num_bytes: int) -> None:
        """Note that so many have arrived; the allowance follows, by half or by twice at most."""
        self._num_come += num_bytes
        if (took_s := time.monotonic() - self._since) >= _LOOK_S:
            per_moment = int(self._num_come / took_s * _MOMENT_S)
            wanted = min(max(per_moment, self.num_bytes // 2), 2 * self.num_bytes)
            self.num_bytes = min(max(wanted, _LEAST_ALLOWANCE), _MOST_ALLOWANCE)
            self._since, self._num_come = time.monotonic(), 0


class Push:
    """The weights that are sent to one worker, in one call or several."""

    def __init__(self, peer: Peer, request: LoadRequest, supply: Supply, report: Report) -> None:
        self.num_sent = 0
        self._peer = peer
        self._request = request
        self._supply = supply
        self._report = report
        self._total = 0  # bytes that the worker has not, as far as that is known
        self._allowance = Allowance()

    async def run(self) -> None:
        """Make one call, to its end. Raises as `push_weights`."""
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
            await run_in_thread(self._supply.digests.keep)

    async def _send_all(self, call: Call) -> None:
        """Send one file after another; while one is sent, the next one's digest is made."""
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

    async def _send(self, call: Call, offer: WeightsOffer, reader: CallThread) -> None:
        """Announce a file, and send what the worker has not; no more at once than the link takes in a moment."""
        if offer.announcement.WhichOneof("what") == "place":
            self._request.digests[offer.announcement.place] = offer.announcement.digest  # as it is loaded afterwards
        await self._say(call, Feeding(announcement=offer.announcement).SerializeToString())
        at = held = await self._held(call, range(offer.origin.nbytes + 1))
        self._total -= held
        chunks = _chunks(offer.origin, held, has_checksums=self._peer.wire.has_checksums)

        def read() -> list[tuple[int, bytes]]:
            return list(islice(chunks, _BATCH))

        reading = reader.submit(read)
        try:
            while batch := await _from_disk(reading):
                reading = reader.submit(read)
                await self._say(call, *(message for _, message in batch))
                at = batch[-1][0]
                while at - held > (0 if at == offer.origin.nbytes else self._allowance.num_bytes):
                    before, held = held, await self._held(call, range(held, at + 1))
                    self.num_sent += held - before
                    self._allowance.note(held - before)
                    self._report(LoadProgress(phase="feed", done=self.num_sent, total=self._total))
        finally:
            reading.cancel()
            reader.submit(chunks.close)  # its files, once they are no longer read

    async def _held(self, call: Call, expected: range) -> int:
        """Return how many bytes of a file the worker says that it has."""
        found = (await self._heard(call)).bytes
        if found not in expected:
            said = f"expected it to have {expected.start} to {expected.stop - 1} bytes of a file, it says {found}"
            raise FrameError(said, node=self._peer.name)
        return found

    async def _say(self, call: Call, *messages: bytes) -> None:
        """Write these. Raises StageLost if the worker takes nothing for long."""
        try:
            async with asyncio.timeout(_STALL_S):
                for message in messages:
                    await call.write(message)
        except asyncio.InvalidStateError:
            raise StageLost("ended the call by which it was sent its layers", node=self._peer.name) from None
        except TimeoutError:
            raise StageLost(f"took no bytes for {_STALL_S:.0f} s", node=self._peer.name) from None

    async def _heard(self, call: Call) -> Held:
        """Return the worker's next reply. Raises what it refuses with, or StageLost."""
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
    """Return the result. Raises ModelError where a file cannot be read."""
    try:
        return await work
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or 'the model'}: {error.strerror or error}") from error


def _chunks(origin: Origin, offset: int, *, has_checksums: bool) -> Chunks:
    """Yield what follows this many bytes as messages, each with the offset behind it."""
    for pieces in gather(origin.blocks(offset, CHUNK_BYTES), CHUNK_BYTES):
        message = write_chunk(pieces, offset if has_checksums else None)
        offset += sum(map(len, pieces))
        yield offset, message
