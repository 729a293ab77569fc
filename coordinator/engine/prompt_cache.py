"""A prompt's caches in a file of the user: the pieces of all nodes, and the secret by which they are named.

Before a chain opens they go to this node's folder of pieces, from where it takes them as any others. After the answer
the pieces of all nodes come there and go on into the file; then no disk keeps them but in this file.
"""

import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.cluster.deployment import naming_key
from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.progress import say
from coordinator.engine.engine import Engine
from protos.brigade_pb2 import Piece
from worker.errors import FrameError, InputError, PrefixLost
from worker.model.checkpoint import Checkpoint
from worker.model.describe import describe
from worker.node.prefix_store import MOST_MOVED_BYTES, PieceFile, PrefixStore, piece_files, piece_named, prefix_folder
from worker.platform.files import private_file, reading, require_writable, writing
from worker.platform.text import format_bytes
from worker.platform.threads import run_in_thread

_FORMAT = "brigade prompt cache 1"
_FIELD = "prompt_cache"
_MOST_HEADER = 1 << 24  # bytes
_NO_LIMIT = 1 << 50  # bytes: all but what a node's disk keeps free
_TRIES = 60  # to find all pieces; while nodes write, each takes up to a second


class _Header(BaseModel):
    """The first line of a file; the contents of the pieces' files follow."""

    model_config = ConfigDict(extra="forbid")

    format: str = Field(pattern=f"^{_FORMAT}$")
    model: str
    secret: str = Field(pattern="^[0-9a-f]{64}$")
    key: str  # a digest of the key that this secret gives with the model's weights
    pieces: list[tuple[str, Annotated[int, Field(ge=0, le=MOST_MOVED_BYTES)]]] = []  # names of files, and their bytes


class PromptCache:
    """The file of one prompt."""

    def __init__(self, path: Path, checkpoint: Checkpoint, limit: int | None = None) -> None:
        """Put the file's pieces into this node's folder, or begin a new file. Call it in a thread.

        Args:
            limit: the most bytes that all pieces of a node's folder may take.
        Raises:
            InputError: it cannot be read or written, or is another kind of file, or of another model.
        """
        if path.exists():
            if not path.is_file():
                raise InputError(_FIELD, f"expected a file, found another kind of thing: {path}")
            require_writable(_FIELD, path)
        self._path, self._limit = path, limit or _NO_LIMIT
        self._there: set[bytes] = set()  # names of pieces of the file that are whole in this node's folder
        found = self._read_header() if path.exists() and path.stat().st_size else None
        secret = found.secret if found else secrets.token_hex(32)
        key = naming_key(bytes.fromhex(secret), checkpoint, describe(checkpoint).dtype)
        self._header = _Header(
            format=_FORMAT, model=checkpoint.name, secret=secret, key=blake2b(key, digest_size=16).hexdigest()
        )
        if found and found.pieces:
            self._unpack(found)
        else:
            self._write([])  # if this process is killed, the next one finds by the secret what nodes have stored

    def _read_header(self) -> _Header:
        with reading(_FIELD, self._path), self._path.open("rb") as file:
            line = file.readline(_MOST_HEADER)
        try:
            return _Header.model_validate_json(line)
        except ValidationError:
            expected = "expected a file that --prompt-cache wrote, or a new one"
            raise InputError(_FIELD, f"{expected}, found another kind of file: {self._path}") from None

    def _unpack(self, found: _Header) -> None:
        if found.key != self._header.key:
            of = f"is of another model ({found.model}), or was made by another version of this program"
            raise InputError(_FIELD, f"{self._path} {of}; give another file, or remove it")
        self._header = found
        store, trouble, lost = PrefixStore(0, 0, self._limit), "", set()
        with reading(_FIELD, self._path), self._path.open("rb") as file:
            file.readline()
            for name, num_bytes in found.pieces:
                piece = piece_named(name) or Piece()
                self._there.add(piece.name)
                try:
                    store.add(piece, file.read(num_bytes))
                except (FrameError, PrefixLost) as error:
                    trouble = str(error)
                    lost.add(piece.name)  # of some of its layers, at least
        self._there -= lost
        if trouble:
            say(f"a part of {self._path} is not used, and computed again: {trouble}")

    def options(self, options: ClusterOptions) -> ClusterOptions:
        """Return the options of a cluster that uses the pieces, and stores new ones."""
        cluster = options.cluster.model_copy(update={"cache_disk": self._limit})
        return replace(options, cluster=cluster, naming_secret=bytes.fromhex(self._header.secret))

    async def keep(self, engine: Engine) -> None:
        """Write what the caches hold of ended requests to the file, and remove the pieces from all disks.

        Raises:
            InputError: the file cannot be written. BrigadeError: a node does not answer.
        """
        names, prefixes = await engine.core.stored_names(), engine.chain.prefixes
        assert prefixes is not None, "`options` has the chain keep prefixes"
        if not names:
            why = "fewer than 512 tokens, or caches that cannot be cut and no snapshot of them"
            say(f"nothing of this prompt is kept in {self._path}: it has {why}")
        elif not names <= self._there:
            say(f"keeping the prompt's caches in {self._path}")
            files: Sequence[PieceFile] = []
            for _ in range(_TRIES):
                await prefixes.gather(names, range(1, engine.chain.num_stages))
                files = await run_in_thread(partial(_files_of, names, engine.chain.spec.num_layers))
                if {file.piece.name for file in files} == names:
                    break
            await run_in_thread(partial(self._replace, files, names))
        await prefixes.remove(names | self._there)

    def _replace(self, files: Sequence[PieceFile], names: Collection[bytes]) -> None:
        """Write these files of pieces with these names, if there are all, or the file has none yet."""
        if len({file.piece.name for file in files}) < len(names) and (self._header.pieces or not files):
            say(f"{self._path} stays as it is: the nodes' disks hold only a part of this prompt's caches")
            return
        self._write(files)
        say(f"{self._path} holds the caches of {files[-1].piece.end} tokens, {format_bytes(self._path.stat().st_size)}")

    def _write(self, files: Sequence[PieceFile]) -> None:
        header = self._header.model_copy(update={"pieces": [(file.path.name, file.nbytes) for file in files]})
        with writing(_FIELD, self._path), private_file(self._path.resolve()) as packed:
            packed.write(header.model_dump_json().encode() + b"\n")
            for file in files:
                packed.write(file.path.read_bytes())


def _files_of(names: Collection[bytes], num_layers: int) -> list[PieceFile]:
    """Return files of these pieces here that hold each layer once, as far as the pieces follow each other."""
    usable = [each for each in piece_files(prefix_folder()) if each.nbytes <= MOST_MOVED_BYTES]
    found = sorted(
        (each for each in usable if each.piece.name in names), key=lambda each: (each.piece.end, each.piece.name)
    )
    chosen: list[PieceFile] = []
    ends = {0}
    for _, files in groupby(found, key=lambda each: each.piece.name):
        whole = _whole(list(files), num_layers)
        if whole and whole[0].piece.begin in ends:
            chosen += whole
            ends.add(whole[0].piece.end)
    return chosen


def _whole(files: Sequence[PieceFile], num_layers: int) -> list[PieceFile]:
    """Return those of a piece's files that hold each layer of the model once; [] if one is missing."""
    chosen: list[PieceFile] = []
    at = 0
    while at < num_layers:
        having = [each for each in files if each.piece.first_layer <= at < each.piece.last_layer]
        if not having:
            return []
        chosen.append(max(having, key=lambda each: each.piece.last_layer))
        at = chosen[-1].piece.last_layer
    return chosen
