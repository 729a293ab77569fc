"""Mixed bits of a tiny model: chosen from what each part does to the loss and the drafts, and read by mlx_lm."""

import asyncio
import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from coordinator.cli.quantize import quantize
from coordinator.quality import sensitivity
from coordinator.quality.quantize import WeightFile
from tests.integration.test_quantize import weights_of
from tests.tiny import VOCAB, make_model
from worker.compute.held_tensors import TensorReader
from worker.errors import BrigadeError, InputError
from worker.model.build import build
from worker.node.loading import open_checkpoint

pytestmark = pytest.mark.usefixtures("uncleared")  # to write a model frees them after every tensor
MASK = VOCAB - 1


@pytest.fixture
def characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no tokenizer."""
    encode = lambda text, special: [ord(each) % MASK for each in text[:300]]  # noqa: E731
    monkeypatch.setattr(sensitivity, "Tokenizer", lambda checkpoint: SimpleNamespace(encode=encode))


def mixed(model: Path, out: Path, capsys: pytest.CaptureFixture[str], **more: Any) -> dict[str, Any]:
    asked = {"recipe": "sensitivity", "target_bpw": 6.5, "q_group_size": 32, "keep": "embed_tokens", "as_json": True}
    asyncio.run(quantize(str(model), out, **asked | more))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("mask", [MASK, None])
def test_parts_are_measured_and_mlx_lm_reads_their_mixed_bits(
    tmp_path: Path, characters: None, capsys: pytest.CaptureFixture[str], mask: int | None
) -> None:
    config = {} if mask is None else {"mask_token_id": mask}
    source = make_model(tmp_path / "model", dtype=mx.bfloat16, config=config)
    found = mixed(source, tmp_path / "out", capsys)
    assert {"lm_head", "layers 0 to 0, self_attn", "layers 3 to 3, mlp"} <= {part["part"] for part in found["parts"]}
    assert {part["bits"] for part in found["parts"]} == {4, 8}
    assert all((part["drafts_lost"] is None) == (mask is None) for part in found["parts"])
    assert any(part["loss"] > 0 for part in found["parts"])
    assert found["bits_per_weight"] <= 6.5

    ours, theirs = weights_of(tmp_path / "out"), weights_of(source)
    kept = [name for name in theirs if name in ours and name.replace(".weight", ".scales") not in ours]
    assert "model.embed_tokens.weight" in kept
    assert all(mx.array_equal(ours[name].view(mx.uint8), theirs[name].view(mx.uint8)) for name in kept)
    model, _ = load_model(tmp_path / "out")
    bits = {part["part"]: part["bits"] for part in found["parts"]}
    assert model.lm_head.bits == bits["lm_head"]
    assert model.layers[0].mlp.up_proj.bits == bits["layers 0 to 0, mlp"]
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    own: Any = build(checkpoint, TensorReader(checkpoint, list(checkpoint.tensors)))
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(model(tokens), own(tokens))


def test_a_run_that_goes_on_measures_nothing_again(
    tmp_path: Path, characters: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make_model(tmp_path / "model", dtype=mx.bfloat16), tmp_path / "out"
    whole = mixed(source, tmp_path / "whole", capsys)

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as once, pytest.raises(BrigadeError):
        once.setattr(WeightFile, "write", fail)
        mixed(source, out, capsys)
    monkeypatch.setattr(sensitivity.Ablation, "run", fail)
    assert mixed(source, out, capsys) == whole


def test_a_run_begins_anew_where_a_full_disk_kept_only_a_part_of_what_was_measured(
    tmp_path: Path, characters: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make_model(tmp_path / "model", dtype=mx.bfloat16), tmp_path / "out"

    def cut(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as once, pytest.raises(InputError, match="No space left"):
        once.setattr(Path, "write_text", cut)
        mixed(source, out, capsys)
    assert not list(out.iterdir())
    assert mixed(source, out, capsys)["parts"]


def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    tmp_path: Path, characters: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, short = make_model(tmp_path / "model", dtype=mx.bfloat16), tmp_path / "short.txt"
    short.write_text("short")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"target_bpw": None}, "target_bpw"), ({"recipe": None}, "target_bpw"), ({"recipe": "other"}, "recipe"),
        ({"q_mode": "mxfp4", "q_group_size": None}, "recipe"), ({"target_bpw": 2.0}, "target_bpw"),
        ({"calibration": short}, "calibration"), ({"calibration": tmp_path / "absent"}, "calibration"),
        ({"q_bits": 8}, "q_bits"),
    ]  # fmt: skip
    for asked, field in cases:
        with pytest.raises(InputError) as refusal:
            mixed(source, tmp_path / "out", capsys, **asked)
        assert refusal.value.field == field, asked
    monkeypatch.setattr(sensitivity, "memory_budget", lambda: 1000)
    with pytest.raises(InputError, match=r"expected .* of memory .* found 1") as refusal:
        mixed(source, tmp_path / "out", capsys)
    assert refusal.value.field == "recipe"
    assert not (tmp_path / "out").exists()
