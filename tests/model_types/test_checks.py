"""The checks behind the table see what is wrong: each is tried on a chain that has been broken."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tools.model_types.chain import Chain
from tools.model_types.checks import Whole, compared, cut, difference, int8, lanes, passes, rotating
from tools.model_types.make import make_type
from tools.model_types.matrix import answer, best_lanes, look_at
from tools.model_types.quantised import UNIT, makers
from worker.compute.shard import Shard
from worker.errors import ModelError
from worker.memory.recurrent_state import RecurrentState
from worker.memory.slot_caches import Caches

ROWS = [mx.array([[0.0, 1.0, -3.0], [5.0, 4.0, -mx.inf]])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_type(tmp_path_factory.mktemp("checks") / "qwen3", "qwen3", unit=32)


@pytest.fixture(scope="module")
def chain(folder: Path) -> Chain:
    return Chain(folder)


def test_logits_are_equal_close_or_apart() -> None:
    assert compared(ROWS, ROWS) == "="
    assert compared([ROWS[0] + 1e-5], ROWS) == "≈"
    assert compared([ROWS[0] + 1], ROWS).startswith("off by 0.")
    another_token = compared([mx.array([[1.0, 1.0001, 0]])], [mx.array([[1.0, 0.9999, 0]])])
    assert another_token.startswith("off by")
    assert compared([ROWS[0] * mx.nan], ROWS) == "off by inf"
    assert compared([ROWS[0][:1]], ROWS) == "off by inf"


def test_every_layer_matters_and_the_prompt_too(folder: Path, chain: Chain, tmp_path: Path) -> None:
    whole = Whole(folder)
    for number in range(chain.spec.num_layers):
        changed = chain.with_stage(number, make_type(tmp_path / str(number), "qwen3", unit=32, changed_layer=number))
        assert difference(passes(changed), whole.passes) > 1e-3
    assert whole.compared(passes(chain)) == "="


def test_lanes_that_are_off_are_seen(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lanes(chain) == "="
    run = Shard.__call__

    def wrong(shard: Shard, x: mx.array, places: Sequence[Any], *more: Any) -> mx.array:
        h = run(shard, x, places, *more)
        return h * 1.01 if len(places) > 1 else h

    monkeypatch.setattr(Shard, "__call__", wrong)
    assert lanes(chain).startswith("off by")


def test_what_mlx_lm_itself_does_wrong_or_not_at_all_is_no_failure_of_ours() -> None:
    assert [best_lanes(name) for name in ("gemma2", "deepseek_v3")] == ["alone", "batch"]
    assert look_at("olmo").is_missing


def test_a_cut_that_keeps_what_was_taken_back_is_seen(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut(chain) == "any"
    monkeypatch.setattr(Caches, "cut", lambda caches, length: None)
    assert "cut: off by" in cut(chain)


def test_a_state_that_is_cut_wrongly_or_without_a_word_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(make_type(tmp_path, "mamba"))
    assert cut(chain) == "last"
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentState, "take_replay", lambda state: None)
        assert "cut within a window: off by" in cut(chain)
    cut_state = RecurrentState.cut
    monkeypatch.setattr(RecurrentState, "cut", lambda state, length: cut_state(state, length) if length != 6 else None)
    assert cut(chain) == "is cut without a word"


def test_caches_not_of_8_bits_far_off_or_unrotated_are_seen(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    assert int8(chain) == rotating(chain, chain) == "y"
    full = chain.open
    with monkeypatch.context() as patch:
        patch.setattr(chain, "open", lambda cache=None: full())
        assert int8(chain) == "off by 0"
        assert rotating(chain, chain) == "lets go of nothing"
    monkeypatch.setattr("tools.model_types.checks.INT8_NOISE", 0.001)
    assert int8(chain).startswith("off by 0.0")


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax"])
def test_blocks_of_8_bit_floats_are_near_the_numbers_they_were_made_of(tmp_path: Path, name: str) -> None:
    """Otherwise the layout would be wrong, and equality with mlx-lm of little worth."""
    makers(name)["fp8, scale per block"](tmp_path / "fp8")
    make_type(tmp_path / "bf16", name, unit=UNIT, dtype=mx.bfloat16)
    found, wanted = (dict(tree_flatten(Whole(tmp_path / each).model.parameters())) for each in ("fp8", "bf16"))
    assert found.keys() == wanted.keys()
    apart = {path: mx.max(mx.abs(found[path] - array) / mx.max(mx.abs(array))).item() for path, array in wanted.items()}
    assert 0.01 < max(apart.values()) <= 1 / 16  # three bits of mantissa


def test_published_gpt_oss_is_the_converted_one(tmp_path: Path) -> None:
    published = makers("gpt_oss")["mxfp4 as published"]
    published(tmp_path / "hub")
    settings = {"mode": "mxfp4", "quant_predicate": lambda path, module: ".experts." in path}
    make_type(tmp_path / "mlx", "gpt_oss", unit=UNIT, quantize=settings)
    assert difference(Whole(tmp_path / "hub").passes, Whole(tmp_path / "mlx").passes) == 0


def test_what_is_refused_or_breaks_is_said_in_one_line_without_a_path(tmp_path: Path) -> None:
    def refuse() -> str:
        raise ModelError(f"{tmp_path}: no such layers")

    def fail() -> str:
        raise TypeError(f"cannot read {tmp_path}\nat all")

    assert answer(refuse, tmp_path) == "no: no such layers"
    assert answer(fail, tmp_path).startswith("fails: TypeError: cannot read the model (test_checks.py:")
