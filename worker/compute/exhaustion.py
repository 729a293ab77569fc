"""Recognise MLX's out-of-memory errors by their texts: MLX has no exception type for them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from worker.errors import OutOfMemory

_SIZE = re.compile(r"(?:Unable|Attempting) to allocate (\d+) bytes")
_LIMIT = re.compile(r"maximum allowed buffer size of (\d+) bytes")
_SIGNS = ("MemoryError", "out of memory", "OutOfMemory", "Insufficient Memory", "bad_alloc")


def out_of_memory(text: str, doing: str) -> OutOfMemory | None:
    """Return the OutOfMemory error for an MLX error text, or None if it is about something else."""
    size, limit = _SIZE.search(text), _LIMIT.search(text)
    if not size and not any(sign in text for sign in _SIGNS):
        return None
    wanted = f"could not get {_gib(size[1])}" if size else "the device does not say how much was missing"
    most = f" at once, where {_gib(limit[1])} is the most" if limit else ""
    return OutOfMemory(
        f"out of memory {doing}: {wanted}{most}; "
        "give this node fewer layers, or ask for less context, shorter prompt chunks or fewer requests at once"
    )


@contextmanager
def memory_errors_named(doing: str) -> Iterator[None]:
    """Turn MLX's out-of-memory errors into OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (named := out_of_memory(f"{error!r}", doing)) is None:
            raise
        raise named from error


def _gib(num_bytes: str) -> str:
    return f"{int(num_bytes) / 2**30:.2f} GiB"
