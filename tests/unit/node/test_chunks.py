"""Chunks: what is written is read again, as protobuf would read it, and whatever else comes is refused."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.brigade_pb2 import Announcement, Feeding
from tests.unit.fuzz import fuzzed, nearly, within
from worker.errors import FrameError
from worker.node.chunks import Chunk, checksum_of, read_feeding, write_chunk


@pytest.mark.parametrize("pieces", [[b"a"], [b"ab", b"", b"c" * 127], [bytes(range(256)) * 1024], [b""]], ids=len)
@pytest.mark.parametrize("offset", [None, 0, 7 << 40])
def test_a_chunk_is_read_as_it_was_written_and_protobuf_reads_the_same(pieces: list[bytes], offset: int | None) -> None:
    message, data = write_chunk(pieces, offset), b"".join(pieces)
    found = read_feeding(message)
    assert isinstance(found, Chunk) and found.data == data
    assert found.checksum == (None if offset is None else checksum_of([data], offset))
    by_protobuf = Feeding.FromString(message)
    assert (by_protobuf.data, by_protobuf.checksum) == (data, found.checksum or 0)


def test_a_checksum_tells_place_and_bytes() -> None:
    assert len({checksum_of([data], offset) for data in (b"abc", b"abd") for offset in (0, 1, 1 << 31)}) == 6


def test_other_messages_are_read_by_protobuf() -> None:
    said = Feeding(announcement=Announcement(place=-2, size=7, digest="00"))
    assert read_feeding(said.SerializeToString()) == said


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
    with pytest.raises(FrameError, match=f"got {len(message)} bytes that are none"):
        read_feeding(message)


@fuzzed(60)
@given(nearly(write_chunk([b"abcdef"], 3)) | st.binary(max_size=30))
def test_bytes_at_random_are_read_or_refused(message: bytes) -> None:
    with within(1 << 20), contextlib.suppress(FrameError):
        read_feeding(message)
