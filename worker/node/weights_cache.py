"""The cache of received weights: a folder of this user's cache with a folder per model.

A peer decides nothing about paths here: a model's folder is called by a hash of its fingerprint, its pieces by place
and digest, and other files have names from a short list. A file has its name only once its digest was found right;
until then it is a `.part`, which is gone on with after a cut. All of this blocks: it is for threads beside the event
loop.
"""

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from blake3 import blake3

from protos.brigade_pb2 import Fingerprint
from worker.errors import ModelError
from worker.model.checkpoint import MOST_CONFIG_BYTES, MOST_TOKENIZER_BYTES, Checkpoint, is_tokenizer_file, read_config
from worker.model.headers import TensorInfo, read_tensors
from worker.node.file_locks import Lease, is_used, open_alone, remove_unused
from worker.node.weights_pieces import Piece, place_name, place_of
from worker.platform.installation import cache_folder
from worker.platform.text import format_bytes, printable

_PIECE = re.compile(r"(front|back|[0-9]{5,9})-([0-9a-f]{64})\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SMALL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NAME_FILE = "called"  # has what coordinators call the model
_LONGEST_NAME = 200
_SPARE = 10  # one part in so many of the disk stays free, whatever the limit
_READ_BYTES = 1 << 22
_RECEIVED_NS = 946_684_800 * 10**9  # a whole file's last change, 2000-01-01: any later write gives it another one


def weights_folder() -> Path:
    return cache_folder() / "shards"


@dataclass(frozen=True)
class Entry:
    """A file that can be received again."""

    path: Path
    size: int
    used: float  # seconds since 1970


@dataclass(frozen=True)
class Kept:
    """What the cache has of one model."""

    key: str
    name: str
    places: tuple[int, ...]
    nbytes: int
    used: float  # last, seconds since 1970
    is_used: bool  # a worker of this machine has it loaded, or receives it


class PartialFile:
    """A file on its way to the disk, which no other process writes at the same time."""

    def __init__(self, path: Path, unfinished: Path, begin: bytes, nbytes: int, digest: str, file: FileIO) -> None:
        """Go on behind what came before; begin anew if that is not the beginning of this file.

        Args:
            path: where it is to be.
            unfinished: where it is until it is whole.
            begin: its first bytes, which are not sent.
            nbytes: of what follows them.
            digest: BLAKE3 of both, in hex.
            file: what is at `unfinished`, open and locked.
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
            while block := file.read(_READ_BYTES):
                self._hash.update(block)
                self._at += len(block)
        else:
            file.seek(0)
            file.truncate()
            self.write([begin])

    @property
    def offset(self) -> int:
        """How many bytes are here, beside the beginning that this node makes itself."""
        return self._at - self._begin_bytes

    def write(self, blocks: Sequence[bytes | memoryview]) -> None:
        """Append these. Raises OSError, for a full disk say."""
        for block in blocks:
            view = memoryview(block)
            while view:
                view = view[self._file.write(view) :]
            self._hash.update(block)
            self._at += len(block)

    def finish(self) -> None:
        """Give the whole file its name.

        Raises:
            ModelError: it is not what was announced; it is removed.
        """
        if (found := self._hash.hexdigest()) != self._digest:
            self._unfinished.unlink(missing_ok=True)
            raise ModelError(
                f"expected {self.path.name} with the digest {self._digest[:12]}, got one with {found[:12]}: the "
                "coordinator's file changed, or is not what was sent; start again"
            )
        os.fsync(self._file.fileno())  # or after a power failure the name could be there and the bytes not
        os.utime(self._unfinished, ns=(time.time_ns(), _RECEIVED_NS))
        self._unfinished.replace(self.path)

    def hand_over(self, lease: Lease) -> None:
        """Hold the finished file by the lease too. Raises ModelError if another process has removed it just now."""
        if not lease.take_over(self.path, os.dup(self._file.fileno())):
            raise ModelError(f"{self.path} was removed just as it had come; start again")

    def close(self) -> None:
        """Let other processes have the file."""
        self._file.close()


class WeightsCache:
    """All received files on this machine."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        """`limit` is how many bytes all files may take; None leaves a tenth of the disk free."""
        self.folder = folder or weights_folder()
        self._limit = limit

    def open(
        self, model: str, fingerprint: Fingerprint, known: Mapping[str, TensorInfo], digests: Mapping[int, str]
    ) -> Checkpoint:
        """Return what is here of a model.

        Args:
            known: the headers of the coordinator's copy; a tensor that is not here is taken from there.
            digests: of the coordinator's pieces, by place: a piece with another digest may differ in anything.
        Raises:
            ModelError: nothing is here, or it belongs to another model.
        """
        folder = self._folder_of(fingerprint)
        tensors = dict(known)
        for path in (folder / _file_name(place, digest) for place, digest in digests.items()):
            for name, info in _read_piece(path).items():
                if name not in known or (info.dtype, info.shape) != (known[name].dtype, known[name].shape):
                    raise ModelError(f"{path} does not belong to this model; remove it by `brigade cache rm`")
                tensors[name] = info
        return Checkpoint(model, folder, read_config(folder), tensors)

    def begin_file(self, fingerprint: Fingerprint, name: str, nbytes: int, digest: str) -> PartialFile | Path | None:
        """As `begin_piece`, for one of the model's small files.

        Raises:
            ModelError: no such file is taken.
        """
        most = MOST_CONFIG_BYTES if name == "config.json" else MOST_TOKENIZER_BYTES
        is_wanted = name == "config.json" or is_tokenizer_file(name)
        if not (is_wanted and _SMALL_NAME.fullmatch(name)) or nbytes > most:
            raise ModelError(f"expected config.json or a file of a tokenizer, got {name!r:.60} of {nbytes} bytes")
        path = self._folder_of(fingerprint) / name
        unfinished = path.with_name(f"{name}-{_require_digest(digest)}.part")
        return self._begin(path, unfinished, b"", nbytes, digest, partial(_has_digest, path, nbytes, digest))

    def begin_piece(self, fingerprint: Fingerprint, piece: Piece, digest: str) -> PartialFile | Path | None:
        """Take a piece up where it was left, or return its path if it is whole.

        Returns:
            None while another process of this machine receives it: ask again.
        Raises:
            ModelError: there is no room for it.
        """
        path = self._folder_of(fingerprint) / _file_name(piece.place, digest)
        is_here = partial(_is_as_received, path, piece.header, piece.nbytes)
        found = self._begin(path, path.with_suffix(".part"), piece.header, piece.nbytes, digest, is_here)
        if isinstance(found, Path):
            _touch(found)
        return found

    def name_model(self, fingerprint: Fingerprint, name: str) -> None:
        """Remember what a model is called, for its user."""
        (self._folder_of(fingerprint) / _NAME_FILE).write_text(printable(name, _LONGEST_NAME), encoding="utf-8")

    def lease(self, checkpoint: Checkpoint, names: Iterable[str]) -> Lease:
        """Hold those files of these tensors that are in this cache until the lease is closed: they are used now.

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
        """Return what is here of each model, the latest used first."""
        return sorted(map(_kept, self._folders()), key=lambda kept: -kept.used)

    def remove(self, key: str) -> bool:
        """Remove what is here of a model and not in use. Return whether all is gone."""
        folder = next(folder for folder in self._folders() if folder.name == key)
        are_gone = all([remove_unused(entry.path) for entry in _entries(folder)])
        if are_gone and all([remove_unused(path) for path in folder.iterdir()]):
            with contextlib.suppress(OSError):  # another process has just begun to receive into it
                folder.rmdir()
        return not folder.exists()

    def require_room(self, nbytes: int) -> None:
        """Raise ModelError if so many bytes can never lie here."""
        most = self._left() + sum(entry.size for entry in self._entries())
        if nbytes > most:
            raise self._refusal(nbytes, most)

    def make_room(self, nbytes: int) -> None:
        """Evict what has not been used for longest, until there is room. Raises ModelError if there is none."""
        left = self._left()
        for entry in sorted(self._entries(), key=lambda entry: entry.used):
            if left >= nbytes:
                return
            left += entry.size if remove_unused(entry.path) else 0
        if left < nbytes:
            raise self._refusal(nbytes, left)

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
            if is_here():  # another process has finished it since this one looked
                unfinished.unlink(missing_ok=True)
                return None
            partial_file = PartialFile(path, unfinished, begin, nbytes, digest, file)
            self.make_room(nbytes - partial_file.offset)
            undo.pop_all()
        return partial_file

    def _left(self) -> int:
        """Return how many more bytes may lie here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(self.folder)
        left = disk.free - disk.total // _SPARE
        if self._limit is not None:
            left = min(left, self._limit - sum(entry.size for entry in self._entries()))
        return left

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

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []

    def _entries(self) -> list[Entry]:
        return [entry for folder in self._folders() for entry in _entries(folder)]


def _kept(folder: Path) -> Kept:
    name, entries = folder / _NAME_FILE, _entries(folder)
    pieces = [entry.path.name for entry in entries if _PIECE.fullmatch(entry.path.name)]
    return Kept(
        key=folder.name,
        name=name.read_text(encoding="utf-8") if name.exists() else "?",
        places=tuple(sorted({place_of(piece.partition("-")[0]) for piece in pieces})),
        nbytes=sum(entry.size for entry in entries),
        used=max((entry.used for entry in entries), default=0.0),
        is_used=any(is_used(entry.path) for entry in entries),
    )


def _entries(folder: Path) -> list[Entry]:
    """Return a model's pieces, whole or partial; none that is removed meanwhile."""
    found = []
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.part")]:
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found.append(Entry(path, stat.st_size, stat.st_atime_ns / 1e9))
    return found


def _is_as_received(path: Path, begin: bytes = b"", nbytes: int | None = None) -> bool:
    """Whether the file is there, unchanged since its digest was right, with this beginning and so many bytes behind."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.st_mtime_ns != _RECEIVED_NS or nbytes not in (None, stat.st_size - len(begin)):
        return False
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


def _has_digest(path: Path, nbytes: int, digest: str) -> bool:
    return path.exists() and path.stat().st_size == nbytes and blake3().update_mmap(path).hexdigest() == digest


def _read_piece(path: Path) -> Mapping[str, TensorInfo]:
    """Return its tensors; none if it is not here, or has changed since: it can be received again."""
    if _is_as_received(path):
        with contextlib.suppress(ModelError):
            return read_tensors(path.parent, path.name)
    return {}


def _touch(path: Path) -> None:
    """Note that it is used now. The time of its contents stays: it tells a node that they have not changed."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _file_name(place: int, digest: str) -> str:
    return f"{place_name(place)}-{_require_digest(digest)}.safetensors"


def _require_digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ModelError(f"expected a digest in hex, got {text!r:.80}")
    return text
