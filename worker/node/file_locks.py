"""Locks on files, between processes and within one: readers share a file, a writer or remover has it alone."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_WAIT_S, _PAUSE_S = 1.0, 0.01


class Lease:
    """Holds files that are in use: no process removes them until it is closed."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def add(self, path: Path) -> bool:
        """Hold this file too. False if it is gone, or about to be."""
        if path in self._files:
            return True
        found = _open_soon(path)
        if found is not None:
            self._files[path] = found
        return found is not None

    def take_over(self, path: Path, file: int) -> bool:
        """Hold a file that this process has had alone until now, by a descriptor of it.

        False if another process has removed it just then: flock(2) lets others in between the two locks.
        """
        fcntl.flock(file, fcntl.LOCK_SH)  # waits for a process that looks whether it is used
        if not _is_at(path, file):
            os.close(file)
            return False
        if path in self._files:
            os.close(self._files[path])
        self._files[path] = file
        return True

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        """A task that was cut off may have left it open."""
        self.close()


def open_alone(path: Path) -> int | None:
    """Open this file for this process alone, making it if need be. None while another one has it."""
    return _open(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)


def is_used(path: Path) -> bool:
    """Whether a process holds it."""
    with _alone(path) as is_alone:
        return not is_alone and path.exists()


def remove_unused(path: Path) -> bool:
    """Remove a file unless a process holds it. Return whether it is gone."""
    with _alone(path) as is_alone:
        if is_alone:
            path.unlink(missing_ok=True)
    return not path.exists()


def _open_soon(path: Path) -> int | None:
    """Open it to share it. A process that has it alone does so for a moment, to see if it is used, or to remove it."""
    until = time.monotonic() + _WAIT_S
    while (found := _open(path, os.O_RDONLY, fcntl.LOCK_SH)) is None and path.exists() and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    return found


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Yield whether this process has the file alone, until the end of the context."""
    found = _open(path, os.O_RDONLY, fcntl.LOCK_EX)
    try:
        yield found is not None
    finally:
        if found is not None:
            os.close(found)


def _open(path: Path, mode: int, lock: int) -> int | None:
    """Open and lock the file at this path: that very one, not one that was removed meanwhile."""
    try:
        found = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(found, lock | fcntl.LOCK_NB)
        if _is_at(path, found):
            return found
    except BlockingIOError:
        pass
    os.close(found)
    return None


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
