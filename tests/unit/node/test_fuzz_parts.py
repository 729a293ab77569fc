"""Bytes of a peer, at random, nearly right or extreme: a frame, or a FrameError in a few words; little memory."""

import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos.brigade_pb2 import DTYPE_FLOAT32, Alternative, DType, Frame, Opening, Result, Sample, Tensor, Timing, Window
from tests.unit.fuzz import fuzzed, nearly, within
from worker.compute.header import check_header, check_result
from worker.errors import FrameError
from worker.node.framing import PLAIN, Arrival, FrameAssembler, Wire, checksum_seed, write_part

D = 16
BARE = Wire(PLAIN.part_bytes, has_checksums=False)
U32 = st.sampled_from([0, 1, 2, 3, 7, 2**31, 2**32 - 1]) | st.integers(0, 4)
MANY = 1 << 18  # more than any frame or result has of anything


def check(frame: Frame) -> None:
    check_header(frame, 1, D, DTYPE_FLOAT32)


def sound_frame() -> Frame:
    window = Window(slot=3, base=2, tokens=[5, 6], masks=2, guessed=1, wanted=1, positions=[2, 3, 6, 7])
    hidden = Tensor(dtype=DTYPE_FLOAT32, shape=[1, 4, D])
    return Frame(epoch=1, step=4, opened=[Opening(slot=3)], windows=[window], hidden=hidden, timings=[Timing()])


def part(frame: Frame, data: bytes = bytes(4 * D * 4)) -> bytes:
    return write_part(0, frame.SerializeToString(), memoryview(data), checksum_seed(0, 0))


def sealed(content: bytes) -> bytes:
    """With a right checksum, as somebody adds it who means harm."""
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
def test_no_part_that_was_changed_is_taken(messages: list[bytes]) -> None:
    with within(1 << 20):
        for arrival in take(messages):
            assert arrival.header == sound_frame() and b"".join(arrival.payload) == bytes(4 * D * 4)
    assert [arrival.header for arrival in take([SOUND])] == [sound_frame()]


@fuzzed(60)
@given(st.lists(st.binary(max_size=60) | nearly(SOUND[:-5]), max_size=4), st.booleans())
def test_whatever_has_a_right_checksum_or_needs_none_is_taken_whole_or_refused(
    contents: list[bytes], has_checksums: bool
) -> None:
    messages = [sealed(content) if has_checksums else content for content in contents]
    with within(1 << 20):
        for arrival in take(messages, PLAIN if has_checksums else BARE):
            check(arrival.header)
            assert sum(map(len, arrival.payload)) == (4 * D * 4 if arrival.header.windows else 0)


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
def test_a_header_of_any_numbers_is_checked_without_memory_for_them(frame: Frame) -> None:
    with within(1 << 18):
        take([part(frame, b"")])


def many(field: str, of: list[Any]) -> Frame:
    frame = sound_frame()
    frame.MergeFrom(Frame(**{field: of}))  # type: ignore[arg-type]
    return frame


def test_a_message_of_a_million_things_is_refused_in_a_few_words() -> None:
    for frame in (
        many("windows", [Window(slot=3)] * MANY),
        many("opened", [Opening(slot=3)] * MANY),
        many("timings", [Timing()] * MANY),
        many("hidden", Tensor(shape=[2**32 - 1] * MANY)),  # type: ignore[arg-type]
    ):
        message = part(frame)
        with within(32 << 20):
            assert take([message]) == []
    with within(1 << 20), pytest.raises(FrameError, match="expected a part of a frame, got 524288 malformed bytes"):
        FrameAssembler(check, BARE).add(b"\x08\x00" * MANY)  # at the first field that comes twice
    frame = Frame(hidden=Tensor(dtype=DTYPE_FLOAT32, shape=[2**32 - 1] * MANY))
    with within(64 << 20), pytest.raises(FrameError, match="of at most 8 sizes, got 262144"):
        FrameAssembler(lambda header: None).add(part(frame))  # which nobody checks
    result = Result(samples=[Sample(slot=3, token=5)] * MANY)
    with within(1 << 16), pytest.raises(FrameError, match=r"\(262144, 0, 0\)") as refused:
        check_result(result, {3: (1, 0, 0)}, 50, "mini")
    assert len(str(refused.value)) < 300


# Results


RESULTS = st.builds(
    Result,
    samples=st.lists(st.builds(Sample, slot=U32, token=U32), max_size=4),
    guesses=st.lists(st.builds(Sample, slot=U32, token=U32), max_size=4),
)


@fuzzed(60)
@given(RESULTS | nearly(Result(step=3, samples=[Sample(slot=3, token=5)]).SerializeToString()), st.integers(0, 3))
def test_a_result_is_what_was_asked_or_refused_by_the_nodes_name(result: Result | bytes, wanted: int) -> None:
    try:
        found = Result.FromString(result) if isinstance(result, bytes) else result
    except DecodeError:
        return
    try:
        check_result(found, {3: (wanted, 0, 0)}, 50, "mini")
    except FrameError as error:
        assert error.node == "mini" and len(str(error)) < 300
    else:
        answers = [sample for sample in found.samples if sample.slot == 3]
        failed = {failure.slot for failure in found.failures}
        assert 3 in failed or (len(answers) == wanted and not found.guesses)
        assert all(sample.token < 50 for sample in found.samples)


@pytest.mark.parametrize(("token", "count", "wanted"), [(50, 1, 1), (49, 2, 1), (49, 1, 0), (0, MANY, 5)])
def test_alternatives_that_nobody_wants_or_beyond_the_vocabulary_are_refused(
    token: int, count: int, wanted: int
) -> None:
    result = Result(samples=[Sample(slot=3, token=5, alternatives=[Alternative(token=token)] * count)])
    with within(1 << 16), pytest.raises(FrameError, match=r"alternatives for slot 3|tokens below 50"):
        check_result(result, {3: (1, 0, 0)}, 50, "mini", {3: wanted})
    sound = Result(samples=[Sample(slot=3, token=5, alternatives=[Alternative(token=49)])])
    check_result(sound, {3: (1, 0, 0)}, 50, "mini", {3: 1})
