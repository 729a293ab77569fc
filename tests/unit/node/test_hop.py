"""Hidden states as bytes: what goes in on one node comes out on another."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from protos.brigade_pb2 import (
    DTYPE_BFLOAT16,
    DTYPE_FLOAT16,
    DTYPE_FLOAT32,
    DTYPE_UINT32,
    DTYPE_UNSPECIFIED,
    DType,
    Frame,
    Segment,
    Segments,
    Tensor,
    Timing,
)
from worker.compute.ahead import received_array
from worker.compute.header import dtype_name
from worker.errors import FrameError
from worker.memory.slot_caches import CacheSegment
from worker.node.framing import ENCRYPTED, PLAIN, Arrival, FrameAssembler, read_report
from worker.node.hop import MOST_TENSORS, pack, pack_segments, unpack_segments

DTYPES = {DTYPE_FLOAT32: mx.float32, DTYPE_FLOAT16: mx.float16, DTYPE_BFLOAT16: mx.bfloat16}


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.reshape(-1).view(mx.uint32 if array.dtype.size == 4 else mx.uint16))


def sent(array: mx.array | None) -> list[bytes]:
    return pack(Frame(step=41, timings=[Timing(stage=0), Timing(stage=1, received=5)]), array)


def arrived(parts: list[bytes]) -> Arrival:
    joiner = FrameAssembler(lambda header: None)
    *before, arrival = map(joiner.add, parts)
    assert before == [None] * len(before) and arrival is not None
    return arrival


def travelled(array: mx.array) -> mx.array:
    arrival = arrived(sent(array))
    found = received_array(arrival.header, arrival.payload)
    assert found is not None and found.shape == array.shape and found.dtype == array.dtype
    return found


def every_pattern(dtype: mx.Dtype) -> mx.array:
    """All 65536 patterns of 16 bits; for 32 bits the same as upper halves, over a changing lower half."""
    low = np.arange(65536, dtype=np.uint32)
    words = low.astype(np.uint16) if dtype.size == 2 else (low << 16) | (low * 40503 & 0xFFFF)
    return mx.array(words).view(dtype).reshape(1, 256, 256)


@pytest.mark.parametrize(("enum", "dtype"), DTYPES.items(), ids=map(dtype_name, DTYPES))
def test_every_bit_pattern_survives_with_dtype_and_shape(enum: DType, dtype: mx.Dtype) -> None:
    """Among them both zeros, subnormals, infinities and every NaN."""
    array = every_pattern(dtype)
    assert arrived(sent(array)).header.hidden.dtype == enum
    np.testing.assert_array_equal(bits(travelled(array)), bits(array))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 64), (1, 512, 3), (5,), (1, 1, PLAIN.part_bytes), (1, 1025, 300)])
def test_any_shape_survives(shape: tuple[int, ...]) -> None:
    array = mx.random.normal(shape).astype(mx.bfloat16)
    assert mx.array_equal(travelled(array), array)


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, 3:5], lambda x: x.swapaxes(1, 2), lambda x: x[..., ::2], lambda x: mx.broadcast_to(x, (1, 8, 6))],
    ids=["rows", "swapped", "every second", "broadcast"],
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_view_travels_as_what_it_shows(dtype: mx.Dtype, view: Callable[[mx.array], mx.array]) -> None:
    array = view(mx.arange(48).reshape(1, 8, 6).astype(dtype))
    assert mx.array_equal(travelled(array), array)


def test_the_bytes_are_little_endian_rows_and_the_last_timing_is_closed() -> None:
    arrival = arrived(sent(mx.array([[1.0, -2.0]], mx.float32)))
    assert b"".join(arrival.payload) == np.array([1.0, -2.0], "<f4").tobytes()
    assert list(arrival.header.hidden.shape) == [1, 2]
    assert b"".join(arrived(sent(mx.array([1.0], mx.bfloat16))).payload) == b"\x80\x3f"
    before, last = arrival.header.timings
    assert (before.sent, last.received) == (0, 5) and last.sent > 0
    (part,) = sent(None)  # a frame without an array is its header alone
    arrival = arrived([part])
    assert arrival.header.step == 41 and received_array(arrival.header, arrival.payload) is None


def test_an_array_that_has_been_taken_is_nobody_elses_memory() -> None:
    """What the parts were is freed or used again while the model is at it."""
    header = arrived(sent(mx.ones((1, 3, 8), mx.bfloat16))).header
    for sizes in ([48], [16, 32]):
        pieces = [memoryview(bytearray(b"\x80\x3f" * (size // 2))) for size in sizes]
        found = received_array(header, pieces)
        for piece in pieces:
            piece[:] = bytes(len(piece))
        assert found is not None and mx.array_equal(found, mx.ones((1, 3, 8), mx.bfloat16))


def test_only_the_dtypes_of_hidden_states_travel_and_each_has_a_name() -> None:
    for dtype in (mx.int32, mx.uint8, mx.bool_, mx.complex64):
        with pytest.raises(FrameError, match=r"expected float32, float16 or bfloat16"):
            sent(mx.zeros((2, 2), dtype))
    others = DTYPE_UINT32, DTYPE_UNSPECIFIED  # of quantised caches
    named = {dtype_name(number) for number in DType.values() if number not in others}
    assert named == {"float32", "float16", "bfloat16"} == {str(dtype).rpartition(".")[2] for dtype in DTYPES.values()}
    assert dtype_name(99) == "dtype 99"  # type: ignore[arg-type]


def test_a_prompt_chunk_is_one_message_and_travels_while_the_next_one_is_computed() -> None:
    rows = mx.zeros((1, 1024, 7168), mx.bfloat16)
    mx.eval(rows)
    for wire in (PLAIN, ENCRYPTED):
        assert len(pack(Frame(timings=[Timing()]), rows, wire)) == 1


def test_segments_of_caches_survive_and_those_whose_bytes_do_not_fit_are_refused() -> None:
    keys, values = (
        (mx.arange(12, dtype=mx.uint32).reshape(1, 2, 3, 2), mx.ones((1, 2, 3, 1))),
        (mx.zeros((1, 2, 3, 4)),),
    )
    held = [CacheSegment(3, 1, 40, keys, values), CacheSegment(4, 0, 40, (mx.ones((1, 2, 3, 2), mx.bfloat16),), ())]
    report, data = read_report(pack_segments(2, 7, 5, held), "w")
    message = report.segments
    found = unpack_segments(message.segments, data)
    assert (message.epoch, message.step, message.slot) == (2, 7, 5)
    assert [(each.number, each.part, each.base, len(each.keys)) for each in found] == [(3, 1, 40, 2), (4, 0, 40, 1)]
    for one, other in zip(found, held, strict=True):
        assert all(a.dtype == b.dtype and mx.array_equal(a, b) for a, b in zip(one.arrays, other.arrays, strict=True))
    for short in (data[:-1], data[:0]):
        with pytest.raises(FrameError, match="expected tensors in the "):
            unpack_segments(message.segments, short)
    with pytest.raises(FrameError, match=r"expected \d+ bytes of segments, got "):
        unpack_segments(message.segments[:1], data)
    for spoil in (
        lambda m: m.tensors.pop(), lambda m: m.tensors[0].shape.append(2),
        lambda m: m.tensors[0].shape.append(2**32 - 1), lambda m: setattr(m.tensors[0], "dtype", 9),
        lambda m: m.tensors[0].shape.extend([1] * 8), lambda m: m.tensors.add(dtype=1, shape=[0, 2**31]),
    ):  # fmt: skip
        broken = Segments.FromString(message.SerializeToString())
        spoil(broken.segments[0])
        with pytest.raises(FrameError, match="bytes of segments, got "):
            unpack_segments(broken.segments, data)
    for many in ([Segment()] * (MOST_TENSORS + 1), [Segment(tensors=[Tensor(dtype=1, shape=[0])] * MOST_TENSORS)]):
        with pytest.raises(FrameError, match="expected at most"):
            unpack_segments(many, data[:0])
