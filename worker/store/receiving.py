"""One file on its way to the disk: appended to as it comes, gone on with after a cut, and called by its name only when
its digest is right. Blocks: for a thread of its own.
"""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from blake3 import blake3

from worker.errors import ModelError
from worker.store.locks import Lease, open_alone

_READ_BYTES = 1 << 22
_RECEIVED_NS = 946_684_800 * 10**9  # of the last change, 2000-01-01: whoever writes to a file gives it another one


class Receiving:
    """Nobody else writes this file at the same time."""

    def __init__(self, path: Path, unfinished: Path, begin: bytes, nbytes: int, digest: str, file: FileIO) -> None:
        """As `begin_receiving`; `file` is what is there of it, open and locked."""
        self.nbytes = nbytes
        self.path = path
        self._unfinished = unfinished
        self._digest = digest
        self._begin_bytes = len(begin)
        self._file = file
        self._hash = blake3()
        self._at = 0
        self._take_up(begin)

    @property
    def offset(self) -> int:
        """How many bytes are here, beside the beginning that this node makes itself."""
        return self._at - self._begin_bytes

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Append these, of which there are not too many. Raises OSError, for a full disk say."""
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[self._file.write(view) :]
            self._hash.update(piece)
            self._at += len(piece)

    def finish(self) -> None:
        """Give the whole file its name.

        Raises:
            ModelError: it is not what was announced; nothing is left of it then.
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
        """Once it is finished: nobody else may remove it until the lease ends.

        Raises:
            ModelError: somebody has, just now.
        """
        if not lease.take_over(self.path, os.dup(self._file.fileno())):
            raise ModelError(f"{self.path} was removed just as it had come; start again")

    def close(self) -> None:
        """Let others have what is here."""
        self._file.close()

    def _take_up(self, begin: bytes) -> None:
        """Go on behind what came before; begin anew if that is not the beginning of this file."""
        size = os.fstat(self._file.fileno()).st_size
        if size <= len(begin) + self.nbytes and self._file.read(len(begin)) == begin:
            self._hash.update(begin)
            self._at = len(begin)
            while block := self._file.read(_READ_BYTES):
                self._hash.update(block)
                self._at += len(block)
        else:
            self._file.seek(0)
            self._file.truncate()
            self.write([begin])


def is_as_received(path: Path) -> bool:
    """Whether it is there, and nobody has written to it since its digest was right."""
    try:
        return path.stat().st_mtime_ns == _RECEIVED_NS
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_whole(path: Path, begin: bytes, nbytes: int) -> bool:
    """Whether it is as it was received, and has this size and this beginning."""
    if not is_as_received(path) or path.stat().st_size != len(begin) + nbytes:
        return False
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


def begin_receiving(path: Path, unfinished: Path, begin: bytes, nbytes: int, digest: str) -> Receiving | None:
    """Take a file up where it was left; None while another process of this machine receives it, or if it just has.

    Args:
        path: where it is to be.
        unfinished: where it is until it is whole.
        begin: its first bytes, which are not sent.
        nbytes: of what follows them.
        digest: BLAKE3 of both, in hex.
    """
    descriptor = open_alone(unfinished)
    if descriptor is None:
        return None
    with ExitStack() as undo:
        file = undo.enter_context(FileIO(descriptor, "r+"))
        if begin and is_whole(path, begin, nbytes):  # a piece was given its name after this one has looked for that
            unfinished.unlink(missing_ok=True)
            return None
        receiving = Receiving(path, unfinished, begin, nbytes, digest, file)
        undo.pop_all()
        return receiving
