"""Frames in parts: what one end cuts the other joins, and whatever was changed or is not as it has to be is refused."""

import contextlib
import random
import re
import zlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.brigade_pb2 import (
    DTYPE_BFLOAT16,
    DTYPE_FLOAT32,
    Announcement,
    DType,
    Feeding,
    Frame,
    Opening,
    Part,
    Tensor,
    Timing,
    Window,
)
from tests.unit.fuzz import fuzzed, nearly, with_one_bit_flipped, within
from worker.compute.header import check_header
from worker.errors import FrameError
from worker.node.framing import (
    ENCRYPTED,
    PLAIN,
    Arrival,
    Chunk,
    FrameAssembler,
    Wire,
    checksum_of,
    checksum_seed,
    cut,
    most_chunk_rows,
    payload_bytes,
    read_part,
    read_transfer,
    write_chunk,
    write_part,
)
from worker.node.hop import pack

PART = 1 << 17
BARE = Wire(PART, has_checksums=False)
SIZES = (0, 4, PART - 4, PART, PART + 4, 3 * PART)


def assembler(wire: Wire = BARE) -> FrameAssembler:
    """An end of a hop that accepts every header, by default as behind an encrypted link."""
    return FrameAssembler(lambda header: None, wire)


def header(size: int, step: int = 41) -> Frame:
    """A frame with so many bytes of hidden states."""
    frame = Frame(epoch=1, step=step)
    if size:
        frame.hidden.CopyFrom(Tensor(dtype=DTYPE_FLOAT32, shape=[1, size // 4, 1]))
    return frame


def payload(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def parts_of(size: int, step: int = 41, wire: Wire = BARE) -> list[bytes]:
    raw = header(size, step).SerializeToString()
    pieces = enumerate(cut(memoryview(payload(size)), wire.part_bytes))
    return [write_part(number, b"" if number else raw, data) for number, data in pieces]


@pytest.mark.parametrize("wire", [BARE, Wire(2 * PART, has_checksums=False)], ids=["small parts", "large parts"])
@pytest.mark.parametrize("size", SIZES)
def test_a_frame_comes_out_as_it_went_in_and_only_once_its_last_part_is_there(size: int, wire: Wire) -> None:
    joiner = assembler(wire)
    beside = len(write_part(2**32 - 1, header(size).SerializeToString(), memoryview(b""))) + 5
    for step in (41, 42):
        *first, last = parts_of(size, step, wire)
        assert all(wire.part_bytes <= len(part) <= wire.part_bytes + beside for part in first)
        assert len(last) <= wire.part_bytes + beside
        assert [joiner.add(part) for part in first] == [None] * len(first)
        arrival = joiner.add(last)
        assert arrival and (arrival.header.step, b"".join(arrival.payload)) == (step, payload(size))
    joiner.end()


def test_a_part_of_another_size_is_refused() -> None:
    with pytest.raises(FrameError, match=rf"^expected {2 * PART} bytes in part 0, got {PART} "):
        assembler(Wire(2 * PART, has_checksums=False)).add(parts_of(3 * PART)[0])


@pytest.mark.parametrize(("number", "size"), [(0, 0), (1, 1), (127, 127), (128, 128), (300, 70_000), (2**32 - 1, 0)])
def test_a_part_is_what_the_proto_says_in_both_directions_and_reading_it_copies_nothing(number: int, size: int) -> None:
    frame, data = header(8), payload(size)
    message = Part(number=number, frame=frame, data=data).SerializeToString(deterministic=True)
    assert write_part(number, frame.SerializeToString(), memoryview(data)) == message
    found_number, found_header, found_data = read_part(message)
    assert (found_number, Frame.FromString(bytes(found_header)), bytes(found_data)) == (number, frame, data)
    assert not size or found_data.obj is message


def short_or_long(size: int) -> bytes:
    return write_part(1, b"", memoryview(bytes(size)))


THREE, LONG, ODD = parts_of(2 * PART + 8), parts_of(3 * PART)[:1], parts_of(PART + 8)[:1]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (THREE[1:2], "expected the first part of a frame, got part 1"),
        ([*THREE, THREE[2]], "expected the first part of a frame, got part 2"),
        ([THREE[0], THREE[2]], "expected part 1 (step 41), got part 2"),
        ([*THREE[:2], THREE[1]], "expected part 2 (step 41), got part 1"),
        ([*THREE[:2], THREE[0]], "expected part 2 (step 41), got part 0"),
        ([*LONG, short_or_long(0)], f"expected {PART} bytes in part 1, got 0 (step 41)"),
        ([*LONG, short_or_long(PART - 1)], f"expected {PART} bytes in part 1, got {PART - 1} (step 41)"),
        ([*LONG, short_or_long(PART + 1)], f"expected {PART} bytes in part 1, got {PART + 1} (step 41)"),
        ([*ODD, short_or_long(9)], "expected 8 bytes in part 1, got 9 (step 41)"),
    ],
    ids=["no first", "one too many", "left out", "twice", "too early", "empty", "short", "long", "long at the end"],
)
def test_a_part_that_is_not_the_next_or_has_another_length_is_refused(parts: list[bytes], expected: str) -> None:
    joiner = assembler()
    for part in parts[:-1]:
        joiner.add(part)
    with pytest.raises(FrameError, match=f"^{re.escape(expected)}$"):
        joiner.add(parts[-1])


def test_a_hop_that_ends_within_a_frame_is_refused() -> None:
    joiner = assembler()
    joiner.add(THREE[0])
    with pytest.raises(FrameError, match=r"^expected part 1 \(step 41\), got the end of the hop$"):
        joiner.end()


def test_a_header_is_refused_before_its_payload_is_waited_for() -> None:
    def refuse(frame: Frame) -> None:
        raise FrameError(f"not step {frame.step}")

    with pytest.raises(FrameError, match=r"^not step 41$"):
        FrameAssembler(refuse, BARE).add(THREE[0])


@pytest.mark.parametrize(
    "message",
    [
        b"\x08", b"\x12\x05abc", b"\x1a\xff", b"\xff" * 40, b"\x20\x01", b"\x09" + bytes(8), b"\x12\x02\xff\xff",
        b"\xff" * 100, b"\x08" + b"\xff" * 100,
    ],
)  # fmt: skip
def test_bytes_that_are_no_part_are_refused(message: bytes) -> None:
    with pytest.raises(FrameError, match=r"^expected (a part|the header) of a frame, got "):
        assembler().add(message)


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


# Checksums, where the link has none of its own

CHECKED = Wire(PART, has_checksums=True)
WRONG = "expected a part of a frame as it was sent, got .* bytes with a wrong checksum"


def sent(num_values: int, step: int = 41) -> list[bytes]:
    frame = Frame(epoch=3, step=step, windows=[Window(slot=2, tokens=[5, 6], prefix_hash=2**63)], timings=[Timing()])
    return pack(frame, mx.random.normal((1, 1, num_values)) if num_values else None, CHECKED)


@pytest.mark.parametrize("num_values", [0, 3])
def test_any_flipped_bit_of_a_frame_is_refused(num_values: int) -> None:
    [part] = sent(num_values)
    assert assembler(CHECKED).add(part) is not None
    for flipped in with_one_bit_flipped(part):
        with pytest.raises(FrameError, match=WRONG):
            assembler(CHECKED).add(flipped)


def test_flipped_bits_in_any_of_several_parts_are_refused() -> None:
    numbers = random.Random(3)
    parts = sent(PART // 4 * 2 + 5)
    assert len(parts) == 3 and [*map(assembler(CHECKED).add, parts)][2] is not None
    for number, part in enumerate(parts):
        for at in (*range(12), *range(len(part) - 12, len(part)), *(numbers.randrange(len(part)) for _ in range(9))):
            changed = bytearray(part)
            changed[at] ^= 1 << numbers.randrange(8)
            with pytest.raises(FrameError, match=WRONG):
                [*map(assembler(CHECKED).add, [*parts[:number], bytes(changed), *parts[number + 1 :]])]


def test_a_part_of_another_frame_is_refused_though_it_is_as_long_and_sound() -> None:
    joiner = assembler(CHECKED)
    joiner.add(sent(PART // 4 * 2, step=41)[0])
    with pytest.raises(FrameError, match=WRONG):
        joiner.add(sent(PART // 4 * 2, step=42)[1])


def test_a_part_without_a_checksum_is_refused_where_there_has_to_be_one() -> None:
    (part,) = pack(Frame(step=41, timings=[Timing()]), None, ENCRYPTED)
    assert assembler(ENCRYPTED).add(part) is not None
    for message in (part, b""):
        with pytest.raises(FrameError, match=WRONG):
            assembler(PLAIN).add(message)


def test_the_checksum_is_a_field_of_the_proto_and_the_last_one() -> None:
    (part,) = sent(3)
    read = Part.FromString(part)
    assert part.endswith(read.checksum.to_bytes(4, "little")) and read.frame.step == 41
    assert read.SerializeToString() == part


# Bytes of a peer, at random, nearly right or extreme: a frame, or a FrameError in a few words; little memory

D = 16
PAYLOAD = bytes(4 * D * 4)
MANY = 1 << 18  # more than any frame has of anything


def check(frame: Frame) -> None:
    check_header(frame, 1, D, DTYPE_FLOAT32)


def sound_frame(**more: Any) -> Frame:
    window = Window(slot=3, base=2, tokens=[5, 6], masks=2, guessed=1, wanted=1, positions=[2, 3, 6, 7])
    hidden = Tensor(dtype=DTYPE_FLOAT32, shape=[1, 4, D])
    frame = Frame(epoch=1, step=4, opened=[Opening(slot=3)], windows=[window], hidden=hidden, timings=[Timing()])
    frame.MergeFrom(Frame(**more))
    return frame


def part(frame: Frame, data: bytes = PAYLOAD) -> bytes:
    return write_part(0, frame.SerializeToString(), memoryview(data), checksum_seed(0, 0))


def sealed(content: bytes) -> bytes:
    """With a right checksum, as an attacker would add it."""
    return content + b"\x25" + zlib.crc32(content).to_bytes(4, "little")


def take(messages: Sequence[bytes], wire: Wire = PLAIN) -> list[Arrival]:
    """The frames that come of these messages up to the one that is refused, if any is."""
    joiner, found = FrameAssembler(check, wire), []
    try:
        for message in messages:
            found.append(joiner.add(message))  # noqa: PERF401 - what came before a refusal counts
    except FrameError as error:
        assert len(str(error)) < 300
    return [arrival for arrival in found if arrival]


SOUND = part(sound_frame())


@fuzzed(60)
@given(st.lists(st.binary(max_size=60) | nearly(SOUND), max_size=4))
def test_fuzz_no_part_that_was_changed_is_taken(messages: list[bytes]) -> None:
    with within(1 << 20):
        for arrival in take(messages):
            assert arrival.header == sound_frame() and b"".join(arrival.payload) == PAYLOAD
    assert [arrival.header for arrival in take([SOUND])] == [sound_frame()]


@fuzzed(60)
@given(st.lists(st.binary(max_size=60) | nearly(SOUND[:-5]), max_size=4), st.booleans())
def test_fuzz_what_has_a_right_checksum_is_taken_whole_or_refused(contents: list[bytes], has_checksums: bool) -> None:
    messages = [sealed(content) if has_checksums else content for content in contents]
    with within(1 << 20):
        for arrival in take(messages, PLAIN if has_checksums else BARE):
            check(arrival.header)
            assert sum(map(len, arrival.payload)) == (len(PAYLOAD) if arrival.header.windows else 0)


U32 = st.sampled_from([0, 1, 2, 3, 7, 2**31, 2**32 - 1]) | st.integers(0, 4)
WINDOWS = st.builds(
    Window, slot=U32, base=U32, tokens=st.lists(U32, max_size=4), wanted=U32, masks=U32, guessed=U32,
    positions=st.lists(U32, max_size=6),
)  # fmt: skip
FRAMES = st.builds(
    Frame,
    opened=st.lists(st.builds(Opening, slot=U32), max_size=3),
    windows=st.lists(WINDOWS, max_size=3),
    hidden=st.builds(Tensor, dtype=st.sampled_from(DType.values()), shape=st.lists(U32, max_size=4)),
    timings=st.lists(st.builds(Timing, stage=U32), max_size=2),
)


@fuzzed(60)
@given(FRAMES)
def test_fuzz_a_header_of_any_numbers_is_checked_without_memory_for_them(frame: Frame) -> None:
    with within(1 << 18):
        take([part(frame, b"")])


@pytest.mark.parametrize(
    "more",
    [
        {"windows": [Window(slot=3)] * MANY},
        {"opened": [Opening(slot=3)] * MANY},
        {"timings": [Timing()] * MANY},
        {"hidden": Tensor(shape=[2**32 - 1] * MANY)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_message_of_a_million_things_is_refused_in_little_memory(more: dict[str, Any]) -> None:
    message = part(sound_frame(**more))
    with within(32 << 20):
        assert take([message]) == []


def test_repeated_fields_and_sizes_are_refused_at_the_first_that_is_too_many() -> None:
    with within(1 << 20), pytest.raises(FrameError, match="expected a part of a frame, got 524288 malformed bytes"):
        assembler().add(b"\x08\x00" * MANY)
    frame = Frame(hidden=Tensor(dtype=DTYPE_FLOAT32, shape=[2**32 - 1] * MANY))
    with within(64 << 20), pytest.raises(FrameError, match="of at most 8 sizes, got 262144"):
        assembler(PLAIN).add(part(frame))


# Chunks of weights


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
def test_a_transfer_that_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(FrameError, match=f"got {len(message)} malformed bytes"):
        read_transfer(message)


@fuzzed(60)
@given(nearly(write_chunk([b"abcdef"], 3)) | st.binary(max_size=30))
def test_fuzz_a_transfer_is_read_or_refused(message: bytes) -> None:
    with within(1 << 20), contextlib.suppress(FrameError):
        read_transfer(message)
