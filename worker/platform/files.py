"""Files of the user, which may be unreadable, and files that outlast a failure of the power."""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from worker.errors import InputError


@contextlib.contextmanager
def reading(name: str, path: Path | str) -> Iterator[None]:
    """Raise InputError, which names the parameter and the file, if the body cannot read it or its text is not UTF-8."""
    try:
        yield
    except OSError as error:
        raise InputError(name, f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(name, f"{path}: expected UTF-8 text, found other bytes at {error.start}") from error


@contextlib.contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Raise InputError, which names the parameter and the file, if the body cannot write it."""
    try:
        yield
    except OSError as error:
        raise InputError(name, f"cannot write {path}: {error.strerror}") from error


def require_writable(name: str, path: Path) -> None:
    """Raise InputError now if a file cannot be written later; leave no empty file behind."""
    is_new = not path.exists()
    with writing(name, path):
        path.open("a").close()
        if is_new:
            path.resolve().unlink(missing_ok=True)  # not the link to it


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside this one for a file that takes its place at the end, or is removed if the body fails."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the first error says more
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that only its user can read, which takes this place at the end, or is removed if the body fails."""
    with (
        replacing(path) as unfinished,
        open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
    ):
        yield file


def free_bytes(folder: Path) -> int:
    """Return how many bytes a cache may take on this folder's disk, a tenth of which stays free."""
    disk = shutil.disk_usage(folder)
    return disk.free - disk.total // 10


def sync_file(descriptor: int) -> None:
    """Have what was written to a file on its disk, also if the power fails. Raises OSError.

    fsync(2) of macOS leaves it in the disk's own cache: there F_FULLFSYNC is for that.
    """
    if (command := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with contextlib.suppress(OSError):  # network volumes do not know it
            fcntl.fcntl(descriptor, command)
            return
    os.fsync(descriptor)


def open_locked(name: str, path: Path, mode: int) -> int:
    """Open a file to append to, make it if it is missing, and lock it; return its descriptor.

    Raises:
        InputError: it is no regular file, cannot be written or locked, or another process has it.
    """
    with contextlib.ExitStack() as stack, writing(name, path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, mode)
        stack.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError(name, f"expected a file, found something else: {path}")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(name, f"{path} is in use by another process") from None
        if not os.fstat(descriptor).st_nlink:  # the process that had locked it has removed it meanwhile
            return open_locked(name, path, mode)
        stack.pop_all()
    return descriptor
