"""A prompt's caches in a file of the user: the pieces of all nodes, and the secret by which they are named.

Before a chain opens they go to this node's folder of pieces, from where it takes them as any others. After the answer
the pieces of all nodes come there and go on into the file; then no disk keeps them but in this file.
"""

import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.cluster.options import ClusterOptions
from coordinator.cluster.prefixes import moves_for
from coordinator.cluster.progress import say
from coordinator.engine.engine import Engine
from protos.brigade_pb2 import Piece
from worker.errors import FrameError, InputError, PrefixLost
from worker.model.checkpoint import Checkpoint
from worker.node.prefix_store import MOST_MOVED_BYTES, PieceFile, PrefixStore, piece_files, piece_named, prefix_folder
from worker.platform.files import private_file, reading, require_writable, writing
from worker.platform.text import format_bytes
from worker.platform.threads import run_in_thread

_FORMAT = "brigade prompt cache 1"
_FIELD = "prompt_cache"
_MOST_HEADER = 1 << 24  # bytes
_NO_LIMIT = 1 << 50  # bytes: all but what a node's disk keeps free


class _Header(BaseModel):
    """The first line of a file; the contents of the pieces' files follow."""

    model_config = ConfigDict(extra="forbid")

    format: str = Field(pattern=f"^{_FORMAT}$")
    model: str
    fingerprint: str  # of the model, in hexadecimal
    secret: str = Field(pattern="^[0-9a-f]{64}$")
    pieces: list[tuple[str, Annotated[int, Field(ge=0, le=MOST_MOVED_BYTES)]]]  # names of files, and their bytes


class PromptCache:
    """The file of one prompt. Blocking methods are for threads."""

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        """Read the header of a file that exists.

        Raises:
            InputError: it cannot be read or written, or is another kind of file, or of another model.
        """
        if path.exists() and not path.is_file():
            raise InputError(_FIELD, f"expected a file, found another kind of thing: {path}")
        require_writable(_FIELD, path)
        self._path, self._model = path, checkpoint.name
        self._fingerprint = checkpoint.fingerprint.SerializeToString(deterministic=True).hex()
        self._header: _Header | None = None
        self._there: set[bytes] = set()  # names of pieces of the file that are in this node's folder
        if path.exists() and path.stat().st_size:
            self._header = self._read_header()
        self._secret = bytes.fromhex(self._header.secret) if self._header else secrets.token_bytes(32)

    def _read_header(self) -> _Header:
        with reading(_FIELD, self._path), self._path.open("rb") as file:
            line = file.readline(_MOST_HEADER)
        try:
            header = _Header.model_validate_json(line)
        except ValidationError:
            expected = "expected a file that --prompt-cache wrote, or a new one"
            raise InputError(_FIELD, f"{expected}, found another kind of file: {self._path}") from None
        if header.fingerprint != self._fingerprint:
            raise InputError(_FIELD, f"{self._path} is of another model ({header.model}); give another file")
        return header

    async def options(self, options: ClusterOptions) -> ClusterOptions:
        """Put the pieces into this node's folder; return the options of a cluster that uses and keeps them."""
        limit = options.cluster.cache_disk or _NO_LIMIT
        if self._header:
            await run_in_thread(partial(self._unpack, self._header.pieces, limit))
        cluster = options.cluster.model_copy(update={"cache_disk": limit})
        return replace(options, cluster=cluster, naming_secret=self._secret)

    def _unpack(self, pieces: Sequence[tuple[str, int]], limit: int) -> None:
        store, trouble, lost = PrefixStore(0, 0, limit), "", set[bytes]()
        with reading(_FIELD, self._path), self._path.open("rb") as file:
            file.readline()
            for name, num_bytes in pieces:
                piece = piece_named(name) or Piece()
                self._there.add(piece.name)
                try:
                    store.add(piece, file.read(num_bytes))
                except (FrameError, PrefixLost) as error:
                    trouble = str(error)
                    lost.add(piece.name)  # of some of its layers
        self._there -= lost
        if trouble:
            say(f"a part of {self._path} is not used, and computed again: {trouble}")

    async def keep(self, engine: Engine) -> None:
        """Write what the caches hold of ended requests to the file, and remove the pieces from all disks.

        Raises:
            InputError: the file cannot be written. BrigadeError: a node does not answer.
        """
        names, prefixes = await engine.core.stored_names(), engine.chain.prefixes
        assert prefixes is not None, "`options` has the chain keep prefixes"
        if not names:
            say(f"{self._path} stays as it is: nodes keep no caches of this prompt on disk, as of one below 512 tokens")
        elif not names <= self._there:
            say(f"keeping the prompt's caches in {self._path}")
            await prefixes.gather(names, range(1, engine.chain.num_stages))
            await run_in_thread(partial(self._pack, names, engine.chain.spec.num_layers))
        await prefixes.remove(names | self._there)

    def _pack(self, names: Collection[bytes], num_layers: int) -> None:
        """Write those of the pieces that are here with all layers of the model."""
        files: defaultdict[bytes, list[PieceFile]] = defaultdict(list)
        for file in piece_files(prefix_folder()):
            if file.piece.name in names:
                files[file.piece.name].append(file)
        whole = [each for each in files.values() if moves_for([[file.piece for file in each]], [(0, num_layers)]) == []]
        chosen = sorted((file for each in whole for file in each), key=lambda file: file.piece.end)
        header = _Header(
            format=_FORMAT,
            model=self._model,
            fingerprint=self._fingerprint,
            secret=self._secret.hex(),
            pieces=[(file.path.name, file.nbytes) for file in chosen],
        )
        with writing(_FIELD, self._path), private_file(self._path.resolve()) as packed:
            packed.write(header.model_dump_json().encode() + b"\n")
            for file in chosen:
                packed.write(file.path.read_bytes())
        num_tokens, nbytes = max((file.piece.end for file in chosen), default=0), self._path.stat().st_size
        say(f"{self._path} holds the caches of {num_tokens} tokens, {format_bytes(nbytes)}")
