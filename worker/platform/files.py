"""Files that outlast a failure of the power."""

import contextlib
import fcntl
import os


def sync_file(descriptor: int) -> None:
    """Have what was written to a file on its disk, also if the power fails. Raises OSError.

    fsync(2) of macOS leaves it in the disk's own cache: there F_FULLFSYNC is for that.
    """
    if (command := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with contextlib.suppress(OSError):  # network volumes do not know it
            fcntl.fcntl(descriptor, command)
            return
    os.fsync(descriptor)
