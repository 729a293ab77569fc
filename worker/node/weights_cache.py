"""The cache of received weights: a folder of the user's cache with one folder per model.

A peer never chooses a path: a model's folder is named by a hash of its fingerprint, a piece by its place and digest,
and the other files have names from a short list. A file gets its name only after its digest was verified; until then
it is a `.part` file, which a later transfer continues. Everything here blocks: call it from threads.

Files are locked with flock(2), between processes and within one: readers share a file; a writer or remover owns it.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from blake3 import blake3

from protos.brigade_pb2 import Fingerprint, LoadRequest
from worker.errors import FrameError, ModelError
from worker.model.checkpoint import (
    MOST_CONFIG_BYTES,
    MOST_TOKENIZER_BYTES,
    Checkpoint,
    is_tokenizer_file,
    read_config,
    stamp_of,
)
from worker.model.describe import BACK, FRONT, layout_of, shard_tensors
from worker.model.draft_heads import head_kind
from worker.model.headers import ITEM_BITS, TensorInfo, begin_of_file, read_tensors
from worker.platform.files import free_bytes, sync_file
from worker.platform.installation import cache_folder
from worker.platform.text import format_bytes, printable

_PIECE = re.compile(r"(front|back|[0-9]{5,9})-([0-9a-f]{64})\.safetensors")
_PLACE_NAMES = {FRONT: "front", BACK: "back"}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME_FILE = "called"  # holds the name that coordinators give the model
_LONGEST_NAME = 200
READ_BYTES = 1 << 22
REREAD_S = 60.0  # a slow disk's partial file is cut here: its sender waits only twice as long for an answer
_RECEIVED_NS = 946_684_800 * 10**9  # the mtime of a verified file, 2000-01-01: any later write changes it
_LOCK_WAIT_S, _LOCK_PAUSE_S = 1.0, 0.01


# Pieces: the files that a shard is sent as


@dataclass(frozen=True)
class Piece:
    """The tensors of one place of a model: a layer, or what precedes or follows all layers.

    As a safetensors file of its own it has the same bytes on every node.
    """

    place: int
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def order(self) -> list[str]:
        """The tensors' names in file order: the widest numbers first, which aligns each tensor to its own width."""
        return sorted(self.tensors, key=lambda name: (-ITEM_BITS[self.tensors[name].dtype], name))

    @property
    def nbytes(self) -> int:
        """The size of its tensors, without the header."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def header(self) -> bytes:
        """The beginning of the file, which follows from names, dtypes and shapes alone."""
        infos = [(name, self.tensors[name]) for name in self.order]
        return begin_of_file((name, info.dtype, info.shape, info.nbytes) for name, info in infos)


def pieces_of(checkpoint: Checkpoint, start: int, end: int) -> list[Piece]:
    """Return the pieces of the shard [start, end), in order of place; none for an empty range."""
    tensors: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for name in shard_tensors(checkpoint, start, end) if start < end or head_kind(checkpoint) else ():
        tensors[layout_of(checkpoint).places[name]][name] = checkpoint.tensors[name]
    return [Piece(place, found) for place, found in sorted(tensors.items())]


def as_requested(checkpoint: Checkpoint, request: LoadRequest) -> Checkpoint:
    """Return the checkpoint whose last shard holds the embedding only if the request says so."""
    if request.end < request.num_layers or checkpoint.embeds_last == request.embeds_last:
        return checkpoint
    return replace(checkpoint, embeds_last=request.embeds_last)


def place_name(place: int) -> str:
    """Return a place as file names spell it: five digits or more, `front` or `back`."""
    return _PLACE_NAMES.get(place) or f"{place:05}"


def place_of(name: str) -> int:
    """Return the place that has this name."""
    return next((place for place, known in _PLACE_NAMES.items() if known == name), None) or int(name)


# Locks


class Lease:
    """Holds files that are in use: no process removes them until the lease is closed."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def add(self, path: Path) -> bool:
        """Hold this file too. Return False if it is gone or being removed.

        Wait a moment for its lock: a process may own the file just to see whether it is in use.
        """
        if path in self._files and _is_at(path, self._files[path]):
            return True
        until = time.monotonic() + _LOCK_WAIT_S
        while (file := _open_locked(path, os.O_RDONLY, fcntl.LOCK_SH)) is None:
            if not path.exists() or time.monotonic() >= until:
                return False
            time.sleep(_LOCK_PAUSE_S)
        if path in self._files:
            os.close(self._files[path])  # the file that this one has replaced
        self._files[path] = file
        return True

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        """Close it if a cancelled task has left it open."""
        self.close()


def open_alone(path: Path) -> int | None:
    """Open this file for this process alone, creating it if need be; None while another process has it."""
    return _open_locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)


def is_used(path: Path) -> bool:
    """Return whether a process holds this file; False if only another user may open it."""
    try:
        if (file := _open_locked(path, os.O_RDONLY, fcntl.LOCK_EX)) is None:
            return path.exists()
    except PermissionError:
        return False
    os.close(file)
    return False


def remove_unused(path: Path) -> bool:
    """Remove a file unless a process holds it, or another user owns it. Return whether it is gone."""
    with contextlib.suppress(PermissionError):
        if (file := _open_locked(path, os.O_RDONLY, fcntl.LOCK_EX)) is not None:
            try:
                path.unlink(missing_ok=True)
            finally:
                os.close(file)
    return not path.exists()


def _open_locked(path: Path, mode: int, lock: int) -> int | None:
    """Open and lock a file; None if it is missing, locked, or was replaced before it was locked."""
    try:
        file = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, lock | fcntl.LOCK_NB)
        if _is_at(path, file):
            return file
    os.close(file)
    return None


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


# Files


class PartialFile:
    """A file that is being received, and that no other process writes at the same time."""

    def __init__(self, path: Path, unfinished: Path, begin: bytes, nbytes: int, digest: str, file: FileIO) -> None:
        """Continue what an earlier transfer left, or start over if that does not begin with `begin`.

        Args:
            path: its final path.
            unfinished: its path until it is complete.
            begin: its first bytes, which are not sent.
            nbytes: the number of bytes that follow them.
            digest: BLAKE3 of the whole file, in hex.
            file: the file at `unfinished`, open and locked.
        """
        self.path = path
        self.nbytes = nbytes
        self._unfinished = unfinished
        self._digest = digest
        self._begin_bytes = len(begin)
        self._file = file
        self._hash = blake3()
        self._at = 0
        size = os.fstat(file.fileno()).st_size
        if size <= len(begin) + nbytes and file.read(len(begin)) == begin:
            self._hash.update(begin)
            self._at = len(begin)
            until = time.monotonic() + REREAD_S
            while block := file.read(READ_BYTES):
                self._hash.update(block)
                self._at += len(block)
                if time.monotonic() >= until:
                    file.truncate(self._at)
        is_damaged = self.offset == nbytes and self._hash.hexdigest() != digest  # by a power failure, before its end
        if not self._at or is_damaged:
            self._hash, self._at = blake3(), 0
            file.seek(0)
            file.truncate()
            self.write([begin])
        self._num_found = self.offset

    @property
    def offset(self) -> int:
        """The number of bytes that are here, not counting `begin`."""
        return self._at - self._begin_bytes

    @property
    def num_missing(self) -> int:
        """The number of bytes that this transfer may still write."""
        return 0 if self._file.closed else self.nbytes - self.offset

    def write(self, blocks: Sequence[bytes | memoryview]) -> None:
        """Append these blocks. Raises OSError, for example for a full disk."""
        for block in blocks:
            view = memoryview(block)
            while view:
                view = view[self._file.write(view) :]
            self._hash.update(block)
            self._at += len(block)

    def finish(self) -> None:
        """Give the complete file its name and release it.

        Raises:
            ModelError: its digest is wrong; it is removed. FrameError: likewise, but what was found here may be why.
        """
        try:
            if (found := self._hash.hexdigest()) != self._digest:
                self._unfinished.unlink(missing_ok=True)
                wrong = f"expected {self.path.name} with the digest {self._digest[:12]}, got one with {found[:12]}"
                if self._num_found:
                    raise FrameError(
                        f"{wrong}: what an earlier transfer left of it may be damaged, and is removed; start again"
                    )
                raise ModelError(f"{wrong}: the coordinator's file changed, or is not what was sent; start again")
            sync_file(self._file.fileno())  # or a power failure could keep the name and lose the bytes
            os.utime(self._unfinished, ns=(time.time_ns(), _RECEIVED_NS))
            self._unfinished.replace(self.path)
        finally:
            self.close()

    def close(self) -> None:
        """Release the file to other processes."""
        self._file.close()


@dataclass(frozen=True)
class Kept:
    """The cached weights of one model."""

    key: str
    name: str
    places: tuple[int, ...]
    nbytes: int
    used: float  # the last time, in seconds since 1970
    is_used: bool  # a worker of this machine has it loaded or is receiving it


class WeightsCache:
    """All received files of this machine."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        """`limit` is the most bytes that all files may take; None leaves a tenth of the disk free."""
        self.folder = folder or cache_folder() / "shards"
        self._limit = limit
        self._room = threading.Lock()
        self._begun = WeakSet[PartialFile]()  # there is room for what they miss

    def open(
        self, model: str, fingerprint: Fingerprint, known: Mapping[str, TensorInfo], digests: Mapping[int, str]
    ) -> Checkpoint:
        """Return the received part of a model.

        Args:
            known: the headers of the coordinator's copy; they stand for the tensors that are not here.
            digests: of the coordinator's pieces, by place. Pieces with other digests are ignored: they may differ.
        Raises:
            ModelError: nothing is here, or it belongs to another model.
        """
        folder = self._folder_of(fingerprint)
        tensors = dict(known)
        for path in (folder / _piece_name(place, digest) for place, digest in digests.items()):
            received: Mapping[str, TensorInfo] = {}
            if _is_as_received(path):
                with contextlib.suppress(ModelError):  # damaged: it is received again, as if it were missing
                    received = read_tensors(folder, path.name)
            for name, info in received.items():
                if name not in known or (info.dtype, info.shape) != (known[name].dtype, known[name].shape):
                    raise ModelError(f"{path} does not belong to this model; remove it by `brigade cache rm`")
                tensors[name] = info
        opened = stamp_of(folder, {info.file for info in tensors.values()})
        return Checkpoint(model, folder, read_config(folder), tensors, opened=opened)

    def begin_file(self, fingerprint: Fingerprint, name: str, nbytes: int, digest: str) -> PartialFile | Path | None:
        """Do as `begin_piece` for one of the model's small files. Raises ModelError if no such file is accepted."""
        most = MOST_CONFIG_BYTES if name == "config.json" else MOST_TOKENIZER_BYTES
        if not (name == "config.json" or is_tokenizer_file(name)) or nbytes > most:
            raise ModelError(f"expected config.json or a file of a tokenizer, got {name!r:.60} of {nbytes} bytes")
        path = self._folder_of(fingerprint) / name
        unfinished = path.with_name(f"{name}-{_require_digest(digest)}.part")
        return self._begin(path, unfinished, b"", nbytes, digest, partial(_has_digest, path, nbytes, digest))

    def begin_piece(self, fingerprint: Fingerprint, piece: Piece, digest: str) -> PartialFile | Path | None:
        """Return a piece to be continued, or its path if it is complete.

        Returns:
            None while another process of this machine receives it: try again.
        Raises:
            ModelError: there is no room for it.
        """
        path = self.piece_path(fingerprint, piece, digest)
        is_here = partial(_is_as_received, path, piece.header, piece.nbytes)
        found = self._begin(path, path.with_suffix(".part"), piece.header, piece.nbytes, digest, is_here)
        if isinstance(found, Path):
            _touch(found)
        return found

    def partial_bytes(self, fingerprint: Fingerprint, piece: Piece, digest: str) -> int:
        """Return how many bytes of an incomplete piece are here."""
        try:
            found = self.piece_path(fingerprint, piece, digest).with_suffix(".part").stat().st_size
        except FileNotFoundError:
            return 0
        return max(0, found - len(piece.header))

    def name_model(self, fingerprint: Fingerprint, name: str) -> None:
        """Record the model's name for the user."""
        (self._folder_of(fingerprint) / _NAME_FILE).write_text(printable(name, _LONGEST_NAME), encoding="utf-8")

    def lease(self, checkpoint: Checkpoint, names: Iterable[str]) -> Lease:
        """Hold the files of these tensors that are in this cache, and mark them as used now.

        Raises:
            ModelError: one is gone.
        """
        lease = Lease()
        if checkpoint.folder.parent == self.folder:
            for path in (checkpoint.folder / file for file in checkpoint.files_of(names)):
                if not lease.add(path):
                    lease.close()
                    raise ModelError(f"{path} was removed just now; start again")
                _touch(path)
        return lease

    def kept(self) -> list[Kept]:
        """Return what is kept of each model, the most recently used first."""
        return sorted(map(_kept, self._folders()), key=lambda kept: -kept.used)

    def remove(self, key: str) -> bool:
        """Remove the unused files of a model, but for those of another user. Return whether nothing of it is left."""
        folder = self.folder / key
        if folder.is_dir() and all([remove_unused(path) for path in _files_in(folder)]):
            _remove_rest(folder)
        return not folder.exists()

    def require_room(self, nbytes: int) -> None:
        """Raise ModelError if this many bytes do not fit even into an empty cache."""
        most = self._free_bytes() + self._num_bytes()
        if nbytes > most:
            raise self._refusal(nbytes, most)

    def make_room(self, nbytes: int, own: Path | None = None) -> None:
        """Evict the least recently used pieces until there is room, and a model's small files with its last piece.

        What this process is receiving has its room already.

        Args:
            own: the folder whose small files stay, since its pieces come next.
        Raises:
            ModelError: that is not enough.
        """
        free = self._free_bytes() - sum(each.num_missing for each in self._begun)
        for path, stat in sorted(self._evictable(own).items(), key=lambda item: item[1].st_atime_ns):
            if free >= nbytes:
                return
            if remove_unused(path):
                free += stat.st_size
            if path.parent != own and not _files_in(path.parent):
                free += _remove_rest(path.parent)
        if free < nbytes:
            raise self._refusal(nbytes, free)

    def _begin(
        self, path: Path, unfinished: Path, begin: bytes, nbytes: int, digest: str, is_here: Callable[[], bool]
    ) -> PartialFile | Path | None:
        if is_here():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_alone(unfinished)
        if descriptor is None:
            return None
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(FileIO(descriptor, "r+"))
            if is_here():  # another process has finished it since the first look
                unfinished.unlink(missing_ok=True)
                return None
            partial_file = PartialFile(path, unfinished, begin, nbytes, digest, file)
            with self._room:
                self.make_room(partial_file.num_missing, path.parent)
                self._begun.add(partial_file)
            undo.pop_all()
        return partial_file

    def _free_bytes(self) -> int:
        """Return how many more bytes fit in here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free = free_bytes(self.folder)
        if self._limit is not None:
            free = min(free, self._limit - self._num_bytes())
        return free

    def _refusal(self, nbytes: int, most: int) -> ModelError:
        limit = "its disk is nearly full"
        if self._limit is not None:
            limit += f", or its `pull_limit` of {format_bytes(self._limit)} is reached"
        return ModelError(
            f"has room for {format_bytes(max(0, most))} of received layers, needs {format_bytes(nbytes)}: {limit}; "
            "make room there (`brigade cache ls` shows what it keeps), or give it fewer layers"
        )

    def _folder_of(self, fingerprint: Fingerprint) -> Path:
        parts = (fingerprint.config, fingerprint.tokenizer, fingerprint.tensors)
        return self.folder / hashlib.sha256("".join(map(_require_digest, parts)).encode()).hexdigest()[:32]

    def piece_path(self, fingerprint: Fingerprint, piece: Piece, digest: str) -> Path:
        """Return where a piece is once it is complete."""
        return self._folder_of(fingerprint) / _piece_name(piece.place, digest)

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []

    def _num_bytes(self) -> int:
        """Return what all files take."""
        return sum(stat.st_size for folder in self._folders() for stat in _files_in(folder, "*").values())

    def _evictable(self, own: Path | None) -> dict[Path, os.stat_result]:
        """Return all pieces, and the small files of models that have none; not those of the folder `own`."""
        found: dict[Path, os.stat_result] = {}
        for folder in self._folders():
            found |= _files_in(folder) or (_files_in(folder, "*") if folder != own else {})
        return found


def _kept(folder: Path) -> Kept:
    name, pieces, files = "?", _files_in(folder), _files_in(folder, "*")
    with contextlib.suppress(FileNotFoundError, PermissionError):
        name = (folder / _NAME_FILE).read_text(encoding="utf-8")
    return Kept(
        key=folder.name,
        name=name,
        places=tuple(sorted({place_of(found[1]) for path in pieces if (found := _PIECE.fullmatch(path.name))})),
        nbytes=sum(stat.st_size for stat in files.values()),
        used=max((stat.st_atime_ns / 1e9 for stat in (pieces or files).values()), default=0.0),
        is_used=any(map(is_used, files)),
    )


def _remove_rest(folder: Path) -> int:
    """Remove a folder without pieces, but for files in use; return the number of bytes."""
    found = {path: stat.st_size for path, stat in _files_in(folder, "*").items() if remove_unused(path)}
    with contextlib.suppress(OSError):  # another process has just begun to receive into it
        folder.rmdir()
    return sum(found.values())


def _files_in(folder: Path, *patterns: str) -> dict[Path, os.stat_result]:
    """Return a model's files that are not removed meanwhile, by default its pieces, complete or partial."""
    found = {}
    for path in (path for pattern in patterns or ("*.safetensors", "*.part") for path in folder.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.stat()
    return found


def _is_as_received(path: Path, begin: bytes = b"", nbytes: int | None = None) -> bool:
    """Return whether the file is unchanged since it was verified, and is `begin` plus `nbytes` bytes if given."""
    try:
        stat = path.stat()
        if stat.st_mtime_ns != _RECEIVED_NS or nbytes not in (None, stat.st_size - len(begin)):
            return False
        with path.open("rb") as file:
            return file.read(len(begin)) == begin
    except (FileNotFoundError, NotADirectoryError):
        return False


def _has_digest(path: Path, nbytes: int, digest: str) -> bool:
    return path.exists() and path.stat().st_size == nbytes and blake3().update_mmap(path).hexdigest() == digest


def _touch(path: Path) -> None:
    """Mark a file as used now, unless another user owns it. Its mtime stays: the contents are unchanged."""
    with contextlib.suppress(PermissionError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _piece_name(place: int, digest: str) -> str:
    return f"{place_name(place)}-{_require_digest(digest)}.safetensors"


def _require_digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ModelError(f"expected a digest in hex, got {text!r:.80}")
    return text
