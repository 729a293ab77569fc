"""Prefixes on this node's disk: the rows of kept slots, in pieces, for later sessions that begin with the same tokens.

A piece is a file in one folder, which only its user can read. Its name, a keyed hash of all that its rows depend on,
comes from the coordinator. The file's name also tells which tokens and layers it is of, so a listing is an index.
A file begins with the piece's name and a digest of all that follows: a segment of each cache. A stage whose layers are
in several files reads them all, and files of other nodes can be taken in.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import struct
import time
from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from google.protobuf.message import DecodeError

from protos.brigade_pb2 import FilePart, Piece, PrefixesReply, PrefixesRequest, Segment
from worker.compute.header import MOST_UPCOMING, PIECE_NAME_BYTES
from worker.errors import ConfigError, FrameError, PrefixLost
from worker.memory.slot_caches import CacheSegment
from worker.node.hop import MOST_TENSORS, bytes_of, can_pack, segment_header, unpack_segments
from worker.node.rpc_errors import next_within
from worker.platform.files import free_bytes, private_file
from worker.platform.installation import cache_folder
from worker.platform.text import format_bytes

_log = logging.getLogger("brigade.prefixes")

PackedSegment = tuple[Segment, memoryview]

_FILE = re.compile(r"([0-9a-f]{32})-([0-9]{1,8})-([0-9]{1,8})-([0-9]{1,5})-([0-9]{1,5})\.rows")
_MAGIC = b"brigade prefix 1"
_SECRET, _SECRET_BYTES = "secret", 32
_LENGTH_BYTES = struct.calcsize("<IQ")  # of a segment's header and of its data
_NUM_THREADS = 4
_WRITE_S = 0.5  # for one of the pieces that wait, before the next one
LOCK_S = 2.0  # for the writes of others; a process may be stopped in the middle of its own
_READ_S = 2.0  # for a piece, from when it is needed
_MOST_WAITING = 2  # pieces in memory that the disk has not taken yet; a further one waits
PART_S = 60.0  # for the next part
_PART_BYTES = 1 << 20  # of a message: a larger one would hold up tokens
MOST_MOVED_BYTES = 1 << 30  # of a piece that goes to another node, which is in memory then
_being_written: set[Future[None]] = set()  # by all stores of this process
_TOKEN_S = 0.01  # by which the next token of a prefix counts as used earlier
_ABANDONED_S = 600.0  # after which an unfinished file is that of a process that has ended


@dataclass(frozen=True)
class PieceFile:
    """A piece on disk, with its layers."""

    path: Path
    piece: Piece
    nbytes: int
    used: float  # when it was last written or read, seconds since 1970


def prefix_folder() -> Path:
    return cache_folder() / "prompts"


def naming_secret(folder: Path | None = None) -> bytes:
    """Return the key with which this user's coordinators name pieces; make one if there is none, or a damaged one.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    path = (folder or prefix_folder()) / _SECRET
    try:
        _make_private(path.parent)
        if not path.exists() or path.stat().st_size != _SECRET_BYTES:
            with private_file(path) as file:
                file.write(secrets.token_bytes(_SECRET_BYTES))
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot keep prefixes on disk: {error}") from error


def _make_private(folder: Path) -> None:
    """Make the folder, for its user only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def piece_files(folder: Path) -> list[PieceFile]:
    """Return all pieces of a folder, the least recently used first."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if (piece := piece_named(entry.name)) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):  # removed meanwhile
                    stat = entry.stat(follow_symlinks=False)
                    found.append(PieceFile(Path(entry.path), piece, stat.st_size, stat.st_mtime))
    return sorted(found, key=lambda file: file.used)


def piece_named(name: str) -> Piece | None:
    """Return the piece whose file has this name; None if none has."""
    if (match := _FILE.fullmatch(name)) is None:
        return None
    begin, end, first, last = map(int, match.groups()[1:])
    return Piece(name=bytes.fromhex(match[1]), begin=begin, end=end, first_layer=first, last_layer=last)


def list_prefixes(request: PrefixesRequest, folder: Path | None = None) -> PrefixesReply:
    """Return the pieces of this node once what this process is writing is there; remove them if the request says so."""
    wait(list(_being_written), _WRITE_S * _MOST_WAITING)
    where = folder or prefix_folder()
    files = piece_files(where)
    named = set(request.remove_named)  # the secret stays, by which a running coordinator goes on
    _remove(file.path for file in files if request.remove or file.piece.name in named)
    if request.remove and where.exists():
        with _locked(where) as is_locked:  # then no process writes
            _remove(where.glob(".*.rows.*") if is_locked else ())
    used = int(max((file.used for file in files), default=0))
    return PrefixesReply(pieces=[file.piece for file in files], bytes=sum(file.nbytes for file in files), used=used)


def read_piece(piece: Piece, folder: Path | None = None) -> bytes:
    """Return the content of the file of a piece with these layers. Raises PrefixLost if it cannot be read."""
    try:
        return ((folder or prefix_folder()) / _file_name(piece)).read_bytes()
    except OSError as error:
        raise PrefixLost(f"expected a piece of a prefix on this node's disk: {error}") from error


def file_parts(piece: Piece, content: bytes) -> Iterator[FilePart]:
    """Yield the messages that carry the file of a piece."""
    for at in range(0, len(content), _PART_BYTES):
        yield FilePart(piece=None if at else piece, data=content[at : at + _PART_BYTES])


async def join_parts(parts: AsyncIterable[FilePart]) -> tuple[Piece, bytes]:
    """Return the piece and the content of its file. Raises FrameError if it is too large, or does not come."""
    piece, num_bytes = Piece(), 0
    found: list[bytes] = []
    following = aiter(parts)
    while (part := await next_within(PART_S, following, "a piece of a prefix")) is not None:
        piece = piece if found else part.piece
        found.append(part.data)
        num_bytes += len(part.data)
        if num_bytes > MOST_MOVED_BYTES:
            raise FrameError(f"expected a piece of a prefix of at most {MOST_MOVED_BYTES} bytes, got more")
    return piece, b"".join(found)


class PrefixStore:
    """The pieces of one stage's layers. A thread writes them, behind the steps; reading blocks its caller."""

    def __init__(self, start: int, stop: int, limit: int, folder: Path | None = None) -> None:
        """
        Args:
            start, stop: the layers [start, stop) of the stage.
            limit: the most bytes that all pieces of the folder may take.
        """
        self._folder = folder or prefix_folder()
        self._start, self._stop, self._limit = start, stop, limit
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "prefixes")  # a process ends once they have written everything
        self._writing: list[Future[None]] = []
        self.ahead: dict[bytes, Future[list[PackedSegment]]] = {}  # pieces that are read ahead
        self._can_write = True
        self._lacked_room = False

    def put(self, piece: Piece, segments: Sequence[CacheSegment]) -> bool:
        """Have a piece written; return whether it will be, or the disk is too slow for it or takes nothing more.

        Call on the MLX thread; the arrays are copied.
        """
        is_known = all(can_pack(array) for segment in segments for array in segment.arrays)
        if len(self._writing) >= _MOST_WAITING:
            wait(self._writing, _WRITE_S, FIRST_COMPLETED)
        self._writing = [each for each in self._writing if not each.done()]
        if not is_known or not self._can_write or len(self._writing) >= _MOST_WAITING:
            return False
        packed = [(segment_header(each), memoryview(b"".join(map(bytes_of, each.arrays)))) for each in segments]
        writing = self.threads.submit(self._try_write, piece, packed)
        self._writing.append(writing)
        _being_written.add(writing)
        writing.add_done_callback(_being_written.discard)
        return True

    def read(self, name: bytes, upcoming: Sequence[bytes] = ()) -> list[CacheSegment]:
        """Return a piece's segments and count it as used; begin to read others. Call on the MLX thread.

        Raises:
            PrefixLost: it is not here, its disk is too slow, or it is damaged; then it is removed.
        """
        for each in (*upcoming, name):
            loading = self.ahead.pop(each, None)
            if loading is None or (loading.done() and loading.exception()):  # it may have come since
                loading = self.threads.submit(self._load, each)
            self.ahead[each] = loading
        while len(self.ahead) > 1 + MOST_UPCOMING:  # of sessions that have ended, or that take turns with this one
            self.ahead.pop(next(iter(self.ahead)))
        try:
            packed = self.ahead.pop(name).result(_READ_S)
            return [each for header, data in packed for each in unpack_segments([header], data)]
        except TimeoutError:
            raise PrefixLost(f"expected a piece of a prefix within {_READ_S:g} s: the disk is too slow") from None
        except FrameError as error:
            self.discard(name)
            raise PrefixLost(f"expected segments of a cache: {error}") from error

    def discard(self, name: bytes) -> None:
        """Remove a piece that does not fit the caches."""
        _remove(path for *_, path in self._places(name))

    def add(self, piece: Piece, content: bytes) -> None:
        """Keep the file of another node. Any thread may call it.

        Raises:
            FrameError: it is damaged, or of another piece. PrefixLost: there is no room for it.
        """
        if len(piece.name) != PIECE_NAME_BYTES or not _FILE.fullmatch(_file_name(piece)):
            raise FrameError("expected a piece of a prefix, got one whose tokens and layers no piece can have")
        _segments_of(memoryview(content), piece.name)
        try:
            if not self._write_file(piece, [content]):
                raise PrefixLost("expected room for a piece of a prefix on this node's disk")
        except OSError as error:
            raise PrefixLost(f"cannot keep a piece of a prefix from another node: {error}") from error

    def close(self) -> None:
        """Take no more pieces; those that wait are still written."""
        self.threads.shutdown(wait=False)

    @property
    def _layers(self) -> str:
        return f"[{self._start}, {self._stop})"

    def _places(self, name: bytes) -> list[tuple[int, int, Path]]:
        """Return the layers [first, last) of a piece's files with layers of this stage, and their paths."""
        found = [(path, _FILE.fullmatch(path.name)) for path in self._folder.glob(f"{name.hex()}-*.rows")]
        places = [(int(match[4]), int(match[5]), path) for path, match in found if match]
        return [place for place in places if place[0] < self._stop and self._start < place[1]]

    def _load(self, name: bytes) -> list[PackedSegment]:
        """Return a piece's segments of all layers of this stage, and perhaps of others. Raises PrefixLost as `read`."""
        found: list[PackedSegment] = []
        places, at = self._places(name), self._start  # the first layer that is missing
        while at < self._stop:
            place = max((each for each in places if each[0] <= at < each[1]), key=lambda each: each[1], default=None)
            if place is None:
                raise PrefixLost(
                    f"expected a piece of a prefix on this node's disk, found none of layers {self._layers}"
                )
            places.remove(place)
            *_, last, path = place
            try:
                found += _segments_of(memoryview(path.read_bytes()), name)
                _touch(path)
                at = last
            except FileNotFoundError:
                continue
            except OSError as error:
                _log.warning("cannot read a piece of a prefix: %s", error)
            except FrameError as error:
                _log.warning("removed %s, a damaged piece of a prefix: %s", path.name, error)
                with contextlib.suppress(OSError):
                    path.unlink()
        return found

    def _try_write(self, piece: Piece, packed: Sequence[PackedSegment]) -> None:
        """Write a piece, unless an earlier one could not be written."""
        try:
            if self._can_write:
                self._write(piece, packed)
        except OSError as error:
            self._can_write = False
            _log.warning("cannot keep prefixes on disk any more: %s", error)

    def _write(self, piece: Piece, packed: Sequence[PackedSegment]) -> None:
        blocks = [block for segment, data in packed for block in (*_lengths(segment, data), data)]
        own = Piece(name=piece.name, begin=piece.begin, end=piece.end, first_layer=self._start, last_layer=self._stop)
        self._write_file(own, (_MAGIC + piece.name + _digest(blocks), *blocks))

    def _write_file(self, piece: Piece, blocks: Sequence[bytes | memoryview]) -> bool:
        """Write the file of a piece; return False if there is no room, or others use the folder for too long."""
        _make_private(self._folder)
        with _locked(self._folder) as is_locked:
            if has_room := is_locked and self._make_room(num_bytes := sum(map(len, blocks)), piece.end):
                path = self._folder / _file_name(piece)
                with private_file(path) as file:
                    file.writelines(blocks)
                _touch(path)
            elif is_locked and not self._lacked_room:
                self._lacked_room = True  # once is enough
                _log.warning(
                    "kept nothing of a prompt: expected room for %s within `cache_disk` and the disk's free space",
                    format_bytes(num_bytes),
                )
        return has_room

    def _make_room(self, nbytes: int, end: int) -> bool:
        """Remove pieces used before a new one with this end, the least recently used first; return whether it fits."""
        _remove(filter(_is_abandoned, self._folder.glob(".*")))
        files = piece_files(self._folder)
        within_limit = self._limit - sum(file.nbytes for file in files)
        room = min(within_limit, free_bytes(self._folder))
        now = time.time()  # a date that is ahead of it is of a clock that was set back
        older = [file for file in files if file.used < _used_now(end) or file.used > now + 1]  # not its own beginning
        fits = room + sum(file.nbytes for file in older) >= nbytes
        if not fits:  # then a limit that was lowered holds all the same
            older, room, nbytes = files, within_limit, 0
        for file in older:
            if room >= nbytes:
                break
            file.path.unlink(missing_ok=True)
            room += file.nbytes
        return fits


def _file_name(piece: Piece) -> str:
    return f"{piece.name.hex()}-{piece.begin}-{piece.end}-{piece.first_layer}-{piece.last_layer}.rows"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Keep other writers of the folder out, in all processes: two would take the same room. False: it is in use."""
    descriptor, until = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_S
    try:
        while not (is_locked := _try_lock(descriptor)) and time.monotonic() < until:
            time.sleep(0.02)
        yield is_locked
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network disks have no locks
        return True
    return True


def _used_now(end: int) -> float:
    """Return when a piece counts as used if that is now: the end of a prefix is useless without its beginning."""
    return time.time() - end * _TOKEN_S


def _touch(path: Path) -> None:
    """Count a piece as used now, unless it was removed meanwhile."""
    at = _used_now(int(path.name.split("-")[2]))
    with contextlib.suppress(FileNotFoundError):
        os.utime(path, (at, at))


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_abandoned(unfinished: Path) -> bool:
    """Return whether nobody writes this file any more; another thread or process may have renamed it."""
    try:
        return abs(time.time() - unfinished.stat().st_mtime) > _ABANDONED_S
    except OSError:
        return False


def _lengths(segment: Segment, data: memoryview) -> tuple[bytes, bytes]:
    """Return what precedes the data of a segment in a file."""
    header = segment.SerializeToString()
    return struct.pack("<IQ", len(header), len(data)), header


def _digest(blocks: Iterable[bytes | memoryview]) -> bytes:
    digest = blake3()
    for block in blocks:
        digest.update(block)
    return digest.digest()


def _segments_of(content: memoryview, name: bytes) -> list[PackedSegment]:
    """Return the segments of a piece's file. Raises FrameError unless it is whole, and the file of this piece.

    The digest tells of damage only: who sends a file can make one that fits.
    """
    at = len(_MAGIC) + len(name)
    if content[:at] != _MAGIC + name:
        raise FrameError("expected the file of this piece, got another one")
    digest, rest = content[at : at + blake3.digest_size], content[at + blake3.digest_size :]
    if digest != _digest([rest]):
        raise FrameError("expected a piece as it was written, got one with another digest")
    found, at, count = [], 0, 0
    try:
        while at < len(rest):
            num_header, num_data = struct.unpack_from("<IQ", rest, at)
            at += _LENGTH_BYTES
            header = Segment.FromString(bytes(rest[at : at + num_header]))
            if (count := count + 1 + len(header.tensors)) > MOST_TENSORS:
                raise FrameError(f"expected at most {MOST_TENSORS} segments and tensors in a piece, got more")
            found.append((header, rest[at + num_header : at + num_header + num_data]))
            at += num_header + num_data
    except (struct.error, DecodeError) as error:
        raise FrameError("expected segments in the file of a piece, got something else") from error
    return found
