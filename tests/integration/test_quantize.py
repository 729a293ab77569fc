"""Quantising from disk gives the files of mlx-lm's `convert`, also after it was cut off."""

import errno
import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from coordinator.quality import quantize as module
from coordinator.quality.quantize import QuantizedModel, QuantizeOptions, begun_parts, quantize_options, write_model
from tests.tiny import write_folder
from tools.model_types.configs import all_types, config_of
from worker.errors import BrigadeError, InputError
from worker.model.checkpoint import open_folder

pytestmark = pytest.mark.usefixtures("uncleared")  # it frees them after every tensor

mlx_lm_convert = importlib.import_module("mlx_lm.convert")  # the package has a function of that name

STATE = {"model": "m"}
MATRIX = pytest.mark.matrix
FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "gemma3")


UNEQUAL = {  # mlx-lm's code cannot build or quantise the first ones here, and Brigade refuses the others by name
    "afm7", "olmo", "prism_hadamard_qwen35", "phi3small", "plamo3",
}  # fmt: skip


def make(folder: Path, family: str, *, tied: bool = False) -> Path:
    """A tiny model: in bf16, in three files; some as they are published, with each expert by itself, one in fp32."""
    config = config_of(family, unit=32) | {"torch_dtype": "bfloat16"}
    config |= {"tie_word_embeddings": tied} if family in FAMILIES else {}
    code = importlib.import_module(f"mlx_lm.models.{family.partition(':')[0]}")
    mx.random.seed(3)
    weights: dict[str, mx.array] = {}
    for name, array in tree_flatten(code.Model(code.ModelArgs.from_dict(config)).parameters()):
        is_real = mx.issubdtype(array.dtype, mx.floating)
        dtype = mx.float32 if family == "gemma3" else mx.bfloat16
        values = mx.random.normal(array.shape).astype(dtype) if is_real else array
        if ".switch_mlp." in name and family in FAMILIES:
            weights |= {name.replace("switch_mlp", f"experts.{n}"): expert for n, expert in enumerate(values)}
        else:
            weights[name] = values
    write_folder(folder, config, weights, num_files=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make(tmp_path_factory.mktemp(family) / "model", family) for family in FAMILIES}


def quantise(source: Path, folder: Path, options: QuantizeOptions) -> list[int]:
    """Write the model; return the bytes that were reported."""
    checkpoint, reported = open_folder(source), list[int]()
    write_model(
        QuantizedModel(checkpoint, options), checkpoint, folder, STATE, lambda more, is_known: reported.append(more)
    )
    return reported


def converted(source: Path, folder: Path, options: QuantizeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by mlx-lm, which needs a tokenizer."""
    model, config = load_model(source, lazy=True)
    silent = SimpleNamespace(save_pretrained=lambda folder: None)
    monkeypatch.setattr(mlx_lm_convert, "load", lambda *_, **__: (model, silent, config))
    keep, own = set(options.keep), getattr(model, "quant_predicate", lambda path, module: True)

    def predicate(path: str, module: Any) -> Any:
        return not keep & set(path.split(".")) and own(path, module)

    mlx_lm_convert.convert(
        str(source), str(folder), quantize=True, q_group_size=options.group_size, q_bits=options.bits,
        q_mode=options.mode, quant_predicate=predicate if keep else None,
    )  # fmt: skip


def weights_of(folder: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for path in folder.glob("model*.safetensors"):
        found |= mx.load(str(path))  # type: ignore[arg-type]
    return found


def assert_equal(found: Path, expected: Path) -> None:
    ours, theirs = weights_of(found), weights_of(expected)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape), name
        ours_flat, theirs_flat = ours[name].reshape(-1), array.reshape(-1)
        assert mx.array_equal(ours_flat.view(mx.uint8), theirs_flat.view(mx.uint8)), name
    for name in ("config.json", "model.safetensors.index.json", "generation_config.json"):
        assert json.loads((found / name).read_text()) == json.loads((expected / name).read_text()), name


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, quantize_options("affine", 4, None, ())) for family in FAMILIES),
        ("llama", quantize_options("affine", 3, 32, ())),
        ("llama", quantize_options("affine", 8, 128, ["lm_head", "embed_tokens"])),
        *(("qwen3_moe", quantize_options(mode, None, None, ())) for mode in ("mxfp4", "nvfp4")),
        ("qwen3_moe", quantize_options("affine", 4, 64, ["down_proj"])),
        *(pytest.param("llama", quantize_options("affine", bits, 32, ()), marks=MATRIX) for bits in (2, 5, 6, 8)),
        pytest.param("qwen3_moe", quantize_options("mxfp8", None, None, ()), marks=MATRIX),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.mode}-{value.bits}-{value.group_size}",
)
def test_the_files_are_those_of_mlx_lms_convert_and_mlx_lm_loads_them(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, options: QuantizeOptions
) -> None:
    reported = quantise(sources[family], tmp_path / "ours", options)
    converted(sources[family], tmp_path / "theirs", options, monkeypatch)
    assert_equal(tmp_path / "ours", tmp_path / "theirs")
    files = [path for path in (tmp_path / "ours").iterdir() if path.suffix == ".safetensors"]
    assert sum(reported) == sum(path.stat().st_size for path in files)
    names = weights_of(tmp_path / "ours")
    assert sum(name.endswith(".scales") for name in names) > 8
    for kept in options.keep:
        assert not any(f"{kept}.scales" in name for name in names)
        [*same] = [
            name for name in names if f".{kept}." in f".{name}" and "experts" not in name and "switch" not in name
        ]
        source = weights_of(sources[family])
        assert all(mx.array_equal(names[name], source[name]) for name in same)
    model, _ = load_model(tmp_path / "ours")
    assert model(mx.array([[1, 2, 3]])).shape[:2] == (1, 3)


@MATRIX
@pytest.mark.parametrize("name", [name for name in all_types() if name not in UNEQUAL])
def test_every_type_is_quantised_as_by_mlx_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source, options = make(tmp_path / "source", name), quantize_options("affine", 4, None, ())
    quantise(source, tmp_path / "ours", options)
    converted(source, tmp_path / "theirs", options, monkeypatch)
    assert_equal(tmp_path / "ours", tmp_path / "theirs")
    load_model(tmp_path / "ours")


def test_a_run_that_was_cut_off_at_any_tensor_gives_the_same_files(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = quantize_options("affine", 4, None, ())
    monkeypatch.setattr(
        module, "make_shards", lambda tensors: [dict(p) for p in (list(tensors.items())[:9], list(tensors.items())[9:])]
    )
    quantise(sources["qwen3_moe"], tmp_path / "whole", options)
    write = module.bytes_of
    num_tensors = len(weights_of(tmp_path / "whole"))
    for cut in (0, 9, num_tensors - 1):
        folder, left = tmp_path / f"cut-{cut}", cut

        def until_cut(array: mx.array) -> memoryview:
            nonlocal left
            if not left:
                raise OSError(28, "No space left on device")
            left -= 1
            return write(array)

        monkeypatch.setattr(module, "bytes_of", until_cut)
        with pytest.raises(BrigadeError, match="No space left"):
            quantise(sources["qwen3_moe"], folder, options)
        assert not (folder / "config.json").exists()
        for part in folder.glob("*.part"):
            with part.open("ab") as file:
                file.write(b"\0")
        written: list[int] = []
        monkeypatch.setattr(module, "bytes_of", lambda array, written=written: written.append(1) or write(array))  # type: ignore[func-returns-value]
        quantise(sources["qwen3_moe"], folder, options)
        assert len(written) == num_tensors - cut
        for path in (tmp_path / "whole").iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
        assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_what_cannot_be_written_or_meant_is_refused_before_anything_is(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, field in (
        (("int4", None, None), "q_mode"), (("affine", 7, None), "q_bits"), (("affine", 4, 16), "q_group_size"),
        (("mxfp4", 8, None), "q_bits"), (("nvfp4", None, 32), "q_group_size"),
    ):  # fmt: skip
        with pytest.raises(InputError) as refusal:
            quantize_options(*asked, ())
        assert refusal.value.field == field
    source, options = sources["llama"], quantize_options("affine", 4, None, ())
    tied = make(tmp_path / "tied", "llama", tied=True)  # its head is the embedding
    for folder, name in ((source, "lm_haed"), (tied, "lm_head")):
        with pytest.raises(InputError) as refusal:
            quantise(folder, tmp_path / "a", quantize_options("affine", 4, None, [name]))
        assert refusal.value.field == "keep" and "embed_tokens" in refusal.value.message
    assert "the embedding is the head" in refusal.value.message
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(InputError, match="free disk"):
            quantise(source, tmp_path / "a", options)
        assert not list((tmp_path / "a").glob("model*"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(InputError, match=f"cannot write {tmp_path / 'a'}: No space left"):
            quantise(source, tmp_path / "a", options)
        assert not list((tmp_path / "a").iterdir())
    for number, content in enumerate((b"[]", b"\xff\xfe", b'{"model": "n"}')):
        (foreign := tmp_path / f"foreign-{number}").mkdir()
        (foreign / "quantize.json").write_bytes(content)
        assert begun_parts(foreign, {}) == []
        with pytest.raises(InputError, match="another conversion"):
            quantise(source, foreign, options)
    (tmp_path / "a" / "quantize.json").write_bytes(b'{"')  # as of a full disk
    quantise(source, tmp_path / "a", options)
    for folder in (tmp_path / "a", source):
        with pytest.raises(InputError, match="exists already"):
            quantise(source, folder, options)
    with pytest.raises(InputError, match="not quantised"):
        quantise(tmp_path / "a", tmp_path / "b", options)
