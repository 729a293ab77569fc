"""Framing: the bytes that nodes exchange, and their checksums. Pure: no I/O, no MLX.

A frame is cut into parts for a hop and assembled after it; a file of weights is sent in chunks; a report has a
checksum. Parts (`Part` in brigade.proto) and chunks (`Feeding` with data) are encoded here and not by protobuf, which
would copy the payload up to four times.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from protos.brigade_pb2 import DType, Feeding, Frame, Part, Report
from worker.errors import FrameError
from worker.model.model_spec import DTYPE_BYTES, ModelSpec

_MOST_PAYLOAD_BYTES = 1 << 28  # of a frame: a lane of many windows may be longer than a prompt chunk
_MOST_CHUNK_BYTES = 1 << 26
_MOST_SOFT_BYTES = 1 << 23  # of a result, which is one message
_MOST_VARINT_BYTES = 10  # of 7 bits each
MOST_SIZES = 8  # dimensions of a tensor: the product of a million sizes would take very long

_BYTES, _FIXED32 = 2, 5  # protobuf's wire types; that of a number is 0
_NUMBER = Part.DESCRIPTOR.fields_by_name["number"].number << 3
_FRAME, _DATA = (Part.DESCRIPTOR.fields_by_name[name].number << 3 | _BYTES for name in ("frame", "data"))
_PART_CHECKSUM, _CHUNK_CHECKSUM = (
    bytes([message.DESCRIPTOR.fields_by_name["checksum"].number << 3 | _FIXED32]) for message in (Part, Feeding)
)
_CHECKSUM_BYTES = 1 + 4
_REPORT_DATA = bytes([Report.DESCRIPTOR.fields_by_name["data"].number << 3 | _BYTES])
_REPORT_CHECKSUM = bytes([Report.DESCRIPTOR.fields_by_name["checksum"].number << 3 | _FIXED32])
_CHUNK_DATA = bytes([Feeding.DESCRIPTOR.fields_by_name["data"].number << 3 | _BYTES])
_LENGTH_BYTES = 4  # of 7 bits each, whatever the length
_HEAD_BYTES = len(_CHUNK_DATA) + _LENGTH_BYTES

# Here the cost per message matters, and half a millisecond of the event loops does not
CHUNK_BYTES = 1 << 19
MOST_CHUNK_BYTES = 2 * CHUNK_BYTES  # when small tensors are joined


@dataclass(frozen=True)
class Wire:
    """The format of parts on one kind of link, known to both ends."""

    part_bytes: int  # of payload
    has_checksums: bool


# Most prompt chunks are one part, which travels while the MLX thread computes; of several each waits for a step's end.
_PART_BYTES = 15 << 20  # a message is longer by a frame's header
PLAIN = Wire(_PART_BYTES, has_checksums=True)
ENCRYPTED = Wire(_PART_BYTES, has_checksums=False)  # encryption already detects changes


def most_chunk_rows(row_bytes: int) -> int:
    """Return the most rows of a prompt chunk whose rows take so many bytes between stages."""
    return max(1, _MOST_CHUNK_BYTES // row_bytes)


def most_lane_rows(spec: ModelSpec) -> int:
    """Return the most rows of a lane, so that neither its frame nor its result is too long.

    Half of the rows of a canvas's longest window come back as an expected embedding each.
    """
    most = most_chunk_rows(spec.row_bytes)
    return min(most, 2 * _MOST_SOFT_BYTES // spec.row_bytes) if spec.refines else most


def payload_bytes(frame: Frame) -> int:
    """Return the size of the payload of this header. Raises FrameError if its dtype or size is invalid."""
    hidden = frame.hidden
    if hidden.dtype == DType.DTYPE_UNSPECIFIED:
        return 0
    if hidden.dtype not in DTYPE_BYTES:
        raise FrameError(f"expected hidden states of a known dtype, got {hidden.dtype} (step {frame.step})")
    if (rank := len(hidden.shape)) > MOST_SIZES:
        raise FrameError(f"expected hidden states of at most {MOST_SIZES} sizes, got {rank} (step {frame.step})")
    size = math.prod(hidden.shape) * DTYPE_BYTES[hidden.dtype]
    if size > _MOST_PAYLOAD_BYTES:
        raise FrameError(
            f"expected at most {_MOST_PAYLOAD_BYTES} bytes of hidden states, got {size} (step {frame.step})"
        )
    return size


def cut(payload: memoryview, part_bytes: int = PLAIN.part_bytes) -> Iterator[memoryview]:
    """Yield the payload in pieces, one per part: at least one, which may be empty."""
    return (payload[at : at + part_bytes] for at in range(0, max(1, len(payload)), part_bytes))


def checksum_seed(number: int, step: int) -> int:
    """Return the seed of a part's checksum, which makes a part of another frame as wrong as damaged bytes."""
    return step & 0xFFFFFFFF if number else 0


def write_part(number: int, header: bytes, data: memoryview, seed: int | None = None) -> bytes:
    """Serialise a `Part`, with a checksum if there is a seed. The data are copied once."""
    count = (bytes([_NUMBER]), _varint(number)) if number else ()
    frame = (bytes([_FRAME]), _varint(len(header)), header) if header else ()
    payload = (bytes([_DATA]), _varint(len(data)), data) if data else ()
    fields = (*count, *frame, *payload)
    if seed is None:
        return b"".join(fields)
    return b"".join((*fields, _PART_CHECKSUM, checksum_of(fields, seed).to_bytes(4, "little")))


def checked_part(message: bytes, seed: int) -> memoryview:
    """Return the part without its checksum. Raises FrameError if that is missing or wrong."""
    view = memoryview(message)
    content, checksum = view[:-_CHECKSUM_BYTES], view[-_CHECKSUM_BYTES:]
    if checksum != _PART_CHECKSUM + zlib.crc32(content, seed).to_bytes(4, "little"):
        raise FrameError(f"expected a part of a frame as it was sent, got {len(message)} bytes with a wrong checksum")
    return content


def read_part(message: bytes | memoryview) -> tuple[int, memoryview, memoryview]:
    """Return number, header and data of a serialised `Part`, without a copy. Raises FrameError if it is malformed."""
    view, at = memoryview(message), 0
    fields: dict[int, Any] = {}
    try:
        while at < len(view):
            key, at = _read_varint(message, at)
            value, at = _read_varint(message, at)
            if key in fields:
                raise _no_part(message)  # else a long message of numbers alone would take seconds
            if key == _NUMBER:
                fields[key] = value
            elif key in (_FRAME, _DATA) and at + value <= len(view):
                fields[key] = view[at : at + value]
                at += value
            else:
                raise _no_part(message)
    except IndexError:
        raise FrameError(f"expected a part of a frame, got {len(message)} bytes that end in the middle") from None
    return fields.get(_NUMBER, 0), fields.get(_FRAME, view[:0]), fields.get(_DATA, view[:0])


@dataclass
class Arrival:
    """A frame's header and the pieces of its payload."""

    header: Frame
    payload: list[memoryview] = field(default_factory=list)
    num_missing: int = 0  # bytes


class FrameAssembler:
    """Assembles frames from parts, strictly in order. A refusal ends the hop: the next frame cannot be found."""

    def __init__(self, check: Callable[[Frame], None], wire: Wire = PLAIN) -> None:
        """`check` raises FrameError for a header whose payload is not accepted."""
        self._check = check
        self._wire = wire
        self._arriving: Arrival | None = None

    def add(self, message: bytes) -> Arrival | None:
        """Take the next part. Return the frame if this completes one.

        Raises:
            FrameError: the part is malformed, damaged, not the next one, of the wrong length, or `check` refuses.
        """
        arriving = self._arriving
        next_number, step = (len(arriving.payload), arriving.header.step) if arriving else (0, 0)
        content = checked_part(message, checksum_seed(next_number, step)) if self._wire.has_checksums else message
        number, header, data = read_part(content)
        if number != next_number:
            raise self._unexpected(f"part {number}")
        if arriving is None:
            arriving = self._begin(header)
        expected = min(self._wire.part_bytes, arriving.num_missing)
        if len(data) != expected:
            found = f"got {len(data)} (step {arriving.header.step})"
            raise FrameError(f"expected {expected} bytes in part {number}, {found}")
        arriving.payload.append(data)
        arriving.num_missing -= len(data)
        self._arriving = arriving if arriving.num_missing else None
        return None if self._arriving else arriving

    def end(self) -> None:
        """Raise FrameError if the hop ended within a frame."""
        if self._arriving is not None:
            raise self._unexpected("the end of the hop")

    def _begin(self, header: memoryview) -> Arrival:
        try:
            frame = Frame.FromString(header)  # type: ignore[arg-type]
        except DecodeError:
            raise FrameError(f"expected the header of a frame, got {len(header)} malformed bytes") from None
        self._check(frame)
        return Arrival(frame, num_missing=payload_bytes(frame))

    def _unexpected(self, found: str) -> FrameError:
        if self._arriving is None:
            return FrameError(f"expected the first part of a frame, got {found}")
        return FrameError(
            f"expected part {len(self._arriving.payload)} (step {self._arriving.header.step}), got {found}"
        )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a number and the offset after it. Raises IndexError at the end, FrameError if it is too long."""
    value = 0
    for place, byte in enumerate(message[at : at + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte <= 0x7F:
            return value, at + place + 1
    if at + _MOST_VARINT_BYTES > len(message):
        raise IndexError
    raise _no_part(message)


def _no_part(message: bytes | memoryview) -> FrameError:
    return FrameError(f"expected a part of a frame, got {len(message)} malformed bytes")


@dataclass(frozen=True)
class Chunk:
    """Some bytes of a file, and their checksum if they have one."""

    data: memoryview
    checksum: int | None


def write_chunk(blocks: Sequence[bytes], offset: int | None) -> bytes:
    """Serialise a `Feeding` with these blocks as its data.

    Args:
        offset: their place in the file, which adds a checksum; None for none.
    """
    head = _head(sum(map(len, blocks)))
    if offset is None:
        return b"".join((head, *blocks))
    return b"".join((head, *blocks, _CHUNK_CHECKSUM, checksum_of(blocks, offset).to_bytes(4, "little")))


def read_transfer(message: bytes) -> Feeding | Chunk:
    """Read a message; a chunk is not copied. Raises FrameError if the message is malformed."""
    view = memoryview(message)
    if view[:1] == _CHUNK_DATA:
        for num_behind in (0, _CHECKSUM_BYTES):
            data, behind = view[_HEAD_BYTES : len(view) - num_behind], view[len(view) - num_behind :]
            if view[:_HEAD_BYTES] == _head(len(data)) and (not num_behind or behind[:1] == _CHUNK_CHECKSUM):
                return Chunk(data, int.from_bytes(behind[1:], "little") if num_behind else None)
    else:
        try:
            return Feeding.FromString(message)
        except DecodeError:
            pass
    raise FrameError(f"expected a message of a transfer of weights, got {len(message)} malformed bytes")


def checksum_of(blocks: Sequence[bytes | memoryview], offset: int) -> int:
    """Return the CRC-32 of blocks at this offset of a file: bytes of another offset are as wrong as damaged ones."""
    found = offset & 0xFFFFFFFF
    for block in blocks:
        found = zlib.crc32(block, found)
    return found


def _head(length: int) -> bytes:
    """Return the field key and the length that precede so many bytes of data."""
    sizes = [length >> 7 * i & 0x7F for i in range(_LENGTH_BYTES)]
    return _CHUNK_DATA + bytes([*(size | 0x80 for size in sizes[:-1]), sizes[-1]])


def write_report(report: Report, blocks: Sequence[bytes | memoryview] = ()) -> bytes:
    """Serialise a report with its checksum. The blocks become its data; they are copied once."""
    data = (_REPORT_DATA, _varint(sum(map(len, blocks))), *blocks) if blocks else ()
    fields = (report.SerializeToString(), *data)
    return b"".join((*fields, _REPORT_CHECKSUM, checksum_of(fields, 0).to_bytes(4, "little")))


def read_report(message: bytes, node: str) -> tuple[Report, memoryview]:
    """Return a report and its data, without a copy. Raises FrameError if it differs from what `node` wrote."""
    view = memoryview(message)
    content, checksum = view[:-_CHECKSUM_BYTES], view[-_CHECKSUM_BYTES:]
    if checksum != _REPORT_CHECKSUM + zlib.crc32(content).to_bytes(4, "little"):
        raise FrameError("expected a report as it was sent, got one with a wrong checksum", node=node)
    at = end = 0
    data = view[:0]
    keys: set[bytes] = set()
    try:
        while at < len(content):  # all fields are of bytes
            key = bytes(content[at : at + 1])
            if key in keys:
                raise DecodeError  # else a long message of empty fields would take seconds
            keys.add(key)
            length, begin = _read_varint(content, at + 1)
            if key == _REPORT_DATA:
                data, end = content[begin : begin + length], at
                break
            at = end = begin + length
        return Report.FromString(content[:end]), data  # type: ignore[arg-type]
    except (DecodeError, IndexError):
        raise FrameError(f"expected a report, got {len(message)} malformed bytes", node=node) from None
