"""Safetensors headers at random, nearly right or extreme: tensors, or a ModelError in a few words; little memory."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fuzz import ODD_NUMBERS, fuzzed, nearly, within
from worker.errors import ModelError
from worker.model.headers import read_tensors, tensors_of, unpack_headers

HEADER = {
    "__metadata__": {"format": "mlx"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}
TEXT = json.dumps(HEADER).encode()
FILE = len(TEXT).to_bytes(8, "little") + TEXT + bytes(26)
PACKED = json.dumps({"model.safetensors": {"a": ["F32", [2, 3]], "b": ["BF16", []]}}).encode()

ODD = st.recursive(
    ODD_NUMBERS | st.none() | st.booleans() | st.text(max_size=4) | st.sampled_from(["F32", "1", "9" * 5000, "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
ENTRIES = ODD | st.fixed_dictionaries(
    {}, optional={"dtype": ODD | st.just("F32"), "shape": ODD | st.lists(ODD, max_size=3), "data_offsets": ODD}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


def read(folder: Path, content: bytes) -> None:
    """Read the file, which may be refused."""
    (folder / "x.safetensors").write_bytes(content)
    with within(1 << 20):
        try:
            tensors = read_tensors(folder, "x.safetensors")
        except ModelError as error:
            assert len(str(error)) < 1000
        else:
            assert sum(info.nbytes for info in tensors.values()) <= len(content)


def unlimited(content: Any) -> bytes:
    """JSON with numbers of any length, which Python writes only up to some."""
    if isinstance(content, dict):
        return b"{" + b",".join(unlimited(key) + b":" + unlimited(value) for key, value in content.items()) + b"}"
    if isinstance(content, list):
        return b"[" + b",".join(map(unlimited, content)) + b"]"
    if isinstance(content, int) and abs(content) > 10**300:
        return b"9" * (content.bit_length() // 3)
    return json.dumps(content).encode()


@fuzzed(60)
@given(
    nearly(FILE)
    | st.binary(max_size=40)
    | (
        nearly(TEXT)
        | st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "\ud800"]), ENTRIES, max_size=3).map(unlimited)
    ).map(lambda text: len(text).to_bytes(8, "little") + text + bytes(24))
)
def test_a_file_that_was_changed_is_read_or_refused(folder: Path, content: bytes) -> None:
    read(folder, content)


@fuzzed(60)
@given(
    st.binary(max_size=60)
    | nearly(PACKED).map(zlib.compress)
    | nearly(zlib.compress(PACKED))
    | st.dictionaries(
        st.text(max_size=4), ODD | st.dictionaries(st.text(max_size=2), st.lists(ODD, max_size=3)), max_size=3
    ).map(lambda content: zlib.compress(unlimited(content)))
)
def test_headers_that_another_node_sends_are_read_or_refused(packed: bytes) -> None:
    with within(8 << 20):
        try:
            unpack_headers(packed)
        except ModelError as error:
            assert len(str(error)) < 1000


@pytest.mark.parametrize(
    "shape",
    ["[1e999]", "[-1e999]", "[NaN]", "[" + "9" * 5000 + "]", "[" + "9" * 4000 + "," + "9" * 4000 + "]",
     "[" + ",".join(["9"] * 50_000) + "]", "[" * 100_000],
    ids=["infinite", "minus infinite", "nan", "long", "long product", "many", "deep"],
)  # fmt: skip
def test_sizes_that_no_tensor_has_are_refused_at_once(folder: Path, shape: str) -> None:
    text = f'{{"a": {{"dtype": "F32", "data_offsets": [0, 4], "shape": {shape}}}}}'.encode()
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with within(16 << 20), pytest.raises(ModelError) as refused:
        read_tensors(folder, "x.safetensors")
    assert len(str(refused.value)) < 1000
    with within(16 << 20), pytest.raises(ModelError) as refused:
        unpack_headers(zlib.compress(f'{{"x": {{"a": ["F32", {shape}]}}}}'.encode()))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("file", ["a\0b", "x" * 5000, "\ud800", "..", "a/b", "", "."])
def test_a_file_name_that_no_file_can_have_is_refused(file: str) -> None:
    with pytest.raises(ModelError, match=r"names|surrogates") as refused:
        unpack_headers(zlib.compress(json.dumps({file: {"a": ["F32", [1]]}}).encode()))
    assert len(str(refused.value)) < 1000


def test_a_header_as_long_as_its_file_says_but_not_as_long_as_the_file_is_never_read(folder: Path) -> None:
    with (folder / "x.safetensors").open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)
    with within(1 << 20), pytest.raises(ModelError, match="cut short or not safetensors"):
        read_tensors(folder, "x.safetensors")


def test_a_long_name_is_not_repeated_whole() -> None:
    with pytest.raises(ModelError) as refused:
        tensors_of("x.safetensors", {"n" * 10**6: {"dtype": "F" * 10**6, "shape": [1], "data_offsets": [0, 4]}})
    assert len(str(refused.value)) < 1000
