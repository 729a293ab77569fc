"""What a model's folder may look like, and what is said of one that is damaged."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from worker.errors import ModelError
from worker.model.checkpoint import Checkpoint, TensorInfo, open_folder
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
INDEX = "model.safetensors.index.json"

Header = dict[str, Any]
Edit = Callable[[Header], Header]


def header_of(tensors: Mapping[str, tuple[str, list[int]]]) -> Header:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return header


def write_raw(path: Path, header: bytes, data_bytes: int, length: int | None = None, fill: bytes = b"\0") -> None:
    length = len(header) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + header + fill * data_bytes)


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, list[int]]], fill: bytes = b"\0") -> None:
    header = header_of(tensors)
    data_bytes = max(entry["data_offsets"][1] for entry in header.values())
    write_raw(path, json.dumps(header).encode(), data_bytes, fill=fill)


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"vocab": {}}')
    write_tensors(folder / "model.safetensors", TENSORS)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_folder(folder)
    return str(caught.value)


def test_a_header_s_tensors_are_read_as_they_are_and_its_metadata_is_none(folder: Path) -> None:
    header = {"__metadata__": {"format": "mlx"}, **header_of(TENSORS)}
    write_raw(folder / "model.safetensors", json.dumps(header).encode(), 33)
    checkpoint = open_folder(folder)
    assert checkpoint.tensors == {
        "a.weight": TensorInfo("F32", (2, 3), "model.safetensors"),
        "b.weight": TensorInfo("BF16", (4,), "model.safetensors"),
        "c.weight": TensorInfo("U8", (), "model.safetensors"),
    }
    assert [info.nbytes for info in checkpoint.tensors.values()] == [24, 8, 1]
    assert checkpoint.name == str(folder)


def test_a_file_that_ends_early_or_whose_header_is_no_json_object_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole, header = file.read_bytes(), json.dumps(header_of(TENSORS)).encode()
    for size in (0, 7, 8, 40, 200):
        assert size < len(whole)
        file.write_bytes(whole[:size])
        message = refusal(folder)
        assert str(file) in message and "download it again" in message
    for length in (10_000, 2**63):
        write_raw(file, header, 33, length=length)
        message = refusal(folder)
        assert str(file) in message and "download it again" in message
    for damaged in (b"", b"{", b"[1, 2]", b"\xff\xfe{}", b"null", b"[" * 100_000):
        write_raw(file, damaged, 33)
        message = refusal(folder)
        assert f"{file} has a corrupt safetensors header" in message and "download it again" in message


def with_entry(**changes: Any) -> Edit:
    return lambda header: header | {"b.weight": header["b.weight"] | changes}


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        pytest.param(with_entry(data_offsets=[20, 28]), "overlap or leave a gap at byte 20", id="overlap"),
        pytest.param(with_entry(data_offsets=[25, 33]), "overlap or leave a gap at byte 25", id="gap"),
        pytest.param(
            with_entry(data_offsets=[24, 20]), "b.weight takes 8 bytes but its offsets span -4", id="backwards"
        ),
        pytest.param(with_entry(shape=[5]), "b.weight takes 10 bytes but its offsets span 8", id="size"),
        pytest.param(
            with_entry(dtype="Q7"), "b.weight has dtype Q7, which is not supported; choose another", id="dtype"
        ),
        pytest.param(with_entry(shape=["x"]), "b.weight", id="shape"),
        pytest.param(with_entry(shape=[-2, -2]), "b.weight has a malformed", id="negative-shape"),
        pytest.param(with_entry(data_offsets=[24.0, 32.0]), "b.weight has a malformed", id="broken-offsets"),
        pytest.param(with_entry(data_offsets=[24]), "b.weight", id="one-offset"),
        pytest.param(lambda header: header | {"b.weight": 5}, "b.weight", id="number"),
        pytest.param(lambda header: header | {"b.weight": {}}, "b.weight", id="empty"),
        pytest.param(lambda header: {"a.weight": header["a.weight"]}, "expected 24 bytes of tensors", id="excess"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(folder: Path, edit: Edit, expected: str) -> None:
    write_raw(folder / "model.safetensors", json.dumps(edit(header_of(TENSORS))).encode(), 33)
    message = refusal(folder)
    assert "model.safetensors" in message
    assert expected in message
    assert re.search("download it again|choose another conversion", message)


def test_the_index_says_which_files_count_and_is_refused_where_it_is_none(folder: Path) -> None:
    write_tensors(folder / "other.safetensors", {"other": ("F32", [1])})
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}))
    assert set(open_folder(folder).tensors) == set(TENSORS)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "model-00002.safetensors"}}))
    message = refusal(folder)
    assert f"{folder / 'model-00002.safetensors'} is missing" in message and "download it again" in message
    for index in (b"{", b"\xff\xff", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}'):
        (folder / INDEX).write_bytes(index)
        message = refusal(folder)
        assert f"{folder / INDEX} is not a safetensors index" in message and "download the model again" in message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xff", "is not valid JSON"),
        pytest.param(b"[" * 100_000, "is not valid JSON", id="deep"),
        (b"[]", "names no model_type; expected a model folder"),
        (b'{"hidden_size": 8}', "names no model_type; expected a model folder"),
        (b'{"model_type": 3}', "names no model_type; expected a model folder"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(folder: Path, config: bytes, expected: str) -> None:
    (folder / "config.json").write_bytes(config)
    message = refusal(folder)
    assert f"{folder / 'config.json'} {expected}" in message


@pytest.mark.parametrize(
    ("name", "most_bytes"),
    [
        ("config.json", 16 << 20),
        ("tokenizer.json", 1 << 28),
        (INDEX, 100_000_000),
        ("generation_config.json", 16 << 20),
    ],
)
def test_a_file_that_is_longer_than_such_a_file_gets_or_none_is_refused_unread(
    folder: Path, name: str, most_bytes: int
) -> None:
    def read() -> object:
        checkpoint = open_folder(folder)
        return checkpoint.fingerprint, checkpoint.generation_config

    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)  # no disk and no memory has so much
    with pytest.raises(ModelError, match=rf"{name} has {1 << 40} bytes; expected at most {most_bytes} of such a file"):
        read()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name != "tokenizer.json":  # of which it may have none
        with pytest.raises(ModelError, match=f"{name} is not a file"):
            read()


def test_a_folder_that_is_missing_or_lacks_config_or_safetensors_is_refused(folder: Path) -> None:
    missing = folder / "nowhere"
    message = refusal(missing)
    assert f"{missing} does not exist" in message and "give a folder or a hub repository" in message
    (folder / "model.safetensors").rename(folder / "model.bin")
    assert f"{folder} holds no *.safetensors; only safetensors" in refusal(folder)
    (folder / "config.json").unlink()
    assert f"{folder} has no config.json; expected a model folder in Hugging Face layout" in refusal(folder)


def change_tensors(name: str, dtype: str, shape: list[int]) -> Callable[[Path], None]:
    rest = {key: value for key, value in TENSORS.items() if key != "b.weight"}
    return lambda folder: write_tensors(folder / "model.safetensors", {**rest, name: (dtype, shape)})


def change_text(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        pytest.param(change_tensors("b.weight", "BF16", [2, 2]), "tensors", id="shape"),
        pytest.param(change_tensors("b.weight", "F16", [4]), "tensors", id="dtype"),
        pytest.param(change_tensors("b.bias", "BF16", [4]), "tensors", id="name"),
        pytest.param(change_text("config.json", json.dumps(CONFIG | {"rope_theta": 1e6})), "config", id="config-value"),
        pytest.param(change_text("config.json", json.dumps(CONFIG | {"extra": None})), "config", id="config-key"),
        pytest.param(change_text("tokenizer.json", '{"vocab": [ ]}'), "tokenizer", id="tokenizer-byte"),
        pytest.param(change_text("chat_template.jinja", "{{ messages }}"), "tokenizer", id="chat-template"),
        pytest.param(change_text("added_tokens.json", "{}"), "tokenizer", id="tokenizer-file"),
        pytest.param(change_text("tiktoken.model", "IQ== 0"), "tokenizer", id="tiktoken-file"),
    ],
)
def test_the_fingerprint_tells_what_differs(folder: Path, change: Callable[[Path], object], part: str) -> None:
    before = open_folder(folder).fingerprint
    change(folder)
    after = open_folder(folder).fingerprint
    parts = ("config", "tokenizer", "tensors")
    assert [name for name in parts if getattr(before, name) != getattr(after, name)] == [part]


def test_the_fingerprint_ignores_values_file_split_key_order_place_and_code(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "elsewhere" / "model")
    (other / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=2))
    (other / "README.md").write_text("another")
    (other / "tokenization_kimi.py").write_text("code, which comes only where it is trusted")
    (other / "tokenizer.py").write_text("such, too")
    (other / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(reversed(TENSORS.items())):
        write_tensors(other / f"model-{number}.safetensors", {name: tensor}, fill=b"\7")
    assert open_folder(other).fingerprint == open_folder(folder).fingerprint


def test_the_stamp_changes_with_a_weight_file(folder: Path) -> None:
    before = open_folder(folder).stamp()
    write_tensors(folder / "model.safetensors", TENSORS, fill=b"\1")
    assert open_folder(folder).stamp() != before


def test_fetch_asks_for_each_file_once() -> None:
    asked: list[str] = []
    tensors = {name: TensorInfo("F32", (1,), file) for name, file in (("a", "2"), ("b", "1"), ("c", "2"), ("d", "3"))}
    checkpoint = Checkpoint("m", Path(), CONFIG, tensors, download=lambda files, progress: asked.extend(files))
    checkpoint.fetch(["a", "b", "c"], lambda nbytes: None)
    assert asked == ["1", "2"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 0),
        ("model.layers.10.mlp.down_proj.scales", 10),
        ("layers.7.input_layernorm.weight", 7),
        ("language_model.model.layers.31.linear_attn.A_log", 31),
        ("model.layers.2.mlp.experts.5.up_proj.weight", 2),
        ("model.embed_tokens.weight", None),
        ("model.norm.weight", None),
        ("lm_head.weight", None),
        ("model.sublayers.3.weight", None),
    ],
)
def test_layer_in_checkpoint(name: str, layer: int | None) -> None:
    assert layer_in_checkpoint(name) == layer


def synthetic(*, tied: bool, layers: int = 3, **config: Any) -> Checkpoint:
    """A qwen3 model of CONFIG in bfloat16, of which there are headers only."""
    shapes = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in LAYER.items()}
    if not tied:
        shapes["lm_head.weight"] = (10, 8)
    tensors = {name: TensorInfo("BF16", shape, "model.safetensors") for name, shape in shapes.items()}
    return Checkpoint("synthetic", Path(), CONFIG | {"tie_word_embeddings": tied} | config, tensors)
