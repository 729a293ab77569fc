"""Tensor headers as one node tells them another, and a folder that takes from them what it lacks."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model.test_checkpoint import INDEX, TENSORS, refusal, write_folder, write_tensors
from tests.unit.model.test_contents import many
from worker.errors import ModelError
from worker.model.checkpoint import open_folder
from worker.model.headers import TensorInfo, pack_headers, unpack_headers

A, B, C = TENSORS
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_headers_arrive_as_they_were_in_little_space() -> None:
    tensors = many(10, 128)
    packed = pack_headers(tensors)
    assert len(packed) < 5 * len(tensors)
    assert unpack_headers(packed) == tensors
    assert unpack_headers(b"") == {}


def packed(files: Any) -> bytes:
    return zlib.compress(json.dumps(files).encode())


MALFORMED = {
    "not packed": b"\0",
    "cut short": packed({FIRST: {A: ["F32", [2, 3]]}})[:-5],
    "no JSON": zlib.compress(b"{"),
    "no text": zlib.compress(b"\xff"),
    "too deep": zlib.compress(b"[" * 100_000),
    "too long": zlib.compress(bytes(101_000_000), level=1),
    "a list": packed([]),
    "no tensors": packed({FIRST: []}),
    "no tensor": packed({FIRST: {A: 3}}),
    "no shape": packed({FIRST: {A: ["F32"]}}),
    "another dtype": packed({FIRST: {A: ["Q7", [2, 3]]}}),
    "no dtype": packed({FIRST: {A: [["F32"], [2, 3]]}}),
    "a negative shape": packed({FIRST: {A: ["F32", [-2, -3]]}}),
    "a shape of letters": packed({FIRST: {A: ["F32", "x"]}}),
    "a way out": packed({"../outside.safetensors": {A: ["F32", [2, 3]]}}),
    "another place": packed({"/outside.safetensors": {A: ["F32", [2, 3]]}}),
}


@pytest.mark.parametrize("headers", MALFORMED.values(), ids=MALFORMED)
def test_headers_that_are_none_are_refused(headers: bytes) -> None:
    with pytest.raises(ModelError, match="malformed tensor headers from the coordinator"):
        unpack_headers(headers)


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


def in_two(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    write_tensors(folder / FIRST, {A: TENSORS[A]})
    write_tensors(folder / SECOND, {B: TENSORS[B], C: TENSORS[C]})
    (folder / INDEX).write_text(json.dumps({"weight_map": {A: FIRST, B: SECOND, C: SECOND}}))
    return folder


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_a_file_that_is_not_here_may_be_known_from_elsewhere(
    folder: Path, known: dict[str, TensorInfo], index: bool
) -> None:
    message = refusal(folder)
    assert f"{folder / SECOND} is missing" in message and "download it again" in message
    assert "Only a worker may lack files" in message and "hub repository" in message
    if not index:
        (folder / INDEX).unlink()
    checkpoint = open_folder(folder, known=known)
    assert checkpoint.tensors == known
    assert checkpoint.lacking([A]) == [] and checkpoint.lacking([A, B, C]) == [SECOND]


def test_a_folder_s_own_index_says_where_what_it_lacks_would_be(folder: Path, known: dict[str, TensorInfo]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {A: FIRST, B: "b.safetensors", C: "c.safetensors"}}))
    found = open_folder(folder, known=known).tensors
    assert [found[name].file for name in (A, B, C)] == [FIRST, "b.safetensors", "c.safetensors"]


def test_what_is_here_goes_before_what_is_known_from_elsewhere(folder: Path, known: dict[str, TensorInfo]) -> None:
    """A tensor that a file lacks which is here stays missing; a damaged file is refused all the same."""
    write_tensors(folder / FIRST, {A: ("F16", [6])})
    write_tensors(folder / SECOND, {B: TENSORS[B]})
    found = open_folder(folder, known=known).tensors
    assert set(found) == {A, B} and found[A] == TensorInfo("F16", (6,), FIRST)
    (folder / SECOND).write_bytes(b"\0" * 7)
    with pytest.raises(ModelError, match=f"{SECOND} is cut short"):
        open_folder(folder, known=known)
