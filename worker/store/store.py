"""The store: a folder of this user's cache with a folder per model, and in it files that are called by their digests.

A peer decides nothing about paths here: a model's folder is called by a hash of its fingerprint, its pieces by place
and digest, and other files have names from a short list.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from protos.brigade_pb2 import Fingerprint
from worker.errors import ModelError
from worker.model.checkpoint import MOST_CONFIG_BYTES, MOST_TOKENIZER_BYTES, Checkpoint, is_tokenizer_file, read_config
from worker.model.headers import TensorInfo, read_tensors
from worker.process.folders import cache_folder
from worker.process.printable import printable
from worker.store.locks import Lease, is_used, remove_unused
from worker.store.pieces import Piece, place_name, place_of
from worker.store.receiving import Receiving, begin_receiving, is_as_received, is_whole
from worker.store.room import Entry, Room, entries_of

_PIECE = re.compile(r"(front|back|[0-9]{5,9})-([0-9a-f]{64})\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SMALL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NAME_FILE = "called"  # what coordinators call the model
_LONGEST_NAME = 200


def store_folder() -> Path:
    return cache_folder() / "shards"


@dataclass(frozen=True)
class Kept:
    """What the store has of one model."""

    key: str
    name: str
    places: tuple[int, ...]
    nbytes: int
    used: float  # when it was, seconds since 1970
    is_used: bool  # a worker of this machine has it loaded, or receives it


class Store:
    """All received pieces on this machine. Blocks: for threads beside the event loop."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        """`limit` is how many bytes all files may take; None leaves a tenth of the disk free."""
        self.folder = folder or store_folder()
        self.room = Room(self.folder, limit)

    def open(
        self, model: str, fingerprint: Fingerprint, known: Mapping[str, TensorInfo], digests: Mapping[int, str]
    ) -> Checkpoint:
        """What is here of a model.

        Args:
            known: the headers of the coordinator's copy; a tensor that is not here is taken from there.
            digests: of the coordinator's pieces, by place: another one may differ in anything.
        Raises:
            ModelError: nothing is here, or it belongs to another model.
        """
        folder = self._folder_of(fingerprint)
        tensors = dict(known)
        for path in (folder / _file_name(place, digest) for place, digest in digests.items()):
            found = _read_piece(path)
            if any(name not in known or not _is_alike(info, known[name]) for name, info in found.items()):
                raise ModelError(f"{path} does not belong to this model; remove it by `brigade cache rm`")
            tensors |= found
        return Checkpoint(model, folder, read_config(folder), tensors)

    def begin_file(self, fingerprint: Fingerprint, name: str, nbytes: int, digest: str) -> Receiving | Path | None:
        """As `begin_piece`, for one of the model's small files.

        Raises:
            ModelError: no such file is taken.
        """
        most = MOST_CONFIG_BYTES if name == "config.json" else MOST_TOKENIZER_BYTES
        is_wanted = name == "config.json" or is_tokenizer_file(name)
        if not (is_wanted and _SMALL_NAME.fullmatch(name)) or nbytes > most:
            raise ModelError(f"expected config.json or a file of a tokenizer, got {name!r:.60} of {nbytes} bytes")
        path = self._folder_of(fingerprint) / name
        if path.exists() and path.stat().st_size == nbytes and _digest(path) == digest:
            return path
        unfinished = path.with_name(f"{name}-{_require_digest(digest)}.part")
        return self._begin(path, unfinished, b"", nbytes, digest)

    def begin_piece(self, fingerprint: Fingerprint, piece: Piece, digest: str) -> Receiving | Path | None:
        """Take a piece up where it was left, or say where it is if it is whole.

        Returns:
            None while another process of this machine receives it.
        Raises:
            ModelError: there is no room for it.
        """
        path = self._folder_of(fingerprint) / _file_name(piece.place, digest)
        if is_whole(path, piece.header, piece.nbytes):
            _touch(path)
            return path
        return self._begin(path, path.with_suffix(".part"), piece.header, piece.nbytes, digest)

    def call(self, fingerprint: Fingerprint, name: str) -> None:
        """Remember what a model is called, for its user."""
        (self._folder_of(fingerprint) / _NAME_FILE).write_text(printable(name, _LONGEST_NAME), encoding="utf-8")

    def lease(self, checkpoint: Checkpoint, names: Iterable[str]) -> Lease:
        """Hold the files of these tensors, if they lie here, until the lease is closed. They are used now.

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
        """What is here, the latest used first."""
        return sorted(map(_kept, self._folders()), key=lambda kept: -kept.used)

    def remove(self, key: str) -> bool:
        """Remove what is here of a model and not in use. Whether all is gone."""
        folder = next(folder for folder in self._folders() if folder.name == key)
        are_gone = all([remove_unused(entry.path) for entry in entries_of(folder)])
        if are_gone and all([remove_unused(path) for path in folder.iterdir()]):
            with contextlib.suppress(OSError):  # somebody has just begun to receive into it
                folder.rmdir()
        return not folder.exists()

    def _folder_of(self, fingerprint: Fingerprint) -> Path:
        parts = (fingerprint.config, fingerprint.tokenizer, fingerprint.tensors)
        return self.folder / hashlib.sha256("".join(map(_require_digest, parts)).encode()).hexdigest()[:32]

    def _begin(self, path: Path, unfinished: Path, begin: bytes, nbytes: int, digest: str) -> Receiving | None:
        path.parent.mkdir(parents=True, exist_ok=True)
        receiving = begin_receiving(path, unfinished, begin, nbytes, digest)
        if receiving is None:
            return None
        with ExitStack() as undo:
            undo.callback(receiving.close)
            self.room.make(nbytes - receiving.offset)
            undo.pop_all()
        return receiving

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir()] if self.folder.is_dir() else []


def _kept(folder: Path) -> Kept:
    name, entries = folder / _NAME_FILE, entries_of(folder)
    return Kept(
        key=folder.name,
        name=name.read_text(encoding="utf-8") if name.exists() else "?",
        places=tuple(sorted({place_of(_place(entry.path)) for entry in _pieces(folder)})),
        nbytes=sum(entry.size for entry in entries),
        used=max((entry.used for entry in entries), default=0.0),
        is_used=any(is_used(entry.path) for entry in entries),
    )


def _file_name(place: int, digest: str) -> str:
    return f"{place_name(place)}-{_require_digest(digest)}.safetensors"


def _read_piece(path: Path) -> Mapping[str, TensorInfo]:
    """Its tensors; none if it is not here, or not any more as it was received: it can be received again."""
    if is_as_received(path):
        with contextlib.suppress(ModelError):
            return read_tensors(path.parent, path.name)
    return {}


def _pieces(folder: Path) -> list[Entry]:
    return [entry for entry in entries_of(folder) if _PIECE.fullmatch(entry.path.name)]


def _place(path: Path) -> str:
    return path.name.partition("-")[0]


def _is_alike(info: TensorInfo, other: TensorInfo) -> bool:
    return (info.dtype, info.shape) == (other.dtype, other.shape)


def _touch(path: Path) -> None:
    """Say that it is used now; the time of its contents stays, by which a node sees that they have not changed."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _require_digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ModelError(f"expected a digest in hex, got {text!r:.80}")
    return text


def _digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()
