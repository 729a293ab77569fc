"""Draft heads give the logits that mlx-vlm's gave for the same weights and inputs (tools/record_drafters.py)."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from protos.brigade_pb2 import Cache, Sampling
from worker.compute.drafting import DraftRequest
from worker.compute.slot import Slot
from worker.drafters.draft_head import ReadRows
from worker.drafters.kinds import build_part, make_drafter
from worker.errors import CacheMismatch, ModelError
from worker.memory.history import History
from worker.memory.slot_caches import Caches
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.model.draft_heads import check_head, own_head
from worker.model.model_spec import LayerSpec

FOLDER = Path(__file__).parents[2] / "fixtures" / "drafters"
NUM_LAYERS = 8


class RecordedModel:
    """Stands for the last shard of the model: its embedding and head; its hidden states are those recorded."""

    def __init__(self, arrays: dict[str, mx.array], scale: float, hidden_size: int) -> None:
        self._table = arrays["target.embed_tokens.weight"]
        self._head = arrays.get("target.lm_head.weight", self._table)
        self._scale = scale
        self.cap: float | None = None  # the softcap of its own head
        self.info = SimpleNamespace(num_layers=NUM_LAYERS, hidden_size=hidden_size, vocab_size=self._table.shape[0])
        self.mask_token = None
        self.start, self.end = 0, NUM_LAYERS
        self.logits: list[mx.array] = []  # of every row that went through the head

    def embed(self, ids: mx.array) -> mx.array:
        return self._table[ids] * self._scale

    def normed(self, rows: mx.array) -> mx.array:
        return rows

    def head(self, h: mx.array) -> mx.array:
        logits = h[0] @ self._head.T
        return mx.tanh(logits / self.cap) * self.cap if self.cap else logits


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir() if path.is_dir()))
def test_drafts_are_those_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_folder(FOLDER / name)
    head = describe(checkpoint).head
    assert head
    recorded = json.loads((FOLDER / name / "drafts.json").read_text())
    arrays: Any = mx.load(str(FOLDER / name / "drafts.safetensors"))
    part = build_part(checkpoint, 0, head.num_layers, None)
    model: Any = RecordedModel(arrays, recorded["embed_scale"], head.target_hidden_size)
    model.cap = head.config.get("final_logit_softcapping")
    seen: list[mx.array] = []

    def note(logits: mx.array, *_: Any) -> mx.array:
        seen.append(logits)
        return logits

    for room in ("next_token", "draft_head"):
        monkeypatch.setattr(f"worker.drafters.{room}.fit_vocabulary", note)
    for count in (1, 3, 7):
        drafter: Any = make_drafter(part, model)
        slot = Slot(Caches((), (), Cache()), History(), Sampling())
        for step, each in enumerate(recorded["steps"]):
            rows = rows_of(arrays[f"features.{step}"], part, model)
            request = DraftRequest(slot, each["base"], each["tokens"], count, False, rows, 0, rows.shape[1])
            seen.clear()
            drafts = drafter.draft([request])
            assert drafts == [each["drafts"][str(count)]]
            wanted = arrays.get(f"logits.{step}.{count}", arrays[f"logits.{step}.7"][:count])
            found = mx.concatenate(seen)
            if found.shape != wanted.shape:  # a draft vocabulary
                found = found[:, drafter.ids]
            assert mx.abs(found - wanted).max().item() < 2e-4


def rows_of(features: mx.array, part: Any, model: Any) -> mx.array:
    """Return rows [1, N, W] as they reach the last stage, of what mlx-vlm's drafter was given [N, taps * D]."""
    if not part.spec.num_taps:
        return features[None]
    taps = part.taps(model)
    config = part.spec.config
    # EAGLE-3 counts hidden states, the first of which is the embedding; by default 2, n/2, n-3
    hidden_states = config.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5])
    assert list(taps) == config.get("target_layer_ids", [number - 1 for number in hidden_states])
    outputs = features.split(len(taps), axis=1)
    total = sum(output @ weight.T for output, weight in zip(outputs, taps.values(), strict=True))
    if part.spec.norms_features:
        squares = sum(output.square().mean(axis=1, keepdims=True) for output in outputs)
        total = mx.concatenate([total, squares], axis=1)
    return mx.concatenate([mx.zeros((len(features), part.spec.target_hidden_size)), total], axis=1)[None]


def test_rows_that_did_not_hold_are_read_again() -> None:
    text = ReadRows(Caches((), (), Cache()))
    rows = mx.arange(20.0).reshape(1, 10, 2)
    text.add(0, [*range(10, 16)], rows[:, :5])
    assert text.take(5)[0] == [*range(10, 16)] and (text.end, text.tokens, text.num_pending) == (5, [15], 0)
    text.add(3, [13, 44, 45], rows[:, 5:7])  # the slot was cut inside what was read
    assert (text.end, text.tokens, text.num_pending) == (3, [13, 44, 45], 2)
    text.add(4, [44, 46, 47, 48], rows[:, 7:10])  # one pending row stands
    tokens, found = text.take(4)
    assert tokens == [13, 44, 46, 47, 48] and mx.array_equal(found, rows[:, mx.array([5, 7, 8, 9])])
    text.add(20, [60, 61], rows[:, :1])  # something was missed
    assert (text.first, text.end, text.tokens) == (20, 20, [60, 61])


def test_a_model_that_has_prediction_layers_has_a_head_of_its_own() -> None:
    checkpoint = open_folder(FOLDER / "mtp_qwen3_5")
    found = own_head(checkpoint)
    assert found and found.fingerprint == checkpoint.fingerprint  # this folder holds nothing else
    assert own_head(open_folder(FOLDER / "dflash")) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dflash", {"dflash_config": 5}),
        ("dflash", {"layer_types": 3}),
        ("dflash", {"block_size": "16"}),
        ("dflash", {"block_size": 1}),
        ("dflash", {"num_attention_heads": 0}),
        ("eagle3", {"eagle_config": [1]}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": ["a"]}),
        ("mtp_sidecar", {"text_config": {"hidden_size": None}}),
    ],
)
def test_an_odd_configuration_is_refused(name: str, change: dict[str, Any]) -> None:
    checkpoint = open_folder(FOLDER / name)
    with pytest.raises(ModelError):
        describe(replace(checkpoint, config=checkpoint.config | change))


def test_ids_outside_of_the_models_vocabulary_are_refused() -> None:
    checkpoint = open_folder(FOLDER / "dflash")
    nested = checkpoint.config["dflash_config"] | {"mask_token_id": 10**9}
    head = describe(replace(checkpoint, config=checkpoint.config | {"dflash_config": nested})).head
    assert head
    model = replace(describe(checkpoint), hidden_size=head.hidden_size, layers=(LayerSpec(0),) * 9, vocab_size=90)
    with pytest.raises(ModelError, match=r"mask_token_id: expected .*found"):
        check_head(head, "head", model)
    for name, head_vocab, field in (("eagle3", 3, "d2t"), ("eagle3_norm_before_residual", 10**4, "embed_tokens")):
        part: Any = build_part(open_folder(FOLDER / name), 0, 1, None)
        with pytest.raises(ModelError, match=f"{field}: expected .*found"):
            part.check_ids(head_vocab)


def test_a_head_of_integer_projections_is_refused_when_it_is_built(tmp_path: Path) -> None:
    for name, ending, found in (("dflash", "q_proj.weight", "int8"), ("dflash", "norm.weight", "norms")):
        arrays: Any = mx.load(str(FOLDER / name / "model.safetensors"))
        odd = {key: array.astype(mx.int8) if key.endswith(ending) else array for key, array in arrays.items()}
        (tmp_path / "config.json").write_text((FOLDER / name / "config.json").read_text())
        mx.save_safetensors(str(tmp_path / "model.safetensors"), odd)
        with pytest.raises(ModelError, match=found):
            build_part(open_folder(tmp_path), 0, 2, None)


def test_a_fork_carries_the_rows_that_are_yet_to_be_read() -> None:
    slot = ReadRows(Caches((), (), Cache()))
    rows = mx.arange(12.0).reshape(1, 6, 2)
    slot.add(0, [10, 11, 12, 13], rows[:, :3])
    for length in (2, 3):
        other = slot.fork(length)
        assert (other.end, other.tokens, other.num_pending) == (0, [*range(10, 10 + length)], length)
        assert mx.array_equal(other.pending[0], rows[:, :length])
    with pytest.raises(CacheMismatch):  # it has no row of that token
        slot.fork(4)


def test_pending_rows_keep_no_other_rows_in_memory() -> None:
    slot = ReadRows(Caches((), (), Cache()))
    before = mx.get_active_memory()
    for step in range(16):
        step_rows = mx.random.normal((1, 64, 1024))
        mx.eval(step_rows)
        slot.add(step, [1, 2], step_rows[:, 3:4])
        mx.eval(slot.pending)
        del step_rows
    assert mx.get_active_memory() - before < slot.nbytes + 16 * 2**14 < 64 * 1024 * 4 * 16
