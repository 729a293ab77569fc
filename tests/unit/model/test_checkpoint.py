"""What a model's folder may look like, and what is said of one that is damaged."""

import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint, TensorInfo, open_folder
from worker.model.headers import reading
from worker.model.module_tree import layer_in_checkpoint

CONFIG = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 3, "intermediate_size": 16, "vocab_size": 10,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = {
    **{f"self_attn.{x}_proj": (size, 8) for x, size in zip("qkvo", (8, 4, 4, 8), strict=True)},
    **{f"self_attn.{x}_norm": (2,) for x in "qk"},
    **{f"mlp.{x}_proj": (16, 8) for x in ("gate", "up")}, "mlp.down_proj": (8, 16),
    **{f"{x}_layernorm": (8,) for x in ("input", "post_attention")},
}  # fmt: skip
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
TENSORS = {"a.weight": ("F32", [2, 3]), "b.weight": ("BF16", [4]), "c.weight": ("U8", [])}
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Header = dict[str, Any]


def header_of(tensors: Mapping[str, tuple[str, list[int]]]) -> Header:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return header


def file_of(header: bytes | Header, data: bytes = bytes(33), length: int | None = None) -> bytes:
    """A safetensors file with this header, which says to have this length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, list[int]]], fill: bytes = b"\0") -> None:
    header = header_of(tensors)
    path.write_bytes(file_of(header, fill * max(entry["data_offsets"][1] for entry in header.values())))


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"vocab": {}}')
    write_tensors(folder / FILE, TENSORS)
    return folder


def synthetic(*, tied: bool, layers: int = 3, **config: Any) -> Checkpoint:
    """A qwen3 model of CONFIG in bfloat16, of which there are headers only."""
    shapes = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in LAYER.items()}
    if not tied:
        shapes["lm_head.weight"] = (10, 8)
    tensors = {name: TensorInfo("BF16", shape, FILE) for name, shape in shapes.items()}
    return Checkpoint("synthetic", Path(), CONFIG | {"tie_word_embeddings": tied} | config, tensors)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def refused(folder: Path, *words: object) -> None:
    """Opening this folder is refused with all these words."""
    with pytest.raises(ModelError) as caught:
        open_folder(folder)
    assert all(str(word) in str(caught.value) for word in words), caught.value


def test_the_tensors_of_a_header_are_read_and_its_metadata_is_no_tensor(folder: Path) -> None:
    (folder / FILE).write_bytes(file_of({"__metadata__": {"format": "mlx"}, **header_of(TENSORS)}))
    checkpoint = open_folder(folder)
    assert checkpoint.tensors == {
        name: TensorInfo(dtype, tuple(shape), FILE) for name, (dtype, shape) in TENSORS.items()
    }
    assert [info.nbytes for info in checkpoint.tensors.values()] == [24, 8, 1]
    assert checkpoint.name == str(folder)


@pytest.mark.parametrize("name", ["config.json", FILE, "tokenizer.json"])
def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / "tokenizer.json").write_text("{}")
    read = Path.open

    def refuse(path: Path, *given: Any, **more: Any) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *given, **more)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=f"^cannot read {re.escape(str(folder / name))}: Permission denied"):
        _ = open_folder(folder).fingerprint


@pytest.mark.parametrize(
    ("system", "number", "advises"),
    [("darwin", errno.EPERM, True), ("darwin", errno.EACCES, False), ("linux", errno.EPERM, False)],
)
def test_a_folder_that_macos_keeps_from_services_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, system: str, number: int, advises: bool
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(ModelError, match="cannot read /Volumes/disk/model: ") as caught, reading(Path("/Volumes")):
        raise PermissionError(number, os.strerror(number), "/Volumes/disk/model")
    assert ("Privacy & Security, Full Disk Access" in caught.value.message) is advises


def test_a_file_that_ends_early_or_whose_header_is_no_json_object_is_refused(folder: Path) -> None:
    file, header = folder / FILE, header_of(TENSORS)
    whole = file.read_bytes()
    for content in (
        *(whole[:size] for size in (0, 7, 8, 40, 200)),
        *(file_of(header, length=length) for length in (10_000, 2**63)),
        *map(file_of, (b"", b"{", b"[1, 2]", b"\xff\xfe{}", b"null", b"[" * 100_000)),
    ):
        file.write_bytes(content)
        refused(folder, file, "download it again")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_offsets": [20, 28]}, "overlap or leave a gap at byte 20"),
        ({"data_offsets": [25, 33]}, "overlap or leave a gap at byte 25"),
        ({"data_offsets": [24, 20]}, "b.weight takes 8 bytes but its offsets span -4"),
        ({"data_offsets": [24.0, 32.0]}, "b.weight"),
        ({"data_offsets": [24]}, "b.weight"),
        ({"shape": [5]}, "b.weight takes 10 bytes but its offsets span 8"),
        ({"shape": ["x"]}, "b.weight"),
        ({"shape": [-2, -2]}, "b.weight"),
        ({"dtype": "Q7"}, "b.weight has dtype Q7, which is not supported; choose another"),
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_refused(folder: Path, changes: Header, words: str) -> None:
    header = header_of(TENSORS)
    (folder / FILE).write_bytes(file_of(header | {"b.weight": header["b.weight"] | changes}))
    refused(folder, FILE, words)


def test_an_entry_that_is_none_and_data_of_no_tensor_are_refused(folder: Path) -> None:
    header = header_of(TENSORS)
    for changed, words in (
        (header | {"b.weight": 5}, "b.weight"),
        (header | {"b.weight": {}}, "b.weight"),
        ({"a.weight": header["a.weight"]}, "expected 24 bytes of tensors"),
    ):
        (folder / FILE).write_bytes(file_of(changed))
        refused(folder, FILE, words)


def test_the_index_says_which_files_count_and_is_refused_where_it_is_none(folder: Path) -> None:
    write_tensors(folder / "other.safetensors", {"other": ("F32", [1])})
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, FILE)}))
    assert set(open_folder(folder).tensors) == set(TENSORS)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "model-00002.safetensors"}}))
    refused(folder, f"{folder / 'model-00002.safetensors'} is missing", "download it again")
    for index in (b"{", b"\xff\xff", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}'):
        (folder / INDEX).write_bytes(index)
        refused(folder, f"{folder / INDEX} is not a safetensors index")


def test_a_config_that_describes_no_model_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    for config in (b"{", b"\xff\xff", b"[" * 100_000):
        path.write_bytes(config)
        refused(folder, f"{path} is not valid JSON")
    for config in (b"[]", b'{"hidden_size": 8}', b'{"model_type": 3}'):
        path.write_bytes(config)
        refused(folder, f"{path} names no model_type; expected a model folder")


@pytest.mark.parametrize(
    ("name", "most_bytes"),
    [("config.json", 16 << 20), ("tokenizer.json", 1 << 28), (INDEX, 10**8), ("generation_config.json", 16 << 20)],
)
def test_a_file_that_is_too_long_or_is_no_file_is_refused_unread(folder: Path, name: str, most_bytes: int) -> None:
    def read() -> object:
        checkpoint = open_folder(folder)
        return checkpoint.fingerprint, checkpoint.generation_config

    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)  # no disk and no memory has so much
    with pytest.raises(ModelError, match=rf"{name} has {1 << 40} bytes; expected at most {most_bytes} of such a file"):
        read()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name != "tokenizer.json":  # which a model may lack
        with pytest.raises(ModelError, match=f"{name} is not a file"):
            read()


def test_a_folder_whose_path_is_not_utf_8_is_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"UTF-8.*rename"):
        open_folder(folder / "mod\udce9l")


def test_a_folder_that_is_missing_or_lacks_config_or_safetensors_is_refused(folder: Path) -> None:
    missing = folder / "nowhere"
    refused(missing, f"{missing} does not exist", "give a folder or a hub repository")
    (folder / FILE).rename(folder / "model.bin")
    refused(folder, f"{folder} holds no *.safetensors; only safetensors")
    (folder / "config.json").unlink()
    refused(folder, f"{folder} has no config.json; expected a model folder in Hugging Face layout")


def change_tensor(name: str, dtype: str, shape: list[int]) -> Callable[[Path], object]:
    rest = {key: value for key, value in TENSORS.items() if key != "b.weight"}
    return lambda folder: write_tensors(folder / FILE, {**rest, name: (dtype, shape)})


def change_text(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("tensors", [change_tensor("b.weight", *new) for new in (("BF16", [2, 2]), ("F16", [4]))]),
        ("tensors", [change_tensor("b.bias", "BF16", [4])]),
        ("config", [change_text("config.json", json.dumps(CONFIG | new)) for new in ({"rope_theta": 1}, {"x": None})]),
        ("tokenizer", [change_text("tokenizer.json", '{"vocab": [ ]}'), change_text("chat_template.jinja", "{{ x }}")]),
        ("tokenizer", [change_text(file, "{}") for file in ("added_tokens.json", "tiktoken.model")]),
    ],
)
def test_a_change_changes_its_fingerprint(folder: Path, part: str, changes: list[Callable[[Path], object]]) -> None:
    before = open_folder(folder).fingerprint
    for change in changes:
        change(folder)
        after = open_folder(folder).fingerprint
        parts = ("config", "tokenizer", "tensors")
        assert [name for name in parts if getattr(before, name) != getattr(after, name)] == [part]
        before = after


def test_the_fingerprint_ignores_values_file_split_key_order_place_and_code(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "elsewhere" / "model")
    (other / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=2))
    for name in ("README.md", "tokenization_kimi.py", "tokenizer.py"):
        (other / name).write_text("another")
    (other / FILE).unlink()
    for number, (name, tensor) in enumerate(reversed(TENSORS.items())):
        write_tensors(other / f"model-{number}.safetensors", {name: tensor}, fill=b"\7")
    assert open_folder(other).fingerprint == open_folder(folder).fingerprint


def test_copies_of_a_tokenizers_files_are_none_of_its_files(folder: Path) -> None:
    """Workers take no file of such a name."""
    before = open_folder(folder).fingerprint
    for name in ("tokenizer copy.json", "tokenizer (1).json", "vocabé.txt", "tokenizer" + "x" * 90 + ".json"):
        (folder / name).write_text("{}")
    assert open_folder(folder).fingerprint == before
    (folder / "tokenizer_config.json").write_text("{}")
    assert open_folder(folder).fingerprint != before


def test_a_weight_file_that_was_changed_or_removed_since_the_opening_is_named(folder: Path) -> None:
    checkpoint = open_folder(folder)
    assert checkpoint.require_unchanged() == checkpoint.opened
    write_tensors(folder / FILE, TENSORS, fill=b"\1")
    assert open_folder(folder).opened != checkpoint.opened
    for change in (lambda: None, (folder / FILE).unlink):
        change()
        with pytest.raises(ModelError, match=re.escape(str(folder / FILE))):
            checkpoint.require_unchanged()


def test_a_link_that_leads_to_another_model_is_told_though_all_files_have_one_date(folder: Path) -> None:
    other, link = write_folder(folder.parent / "other"), folder.parent / "link"
    for each in (folder, other):
        os.utime(each / FILE, (1, 1))
    link.symlink_to(folder)
    checkpoint = open_folder(link)
    checkpoint.require_unchanged()
    link.unlink()
    link.symlink_to(other)
    with pytest.raises(ModelError, match="was changed or removed"):
        checkpoint.require_unchanged()


def test_weight_files_that_come_after_the_opening_are_no_change(folder: Path) -> None:
    known = dict(open_folder(folder).tensors)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(known, FILE)}))
    moved = (folder / FILE).rename(folder / "elsewhere")
    checkpoint = open_folder(folder, known=known)
    moved.rename(folder / FILE)
    assert [file for file, *_ in checkpoint.require_unchanged()] == [FILE] and checkpoint.opened == ()


def test_fetch_asks_for_each_file_once() -> None:
    asked: list[str] = []
    tensors = {name: TensorInfo("F32", (1,), file) for name, file in (("a", "2"), ("b", "1"), ("c", "2"), ("d", "3"))}
    checkpoint = Checkpoint("m", Path(), CONFIG, tensors, download=lambda files, progress: asked.extend(files))
    checkpoint.fetch(["a", "b", "c"], lambda nbytes: None)
    assert asked == ["1", "2"]


def test_the_layer_of_a_tensor_is_in_its_name() -> None:
    for name, layer in {
        "model.layers.10.mlp.down_proj.scales": 10,
        "layers.7.input_layernorm.weight": 7,
        "language_model.model.layers.31.linear_attn.A_log": 31,
        "model.layers.2.mlp.experts.5.up_proj.weight": 2,
        "lm_head.weight": None,
        "model.sublayers.3.weight": None,
    }.items():
        assert layer_in_checkpoint(name) == layer
