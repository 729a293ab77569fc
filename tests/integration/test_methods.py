"""mlx_lm's AWQ, GPTQ and dynamic bits: mlx_lm and Brigade read what they make, and what does not fit is refused."""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from coordinator.cli.quantize import quantize
from coordinator.quality import methods, sensitivity
from tests.tiny import VOCAB, make_model
from worker.compute.held_tensors import TensorReader
from worker.errors import InputError, ModelError
from worker.model.build import build
from worker.node.loading import open_checkpoint


@pytest.fixture(autouse=True)
def characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no tokenizer."""
    encode = lambda text, special: [ord(each) % VOCAB for each in text[:600]]  # noqa: E731
    monkeypatch.setattr(sensitivity, "Tokenizer", lambda checkpoint: SimpleNamespace(encode=encode))


def make(folder: Path, family: str = "llama") -> Path:
    return make_model(folder, family, config={"num_hidden_layers": 2})


def by_method(model: Path, out: Path, method: str, **more: Any) -> None:
    """Quantise in groups of 32, since the models are 96 wide."""
    target = {"target_bpw": 7.0} if method == "dynamic" else {}
    asyncio.run(quantize(str(model), out, **({"method": method, "q_group_size": 32, "as_json": True} | target | more)))


def bits_of(folder: Path) -> dict[str, Any]:
    """By module, or "" for most of them, the bits that config.json says."""
    found = json.loads((folder / "config.json").read_text())["quantization"]
    bits = {path: each["bits"] for path, each in found.items() if isinstance(each, dict)}
    return bits | {"": found["bits"]}


@pytest.mark.parametrize(
    ("method", "family", "bits"),
    [
        pytest.param("awq", "llama", 3, marks=pytest.mark.matrix),
        ("awq", "qwen3", 4),
        ("gptq", "llama", 2),
        ("gptq", "qwen3_moe", 4),
        ("dynamic", "qwen3", 4),
    ],
)
def test_mlx_lm_and_brigade_read_what_a_method_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, family: str, bits: int
) -> None:
    source, out = make(tmp_path / "model", family), tmp_path / "deep" / "out"
    (source / "tokenizer_config.json").write_text('{"a": 1}')
    by_method(source, out, method, q_bits=bits)
    printed = json.loads(capsys.readouterr().out)  # mlx_lm's own lines are not among it
    assert printed["bytes"] == (out / "model.safetensors").stat().st_size
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out / "tokenizer_config.json").read_text() == '{"a": 1}'

    found, layer = bits_of(out), "model.layers.1.self_attn.o_proj"
    assert found[""] == bits
    if method == "dynamic":
        assert set(found.values()) == {4, 8}
        assert printed["bits_per_weight"] == pytest.approx(7.0, abs=0.3)
    else:
        assert found.get(layer, bits) == bits
        assert found["model.embed_tokens"] == {"awq": 4, "gptq": 6}[method]
    model, _ = load_model(out)
    assert model.layers[1].self_attn.o_proj.bits == found.get(layer, bits)
    checkpoint, tokens = open_checkpoint(str(out)), mx.array([[1, 2, 3]])
    own: Any = build(checkpoint, TensorReader(checkpoint, list(checkpoint.tensors)))
    logits = model(tokens)
    assert mx.isfinite(logits).all() and mx.array_equal(logits, own(tokens))


def test_what_a_method_does_not_take_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, short = make(tmp_path / "model"), tmp_path / "new" / "out", tmp_path / "short.txt"
    short.write_text("short")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("dwq", {}, "method"), ("awq", {"keep": "lm_head"}, "keep"), ("gptq", {"recipe": "sensitivity"}, "recipe"),
        ("awq", {"q_mode": "mxfp4", "q_group_size": None}, "q_mode"), ("gptq", {"q_bits": 3}, "q_bits"),
        ("dynamic", {"q_bits": 8}, "q_bits"), ("awq", {"target_bpw": 5.0}, "target_bpw"),
        ("dynamic", {"target_bpw": None}, "target_bpw"), ("dynamic", {"target_bpw": 3.0}, "target_bpw"),
        ("gptq", {"q_group_size": 64}, "q_group_size"), ("awq", {"calibration": short}, "calibration"),
    ]  # fmt: skip
    for method, asked, field in cases:
        with pytest.raises(InputError) as refusal:
            by_method(source, out, method, **asked)
        assert refusal.value.field == field, (method, asked)
    with pytest.raises(InputError, match=r"qwen2, qwen3, gemma3_text.*found qwen3_moe") as refusal:
        by_method(make(tmp_path / "experts", "qwen3_moe"), out, "awq")
    assert refusal.value.field == "method"
    with pytest.raises(InputError, match="exists already"):
        by_method(source, source, "awq")
    for method in ("awq", "gptq", "dynamic"):
        nbytes = (source / "model.safetensors").stat().st_size
        monkeypatch.setattr(methods, "memory_budget", lambda nbytes=nbytes: nbytes)  # of the model alone
        with pytest.raises(InputError, match=r"expected .* of memory for .* found") as refusal:
            by_method(source, out, method)
        assert refusal.value.field == "method"
    assert not out.parent.exists()


def test_an_interrupted_run_is_begun_anew_in_its_folder_and_a_failed_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make(tmp_path / "model"), tmp_path / "new" / "out"
    (tmp_path / "new" / "disk").mkdir(parents=True)
    out.symlink_to("disk", target_is_directory=True)  # as of a volume: no folder can be moved there
    with monkeypatch.context() as failing:
        failing.setattr(mx.linalg, "cholesky_inv", lambda matrix: matrix * mx.nan)  # one without an inverse
        with pytest.raises(ModelError, match="no longer gives numbers"):
            by_method(source, out, "gptq")
    assert not list(out.iterdir())

    def fail(folder: Path, *_: Any) -> None:
        assert threading.current_thread() is not threading.main_thread(), "signals would wait for what MLX computes"
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as once, pytest.raises(KeyboardInterrupt):
        once.setattr(methods, "save", fail)
        by_method(source, out, "gptq")
    with pytest.raises(InputError, match="a part of another conversion"):
        by_method(source, out, "dynamic")
    by_method(source, out, "gptq")
    assert open_checkpoint(str(out)).tensors.keys() > open_checkpoint(str(source)).tensors.keys()
    assert [each.name for each in out.glob("*.safetensors")] == ["model.safetensors"]
    assert not (out / "quantize.json").exists() and [each.name for each in out.parent.iterdir()] == ["disk", "out"]
