"""What tells two fine-tunes of one model apart, and which differences are none."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from protos.brigade_pb2 import Contents
from tests.unit.model.test_checkpoint import CONFIG, write_folder, write_tensors
from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint, open_folder
from worker.model.contents import check_contents, contents_of
from worker.model.headers import TensorInfo

LARGE = {f"model.layers.{i}.{part}.weight": ("BF16", [64, 64]) for i in range(6) for part in ("q", "up", "down")}
FILES = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return in_files(write_folder(tmp_path / "model"))


def in_files(folder: Path, num_files: int = 3) -> Path:
    """Six layers in so many files."""
    (folder / "model.safetensors").unlink()
    names = list(LARGE)
    for i in range(num_files):
        part = names[i * len(names) // num_files : (i + 1) * len(names) // num_files]
        file = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        write_tensors(folder / file, {name: LARGE[name] for name in part}, fill=b"\5")
    return folder


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "other"))


def tune(folder: Path, name: str) -> str:
    """Change one tensor's values, as a fine-tune does; return the file that holds it."""
    info = open_folder(folder).tensors[name]
    path = folder / info.file
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little") + info.begin
    data[begin : begin + info.nbytes] = bytes(value ^ 1 for value in data[begin : begin + info.nbytes])
    path.write_bytes(data)
    return info.file


def differ(ours: Checkpoint, theirs: Checkpoint, file: str) -> None:
    """The comparison names this file."""
    with pytest.raises(ModelError) as caught:
        check_contents(ours, contents_of(theirs))
    said = f"its weights in {file} differ from the coordinator's; copy the same model to both nodes"
    assert str(caught.value) == said


def test_one_tuned_tensor_is_enough_and_its_file_is_named(folder: Path, other: Path) -> None:
    theirs = open_folder(folder)
    check_contents(open_folder(other), contents_of(theirs))
    for name in LARGE:
        file = tune(other, name)
        ours = open_folder(other)
        assert theirs.fingerprint == ours.fingerprint
        differ(ours, theirs, file)
        tune(other, name)  # as it was


@pytest.mark.parametrize("num_files", [1, 2, 18])
def test_the_same_weights_in_other_files_are_the_same(folder: Path, tmp_path: Path, num_files: int) -> None:
    other = in_files(write_folder(tmp_path / "other"), num_files)
    check_contents(open_folder(other), contents_of(open_folder(folder)))
    file = tune(other, "model.layers.3.up.weight")
    differ(open_folder(other), open_folder(folder), file)


def test_copies_are_compared_in_the_files_that_both_have(folder: Path, other: Path) -> None:
    first, second = (tune(other, f"model.layers.{layer}.q.weight") for layer in (0, 2))
    theirs, ours = open_folder(folder), open_folder(other)
    (folder / first).unlink()
    differ(ours, theirs, second)
    (other / second).unlink()
    check_contents(ours, contents_of(theirs))
    assert any(contents_of(theirs).marks) and any(contents_of(ours).marks)


def test_the_hub_s_hashes_tell_files_apart_that_are_not_here(folder: Path, other: Path) -> None:
    theirs = replace(open_folder(folder), hub_hashes=dict.fromkeys(FILES, "a"))
    ours = replace(open_folder(other), hub_hashes=dict.fromkeys(FILES, "a") | {FILES[1]: "b"})
    check_contents(ours, contents_of(theirs))  # they have been read, and are the same
    (other / FILES[1]).unlink()
    differ(ours, theirs, FILES[1])
    check_contents(open_folder(folder), contents_of(theirs))  # a plain folder knows no such hash
    for file in FILES:
        (folder / file).unlink()
    check_contents(theirs, contents_of(theirs))
    differ(ours, theirs, FILES[1])


def test_marks_of_another_number_of_tensors_are_refused_and_none_differ_in_nothing(folder: Path) -> None:
    for marks in (b"1234", bytes(4 * 17), bytes(4 * 19)):
        with pytest.raises(ModelError, match="expected marks of 18 tensors from the coordinator"):
            check_contents(open_folder(folder), Contents(marks=marks))
    check_contents(open_folder(folder), Contents())


def many(num_layers: int, num_experts: int) -> Mapping[str, TensorInfo]:
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}": TensorInfo("BF16", (7168, 2048), f"{layer}.safetensors")
        for layer in range(num_layers)
        for expert in range(num_experts)
        for part in ("down_proj.weight", "gate_proj.weight", "up_proj.weight")
    }


def test_marks_are_few_and_of_every_layer_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}
    monkeypatch.setattr(
        "worker.model.contents.read_marks", lambda path, tensors, note: asked.update({path.name: list(tensors)}) or {}
    )
    tensors = many(60, 256)
    marks = contents_of(Checkpoint("m", tmp_path, CONFIG, tensors)).marks
    assert len(marks) == 4 * 4096 == 4 * sum(map(len, asked.values())) and len(tensors) > 40_000
    assert len(asked) == 60
    for names in asked.values():
        assert {name.rsplit(".")[-2] for name in names} == {"down_proj", "gate_proj", "up_proj"}


def test_a_weight_file_that_cannot_be_read_is_named(folder: Path) -> None:
    checkpoint = open_folder(folder)
    (folder / FILES[1]).unlink()
    (folder / FILES[1]).mkdir()
    with pytest.raises(ModelError, match=f"cannot read .*{FILES[1]}"):
        contents_of(checkpoint)
