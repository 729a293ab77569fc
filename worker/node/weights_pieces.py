"""Pieces of weights: a shard cut at its layers, each a safetensors file of its own that every node makes alike.

What is sent is read from this node's own files, with a digest that is kept. All of this blocks.
"""

import contextlib
import hashlib
import json
import os
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgpack
from blake3 import blake3

from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint
from worker.model.describe import BACK, FRONT, describe, layout_of, shard_tensors
from worker.model.headers import TensorInfo, item_bits
from worker.platform.installation import cache_folder

_ALIGNMENT = 8  # of a file's tensors
_NAMES = {FRONT: "front", BACK: "back"}
_READ_BYTES = 1 << 22
_MOST_KEPT = 4096  # digests of one model's folder: others stand for files that have changed since


@dataclass(frozen=True)
class Piece:
    """All tensors of one place of a model: a layer, or what stands before the layers or behind them."""

    place: int
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def order(self) -> list[str]:
        """The tensors' names as they lie in the file, the widest numbers first: so each is aligned to its own."""
        return sorted(self.tensors, key=lambda name: (-item_bits(self.tensors[name].dtype), name))

    @property
    def nbytes(self) -> int:
        """The size of its tensors, without the header."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def header(self) -> bytes:
        """The file's beginning, which follows from names, dtypes and shapes alone."""
        entries, at = {}, 0
        for name in self.order:
            info = self.tensors[name]
            entries[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [at, at + info.nbytes]}
            at += info.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def pieces_of(checkpoint: Checkpoint, start: int, end: int) -> list[Piece]:
    """Return the pieces of the shard [start, end); none of no layers."""
    tensors: dict[int, dict[str, TensorInfo]] = defaultdict(dict)
    for name in shard_tensors(checkpoint, start, end) if start < end else ():
        tensors[layout_of(checkpoint).places[name]][name] = checkpoint.tensors[name]
    return [Piece(place, found) for place, found in sorted(tensors.items())]


def place_name(place: int) -> str:
    """Return a layer's number as five digits or more, `front` or `back`: as it stands in file names."""
    return _NAMES.get(place) or f"{place:05}"


def place_of(name: str) -> int:
    """Return the place that has this name."""
    return next((place for place, known in _NAMES.items() if known == name), None) or int(name)


@dataclass(frozen=True)
class Span:
    """Bytes of a file."""

    path: Path
    at: int
    nbytes: int


class Origin:
    """One file to be sent: a beginning that every node makes itself, and behind it spans of this node's files."""

    def __init__(self, begin: bytes, spans: list[Span]) -> None:
        self.begin = begin
        self.nbytes = sum(span.nbytes for span in spans)
        self._spans = spans

    @classmethod
    def of_file(cls, path: Path) -> "Origin":
        return cls(b"", [Span(path, 0, path.stat().st_size)])

    @classmethod
    def of_piece(cls, checkpoint: Checkpoint, piece: Piece) -> "Origin":
        """Raises ModelError if a file is missing."""
        begins = {file: _data_begin(checkpoint.folder / file) for file in checkpoint.files_of(piece.order)}
        infos = [piece.tensors[name] for name in piece.order]
        return cls(piece.header, [Span(checkpoint.folder / i.file, begins[i.file] + i.begin, i.nbytes) for i in infos])

    @cached_property
    def stamp(self) -> str:
        """A text that changes when its contents may have."""
        stats = {span.path: span.path.stat() for span in self._spans}
        said = [self.begin.hex()]
        said += [f"{span.path} {span.at} {span.nbytes}" for span in self._spans]
        said += [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats.items()]
        return hashlib.sha256("\n".join(said).encode(errors="surrogateescape")).hexdigest()

    def blocks(self, offset: int, block_bytes: int) -> Iterator[bytes]:
        """Yield the spans behind this many bytes, in blocks of so many bytes; the last of a span may have fewer."""
        with contextlib.ExitStack() as stack:
            opened: dict[Path, BinaryIO] = {}
            for span in self._spans:
                skipped = min(offset, span.nbytes)
                offset -= skipped
                if span.path not in opened:
                    opened[span.path] = stack.enter_context(span.path.open("rb", buffering=0))
                yield from _read(opened[span.path], span, skipped, block_bytes)

    def digest(self, given_up: threading.Event) -> str:
        """Return the BLAKE3 of all of it, in hex; empty once it is given up."""
        found = blake3(self.begin)
        for block in self.blocks(0, _READ_BYTES):
            if given_up.is_set():
                return ""
            found.update(block)
        return found.hexdigest()


def gather(blocks: Iterator[bytes], num_bytes: int) -> Generator[list[bytes], None, None]:
    """Yield lists of blocks that make at least so many bytes together: small tensors are not sent one by one."""
    found: list[bytes] = []
    size = 0
    for block in blocks:
        found.append(block)
        size += len(block)
        if size >= num_bytes:
            yield found
            found, size = [], 0
    if found:
        yield found


class DigestCache:
    """Digests of a model's files, kept in the cache folder: files need not be read twice before they are sent."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        name = hashlib.sha256(os.fsencode(checkpoint.folder.absolute())).hexdigest()[:32]
        self._path = cache_folder() / "digests" / f"{name}.msgpack"
        self._known = self._read()

    def known(self, origin: Origin) -> str:
        """Return the kept digest; empty if it has to be made."""
        return self._known.get(origin.stamp, "") if self._known else ""

    def of(self, origin: Origin, given_up: threading.Event) -> str:
        """Return the digest, made if need be. Raises OSError if a file cannot be read."""
        found = self.known(origin) or origin.digest(given_up)
        if found:
            self._known[origin.stamp] = found
        return found

    def keep(self) -> None:
        """Write them; a folder that cannot be written to only means that they are computed again."""
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            known = self._read() | self._known.copy()  # others may have kept some meanwhile, or one is just made
            unfinished.write_bytes(msgpack.packb(dict(list(known.items())[-_MOST_KEPT:])))
            unfinished.replace(self._path)

    def _read(self) -> dict[str, str]:
        try:
            return {str(stamp): str(digest) for stamp, digest in msgpack.unpackb(self._path.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError, msgpack.UnpackException):
            return {}


def known_digests(checkpoint: Checkpoint) -> dict[int, str]:
    """Return the kept digests of the pieces that workers may hold, by place."""
    digests, found = DigestCache(checkpoint), {}
    for piece in pieces_of(checkpoint, 1, describe(checkpoint).num_layers):
        with contextlib.suppress(ModelError, OSError):  # a file that is still on the hub
            if digest := digests.known(Origin.of_piece(checkpoint, piece)):
                found[piece.place] = digest
    return found


def _data_begin(path: Path) -> int:
    """Return where the tensors of a safetensors file begin."""
    try:
        with path.open("rb") as file:
            return 8 + int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _read(file: BinaryIO, span: Span, skipped: int, block_bytes: int) -> Iterator[bytes]:
    file.seek(span.at + skipped)
    left = span.nbytes - skipped
    while left:
        block = file.read(min(left, block_bytes))
        if not block:
            raise ModelError(f"{span.path} ends early: it changed while it was read; start again")
        left -= len(block)
        yield block
