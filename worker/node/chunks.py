"""Chunks: `Feeding` messages with data, written and read by hand, since protobuf would copy it four times. Pure."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.brigade_pb2 import Feeding
from worker.errors import FrameError

# Larger than the parts of frames: what a message costs itself counts here, and half a millisecond of the loops does not
CHUNK_BYTES = 1 << 19
MOST_CHUNK_BYTES = 2 * CHUNK_BYTES  # where small tensors are joined

_DATA = bytes([Feeding.DESCRIPTOR.fields_by_name["data"].number << 3 | 2])  # protobuf's wire type of what has a length
_CHECKSUM = bytes([Feeding.DESCRIPTOR.fields_by_name["checksum"].number << 3 | 5])  # and of four bytes
_CHECKSUM_BYTES = len(_CHECKSUM) + 4
_LENGTH_BYTES = 4  # of 7 bits each: a small length takes as many as a large one
_HEAD_BYTES = len(_DATA) + _LENGTH_BYTES


@dataclass(frozen=True)
class Chunk:
    """Some of a file, and its checksum, unless it came without."""

    data: memoryview
    checksum: int | None


def write_chunk(pieces: Sequence[bytes], offset: int | None) -> bytes:
    """A serialised `Feeding` with these pieces as its data.

    Args:
        offset: where in a file they belong, if they are to have a checksum.
    """
    head = _head(sum(map(len, pieces)))
    if offset is None:
        return b"".join((head, *pieces))
    return b"".join((head, *pieces, _CHECKSUM, checksum_of(pieces, offset).to_bytes(4, "little")))


def read_feeding(message: bytes) -> Feeding | Chunk:
    """A message as it came; of a chunk nothing is copied. Raises FrameError if it is neither."""
    view = memoryview(message)
    if view[:1] == _DATA:
        for num_behind in (0, _CHECKSUM_BYTES):
            data, behind = view[_HEAD_BYTES : len(view) - num_behind], view[len(view) - num_behind :]
            if view[:_HEAD_BYTES] == _head(len(data)) and (not num_behind or behind[:1] == _CHECKSUM):
                return Chunk(data, int.from_bytes(behind[1:], "little") if num_behind else None)
    else:
        try:
            return Feeding.FromString(message)
        except DecodeError:
            pass
    raise FrameError(f"expected a part of what is fed, got {len(message)} bytes that are none")


def checksum_of(pieces: Sequence[bytes | memoryview], offset: int) -> int:
    """Of what belongs there in a file: bytes of another place are as wrong as others."""
    found = offset & 0xFFFFFFFF
    for piece in pieces:
        found = zlib.crc32(piece, found)
    return found


def _head(length: int) -> bytes:
    """What stands before so many bytes of data."""
    sizes = [length >> 7 * i & 0x7F for i in range(_LENGTH_BYTES)]
    return _DATA + bytes([*(size | 0x80 for size in sizes[:-1]), sizes[-1]])
