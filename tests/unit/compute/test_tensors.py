"""Hidden states as bytes: what goes in on one node comes out on another."""

import mlx.core as mx
import numpy as np
import pytest

from protos.brigade_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT16, DTYPE_FLOAT32, DTYPE_UNSPECIFIED, DType, Tensor
from worker.compute.tensors import dtype_name, from_array, to_array
from worker.errors import FrameError

DTYPES = {DTYPE_FLOAT32: mx.float32, DTYPE_FLOAT16: mx.float16, DTYPE_BFLOAT16: mx.bfloat16}
WORDS = {4: np.uint32, 2: np.uint16}


def bits(array: mx.array) -> np.ndarray:
    word = WORDS[array.dtype.size]
    return np.array(array.reshape(-1).view(mx.uint32 if word is np.uint32 else mx.uint16))


def travelled(array: mx.array) -> mx.array:
    return to_array(Tensor.FromString(from_array(array).SerializeToString()))


def every_pattern(dtype: mx.Dtype) -> mx.array:
    """All 65536 patterns of 16 bits; for 32 bits the same as upper halves, over a changing lower half."""
    low = np.arange(65536, dtype=np.uint32)
    words = low.astype(np.uint16) if dtype.size == 2 else (low << 16) | (low * 40503 & 0xFFFF)
    return mx.array(words).view(dtype).reshape(1, 256, 256)


@pytest.mark.parametrize(("enum", "dtype"), DTYPES.items(), ids=map(dtype_name, DTYPES))
def test_every_bit_pattern_survives_with_dtype_and_shape(enum: DType, dtype: mx.Dtype) -> None:
    """Among them both zeros, subnormals, infinities and every NaN."""
    sent = every_pattern(dtype)
    assert from_array(sent).dtype == enum
    found = travelled(sent)
    assert found.dtype == dtype and found.shape == sent.shape
    np.testing.assert_array_equal(bits(found), bits(sent))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 64), (1, 512, 3), (5,), (1, 0, 8)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_any_shape_survives(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    sent = mx.random.normal(shape).astype(dtype)
    found = travelled(sent)
    assert found.shape == shape and mx.array_equal(found, sent)


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, 3:5], lambda x: x.swapaxes(1, 2), lambda x: x[..., ::2], lambda x: mx.broadcast_to(x, (1, 8, 6))],
    ids=["rows", "swapped", "every second", "broadcast"],
)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_view_travels_as_what_it_shows(dtype: mx.Dtype, view) -> None:  # noqa: ANN001
    source = mx.arange(48).reshape(1, 8, 6).astype(dtype)
    sent = view(source)
    found = travelled(sent)
    assert found.shape == sent.shape and mx.array_equal(found, sent)


def test_the_bytes_are_little_endian_rows() -> None:
    tensor = from_array(mx.array([[1.0, -2.0]], mx.float32))
    assert tensor.data == np.array([1.0, -2.0], "<f4").tobytes()
    assert list(tensor.shape) == [1, 2]
    assert from_array(mx.array([1.0], mx.bfloat16)).data == b"\x80\x3f"


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.bool_, mx.complex64])
def test_only_the_dtypes_of_hidden_states_travel(dtype: mx.Dtype) -> None:
    with pytest.raises(FrameError, match=r"expected float32, float16 or bfloat16"):
        from_array(mx.zeros((2, 2), dtype))


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ((1, 2, 4), 15),
        ((1, 2, 4), 17),
        ((1, 2, 4), 0),
        ((1, 2, 4), 32),
        ((1, 0, 4), 2),
        ((), 0),
        ((2**32 - 1,) * 3, 16),
    ],
)
def test_data_that_is_not_as_long_as_its_shape_says_is_refused(shape: tuple[int, ...], num_bytes: int) -> None:
    """Before memory is allocated: the last shape would take 10^29 bytes."""
    with pytest.raises(FrameError, match=rf"expected \d+ bytes for .*, got {num_bytes}"):
        to_array(Tensor(dtype=DTYPE_BFLOAT16, shape=shape, data=bytes(num_bytes)))


@pytest.mark.parametrize("dtype", [DTYPE_UNSPECIFIED, 4, 99])
def test_an_unknown_dtype_is_refused_with_its_number(dtype: int) -> None:
    tensor = Tensor.FromString(Tensor(dtype=dtype, shape=(2,), data=bytes(4)).SerializeToString())  # type: ignore[arg-type]
    with pytest.raises(FrameError, match=f"expected a tensor of a known dtype, got {dtype}"):
        to_array(tensor)


def test_every_dtype_of_the_proto_has_an_mlx_dtype_and_a_name() -> None:
    named = {dtype_name(number) for number in DType.values() if number != DTYPE_UNSPECIFIED}
    assert named == {"float32", "float16", "bfloat16"}
    for number in set(DType.values()) - {DTYPE_UNSPECIFIED}:
        assert to_array(Tensor(dtype=number, shape=(0,))).dtype == getattr(mx, dtype_name(number))


def test_a_number_that_is_no_dtype_has_a_name_for_messages_too() -> None:
    assert dtype_name(99) == "dtype 99"  # type: ignore[arg-type]
