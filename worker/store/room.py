"""Room: how much received files may take on this disk, and which of them go when others come. Blocks."""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from worker.errors import ModelError
from worker.process.sizes import format_bytes
from worker.store.locks import remove_unused

_SPARE = 10  # one part in so many of the disk stays free, whatever the limit


@dataclass(frozen=True)
class Entry:
    """A file that can be received again."""

    path: Path
    size: int
    used: float  # seconds since 1970


class Room:
    """What folders below this one may take together."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """`limit` is in bytes; None leaves it to what is free on the disk."""
        self._folder = folder
        self._limit = limit

    def require(self, nbytes: int) -> None:
        """Raise ModelError if so many bytes can never lie here."""
        most = self._left() + sum(entry.size for entry in self._entries())
        if nbytes > most:
            raise ModelError(self._refusal(nbytes, most))

    def make(self, nbytes: int) -> None:
        """Remove what has not been used for longest, until there is room. Raises ModelError if there is none."""
        left = self._left()
        for entry in sorted(self._entries(), key=lambda entry: entry.used):
            if left >= nbytes:
                return
            left += entry.size if remove_unused(entry.path) else 0
        if left < nbytes:
            raise ModelError(self._refusal(nbytes, left))

    def _left(self) -> int:
        """How many more bytes may lie here."""
        self._folder.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(self._folder)
        left = disk.free - disk.total // _SPARE
        if self._limit is not None:
            left = min(left, self._limit - sum(entry.size for entry in self._entries()))
        return left

    def _entries(self) -> list[Entry]:
        return [entry for folder in self._folder.iterdir() if folder.is_dir() for entry in entries_of(folder)]

    def _refusal(self, nbytes: int, most: int) -> str:
        limit = "its disk is nearly full"
        if self._limit is not None:
            limit += f", or its `pull_limit` of {format_bytes(self._limit)} is reached"
        return (
            f"has room for {format_bytes(max(0, most))} of received layers, needs {format_bytes(nbytes)}: {limit}; "
            "make room there (`brigade cache ls` shows what it keeps), or give it fewer layers"
        )


def entries_of(folder: Path) -> list[Entry]:
    """A model's pieces, and what has come of others; none that is removed meanwhile."""
    found = []
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.part")]:
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            found.append(Entry(path, stat.st_size, stat.st_atime_ns / 1e9))
    return found
