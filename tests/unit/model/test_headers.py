"""Tensor headers in files and from another node: sound, malformed, at random; and a folder that takes what it lacks."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fuzz import ODD_NUMBERS, fuzzed, nearly, within
from tests.unit.model.test_checkpoint import INDEX, TENSORS, file_of, refused, write_folder, write_tensors
from tests.unit.model.test_contents import many
from worker.errors import ModelError
from worker.model.checkpoint import open_folder
from worker.model.headers import TensorInfo, pack_headers, read_tensors, tensors_of, unpack_headers

A, B, C = TENSORS
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HEADER = {
    "__metadata__": {"format": "mlx"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}


def packed(files: Any) -> bytes:
    return zlib.compress(json.dumps(files).encode())


def test_headers_arrive_as_they_were_in_little_space() -> None:
    tensors = many(10, 128)
    sent = pack_headers(tensors)
    assert len(sent) < 5 * len(tensors)
    assert unpack_headers(sent) == tensors
    assert unpack_headers(b"") == {}


MALFORMED = {
    "not packed": b"\0",
    "cut short": packed({FIRST: {A: ["F32", [2, 3]]}})[:-5],
    "no JSON": zlib.compress(b"{"),
    "too deep": zlib.compress(b"[" * 100_000),
    "too long": zlib.compress(bytes(101_000_000), level=1),
    "no tensors": packed({FIRST: []}),
    "no shape": packed({FIRST: {A: ["F32"]}}),
    "another dtype": packed({FIRST: {A: ["Q7", [2, 3]]}}),
    "no dtype": packed({FIRST: {A: [["F32"], [2, 3]]}}),
    "a negative shape": packed({FIRST: {A: ["F32", [-2, -3]]}}),
    **{
        f"the file {file[:20]!a}": packed({file: {A: ["F32", [2, 3]]}})
        for file in ("../a.safetensors", "/a.safetensors", "a\0b", "x" * 5000, "\ud800", "..", "a/b", "", ".")
    },
}


@pytest.mark.parametrize("headers", MALFORMED.values(), ids=MALFORMED)
def test_malformed_headers_from_another_node_are_refused_in_a_few_words(headers: bytes) -> None:
    with pytest.raises(ModelError, match="malformed tensor headers from the coordinator") as caught:
        unpack_headers(headers)
    assert len(str(caught.value)) < 1000


ODD = st.recursive(
    ODD_NUMBERS | st.none() | st.booleans() | st.text(max_size=4) | st.sampled_from(["F32", "1", "9" * 5000, "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
ENTRIES = ODD | st.fixed_dictionaries(
    {}, optional={"dtype": ODD | st.just("F32"), "shape": ODD | st.lists(ODD, max_size=3), "data_offsets": ODD}
)


def unlimited(content: Any) -> bytes:
    """JSON with numbers of any length, which Python writes only up to some."""
    if isinstance(content, dict):
        return b"{" + b",".join(unlimited(key) + b":" + unlimited(value) for key, value in content.items()) + b"}"
    if isinstance(content, list):
        return b"[" + b",".join(map(unlimited, content)) + b"]"
    if isinstance(content, int) and abs(content) > 10**300:
        return b"9" * (content.bit_length() // 3)
    return json.dumps(content).encode()


HEADERS = nearly(json.dumps(HEADER).encode()) | st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__", "\ud800"]), ENTRIES, max_size=3
).map(unlimited)
FILES = nearly(file_of(HEADER, bytes(26))) | st.binary(max_size=40) | HEADERS.map(lambda text: file_of(text, bytes(24)))


@fuzzed(60)
@given(FILES)
def test_fuzz_a_changed_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "x.safetensors").write_bytes(content)
    with within(1 << 20):
        try:
            tensors = read_tensors(folder, "x.safetensors")
        except ModelError as error:
            assert len(str(error)) < 1000
        else:
            assert sum(info.nbytes for info in tensors.values()) <= len(content)


PACKED = json.dumps({"model.safetensors": {"a": ["F32", [2, 3]], "b": ["BF16", []]}}).encode()
ODD_PACKED = st.dictionaries(
    st.text(max_size=4), ODD | st.dictionaries(st.text(max_size=2), st.lists(ODD, max_size=3)), max_size=3
).map(unlimited)


@fuzzed(60)
@given(st.binary(max_size=60) | nearly(zlib.compress(PACKED)) | (nearly(PACKED) | ODD_PACKED).map(zlib.compress))
def test_fuzz_headers_that_another_node_sends_are_read_or_refused(sent: bytes) -> None:
    with within(8 << 20):
        try:
            unpack_headers(sent)
        except ModelError as error:
            assert len(str(error)) < 1000


@pytest.mark.parametrize(
    "shape",
    ["[1e999]", "[-1e999]", "[NaN]", f"[0,{2**31}]", "[" + "9" * 5000 + "]",
     "[" + "9" * 4000 + "," + "9" * 4000 + "]", "[" + ",".join(["9"] * 50_000) + "]", "[" * 100_000],
    ids=["infinite", "minus infinite", "nan", "32 bits", "long", "long product", "many", "deep"],
)  # fmt: skip
def test_sizes_that_no_tensor_has_are_refused_at_once(tmp_path: Path, shape: str) -> None:
    num_bytes = 0 if shape.startswith("[0,") else 4
    text = f'{{"a": {{"dtype": "F32", "data_offsets": [0, {num_bytes}], "shape": {shape}}}}}'.encode()
    (tmp_path / "x.safetensors").write_bytes(file_of(text, bytes(num_bytes)))
    with within(16 << 20), pytest.raises(ModelError) as of_file:
        read_tensors(tmp_path, "x.safetensors")
    with within(16 << 20), pytest.raises(ModelError) as of_node:
        unpack_headers(zlib.compress(f'{{"x": {{"a": ["F32", {shape}]}}}}'.encode()))
    assert len(str(of_file.value)) < 1000 and len(str(of_node.value)) < 1000


def test_a_header_as_long_as_its_file_says_but_not_as_long_as_the_file_is_never_read(tmp_path: Path) -> None:
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((2**40).to_bytes(8, "little"))
        file.truncate(2**41)
    with within(1 << 20), pytest.raises(ModelError, match="cut short or not safetensors"):
        read_tensors(tmp_path, "x.safetensors")


def test_a_long_name_is_not_repeated_whole() -> None:
    with pytest.raises(ModelError) as caught:
        tensors_of("x.safetensors", {"n" * 10**6: {"dtype": "F" * 10**6, "shape": [1], "data_offsets": [0, 4]}})
    assert len(str(caught.value)) < 1000


def in_two(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    write_tensors(folder / FIRST, {A: TENSORS[A]})
    write_tensors(folder / SECOND, {B: TENSORS[B], C: TENSORS[C]})
    (folder / INDEX).write_text(json.dumps({"weight_map": {A: FIRST, B: SECOND, C: SECOND}}))
    return folder


@pytest.fixture
def known(tmp_path: Path) -> dict[str, TensorInfo]:
    """The headers of a whole copy."""
    return dict(open_folder(in_two(write_folder(tmp_path / "whole"))).tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy without the second file."""
    folder = in_two(write_folder(tmp_path / "part"))
    (folder / SECOND).unlink()
    return folder


def test_a_file_that_is_not_here_may_be_known_from_elsewhere(folder: Path, known: dict[str, TensorInfo]) -> None:
    refused(folder, f"{folder / SECOND} is missing", "download it again", "Only a worker may lack files")
    for _ in range(2):
        checkpoint = open_folder(folder, known=known)
        assert checkpoint.tensors == known
        assert checkpoint.lacking([A]) == [] and checkpoint.lacking([A, B, C]) == [SECOND]
        (folder / INDEX).unlink(missing_ok=True)  # and so without an index


def test_a_folder_s_own_index_says_where_what_it_lacks_would_be(folder: Path, known: dict[str, TensorInfo]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {A: FIRST, B: "b.safetensors", C: "c.safetensors"}}))
    found = open_folder(folder, known=known).tensors
    assert [found[name].file for name in (A, B, C)] == [FIRST, "b.safetensors", "c.safetensors"]


def test_a_file_that_is_here_counts_before_headers_of_another_node(folder: Path, known: dict[str, TensorInfo]) -> None:
    """A tensor that a file lacks which is here stays missing; a damaged file is refused all the same."""
    write_tensors(folder / FIRST, {A: ("F16", [6])})
    write_tensors(folder / SECOND, {B: TENSORS[B]})
    found = open_folder(folder, known=known).tensors
    assert set(found) == {A, B} and found[A] == TensorInfo("F16", (6,), FIRST)
    (folder / SECOND).write_bytes(b"\0" * 7)
    with pytest.raises(ModelError, match=f"{SECOND} is cut short"):
        open_folder(folder, known=known)
