"""Frames in parts: what is cut on one end is joined on the other, and whatever is not as it has to be is refused."""

import contextlib
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT32, Announcement, Feeding, Frame, Part, Tensor
from tests.unit.fuzz import fuzzed, nearly, within
from worker.errors import FrameError
from worker.node.framing import (
    ENCRYPTED,
    PLAIN,
    Arrival,
    Chunk,
    FrameAssembler,
    Wire,
    checksum_of,
    cut,
    most_chunk_rows,
    payload_bytes,
    read_part,
    read_transfer,
    write_chunk,
    write_part,
)

BARE = Wire(PLAIN.part_bytes, has_checksums=False)
SIZES = (0, 4, PLAIN.part_bytes - 4, PLAIN.part_bytes, PLAIN.part_bytes + 4, 3 * PLAIN.part_bytes)


def accept(header: Frame) -> None:
    pass


def plain() -> FrameAssembler:
    """As behind an encrypted link."""
    return FrameAssembler(accept, BARE)


def header(size: int, step: int = 41) -> Frame:
    """A frame with so many bytes of hidden states."""
    frame = Frame(epoch=1, step=step)
    if size:
        frame.hidden.CopyFrom(Tensor(dtype=DTYPE_FLOAT32, shape=[1, size // 4, 1]))
    return frame


def parts_of(size: int, step: int = 41) -> list[bytes]:
    raw = header(size, step).SerializeToString()
    pieces = enumerate(cut(memoryview(payload(size))))
    return [write_part(number, b"" if number else raw, data) for number, data in pieces]


def payload(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def joined(arrival: Arrival | None) -> tuple[int, bytes]:
    assert arrival is not None
    return arrival.header.step, b"".join(arrival.payload)


def refused(messages: list[bytes], expected: str) -> None:
    """The last of these messages is refused, those before it are taken."""
    joiner = plain()
    for message in messages[:-1]:
        joiner.add(message)
    with pytest.raises(FrameError, match=f"^{re.escape(expected)}$"):
        joiner.add(messages[-1])


@pytest.mark.parametrize("size", SIZES)
def test_a_frame_comes_out_as_it_went_in_and_only_once_its_last_part_is_there(size: int) -> None:
    joiner = plain()
    beside = len(write_part(2**32 - 1, header(size).SerializeToString(), memoryview(b""))) + 5
    for step in (41, 42):
        *first, last = parts_of(size, step)
        assert max(map(len, (*first, last))) <= PLAIN.part_bytes + beside
        assert [joiner.add(part) for part in first] == [None] * len(first)
        assert joined(joiner.add(last)) == (step, payload(size))
    joiner.end()


@pytest.mark.parametrize("size", SIZES)
def test_both_ends_of_an_encrypted_hop_use_larger_parts(size: int) -> None:
    pieces = list(cut(memoryview(payload(size)), ENCRYPTED.part_bytes))
    assert [len(piece) for piece in pieces[:-1]] == [2 * PLAIN.part_bytes] * (len(pieces) - 1)
    joiner, raw = FrameAssembler(accept, ENCRYPTED), header(size).SerializeToString()
    found = [joiner.add(write_part(number, b"" if number else raw, data)) for number, data in enumerate(pieces)]
    assert found[:-1] == [None] * (len(pieces) - 1) and joined(found[-1]) == (41, payload(size))
    with pytest.raises(FrameError, match=rf"^expected {ENCRYPTED.part_bytes} bytes in part 0, got {PLAIN.part_bytes} "):
        FrameAssembler(accept, ENCRYPTED).add(parts_of(3 * PLAIN.part_bytes)[0])


@pytest.mark.parametrize(("number", "size"), [(0, 0), (1, 1), (127, 127), (128, 128), (300, 70_000), (2**32 - 1, 0)])
def test_a_part_is_what_the_proto_says_in_both_directions_and_reading_it_copies_nothing(number: int, size: int) -> None:
    frame, data = header(8), payload(size)
    message = Part(number=number, frame=frame, data=data).SerializeToString(deterministic=True)
    assert write_part(number, frame.SerializeToString(), memoryview(data)) == message
    found_number, found_header, found_data = read_part(message)
    assert (found_number, Frame.FromString(bytes(found_header)), bytes(found_data)) == (number, frame, data)
    assert not size or found_data.obj is message


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda parts: parts[1:2], "expected the first part of a frame, got part 1"),
        (lambda parts: [*parts, parts[2]], "expected the first part of a frame, got part 2"),
        (lambda parts: [parts[0], parts[2]], "expected part 1 (step 41), got part 2"),
        (lambda parts: [*parts[:2], parts[1]], "expected part 2 (step 41), got part 1"),
        (lambda parts: [*parts[:2], parts[0]], "expected part 2 (step 41), got part 0"),
    ],
    ids=["no first", "one too many", "left out", "twice", "another frame too early"],
)
def test_a_part_that_is_not_the_next_is_refused(choose, expected: str) -> None:  # noqa: ANN001
    refused(choose(parts_of(2 * PLAIN.part_bytes + 8)), expected)


@pytest.mark.parametrize(
    ("frame", "size", "wanted"),
    [
        (3 * PLAIN.part_bytes, 0, PLAIN.part_bytes),
        (3 * PLAIN.part_bytes, PLAIN.part_bytes - 1, PLAIN.part_bytes),
        (3 * PLAIN.part_bytes, PLAIN.part_bytes + 1, PLAIN.part_bytes),
        (PLAIN.part_bytes + 8, 9, 8),
    ],
)
def test_a_part_that_is_too_short_or_too_long_is_refused(frame: int, size: int, wanted: int) -> None:
    odd = write_part(1, b"", memoryview(bytes(size)))
    refused([parts_of(frame)[0], odd], f"expected {wanted} bytes in part 1, got {size} (step 41)")


def test_a_hop_that_ends_within_a_frame_is_refused() -> None:
    joiner = plain()
    joiner.add(parts_of(2 * PLAIN.part_bytes)[0])
    with pytest.raises(FrameError, match=r"^expected part 1 \(step 41\), got the end of the hop$"):
        joiner.end()


def test_a_header_is_refused_before_its_payload_is_waited_for() -> None:
    def refuse(frame: Frame) -> None:
        raise FrameError(f"not step {frame.step}")

    with pytest.raises(FrameError, match=r"^not step 41$"):
        FrameAssembler(refuse, BARE).add(parts_of(2 * PLAIN.part_bytes)[0])


@pytest.mark.parametrize(
    "message",
    [
        b"\x08", b"\x12\x05abc", b"\x1a\xff", b"\xff" * 40, b"\x20\x01", b"\x09" + bytes(8), b"\x12\x02\xff\xff",
        b"\xff" * 100, b"\x08" + b"\xff" * 100,
    ],
)  # fmt: skip
def test_bytes_that_are_no_part_are_refused(message: bytes) -> None:
    with pytest.raises(FrameError, match=r"^expected (a part|the header) of a frame, got "):
        plain().add(message)


def test_a_header_says_how_many_bytes_belong_to_it_within_what_a_frame_may_have() -> None:
    def of(*shape: int) -> Frame:
        return Frame(step=3, hidden=Tensor(dtype=DTYPE_BFLOAT16, shape=shape))

    assert [payload_bytes(of(*shape)) for shape in ([], [1, 2, 4], [1, 0, 4])] == [2, 16, 0]
    assert payload_bytes(of(1, 16384, 8192)) == 1 << 28 and payload_bytes(Frame()) == 0
    with pytest.raises(FrameError, match=r"^expected at most 268435456 bytes of .*, got 268451840 \(step 3\)"):
        payload_bytes(of(1, 16385, 8192))
    with pytest.raises(FrameError, match="at most"):
        payload_bytes(of(*[2**32 - 1] * 3))
    with pytest.raises(FrameError, match=r"^expected hidden states of a known dtype, got 99 \(step 0\)"):
        payload_bytes(Frame(hidden=Tensor.FromString(b"\x08\x63\x12\x01\x02")))


@pytest.mark.parametrize(("row_bytes", "expected"), [(512, 131072), (8192, 8192), (16384, 4096), (1 << 27, 1)])
def test_a_chunk_may_have_as_many_rows_as_go_into_64_mebibytes(row_bytes: int, expected: int) -> None:
    assert most_chunk_rows(row_bytes) == expected
    assert payload_bytes(Frame(hidden=Tensor(dtype=DTYPE_FLOAT32, shape=[expected, row_bytes // 4]))) > 0


@pytest.mark.parametrize("pieces", [[b"a"], [b"ab", b"", b"c" * 127], [bytes(range(256)) * 1024], [b""]], ids=len)
@pytest.mark.parametrize("offset", [None, 0, 7 << 40])
def test_a_chunk_is_read_as_it_was_written_and_protobuf_reads_the_same(pieces: list[bytes], offset: int | None) -> None:
    message, data = write_chunk(pieces, offset), b"".join(pieces)
    found = read_transfer(message)
    assert isinstance(found, Chunk) and found.data == data
    assert found.checksum == (None if offset is None else checksum_of([data], offset))
    by_protobuf = Feeding.FromString(message)
    assert (by_protobuf.data, by_protobuf.checksum) == (data, found.checksum or 0)
    said = Feeding(announcement=Announcement(place=-2, size=7, digest="00"))
    assert read_transfer(said.SerializeToString()) == said
    assert len({checksum_of([data], offset) for data in (b"abc", b"abd") for offset in (0, 1, 1 << 31)}) == 6


@pytest.mark.parametrize(
    "message",
    [
        write_chunk([b"abc"], 0)[:-1],
        write_chunk([b"abc"], 0) + b"x",
        write_chunk([b"abc"], None)[:-1],
        write_chunk([b"abc"], None)[:3],
        Feeding(data=b"abc").SerializeToString(),
        b"\x1a",
        b"\x1a\xff\xff\xff\xff",
        b"\xff",
        b"\x0a\xff\x01",
    ],
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(FrameError, match=f"got {len(message)} malformed bytes"):
        read_transfer(message)


@fuzzed(60)
@given(nearly(write_chunk([b"abcdef"], 3)) | st.binary(max_size=30))
def test_bytes_at_random_are_read_or_refused(message: bytes) -> None:
    with within(1 << 20), contextlib.suppress(FrameError):
        read_transfer(message)
