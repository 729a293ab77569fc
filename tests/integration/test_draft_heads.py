"""Draft heads over the chain: the tokens of `ar`, and the same drafts wherever the model is cut."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from coordinator.cluster.chain import Chain
from coordinator.cluster.open import check_drafter, read_model
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import Engine, generate_once
from coordinator.planning.costs import ChainCosts
from coordinator.planning.plan import Goal
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tests.integration.conftest import CHUNK, Models, load_request, opened, opened_folder, running, serving
from tests.integration.layouts import convolutions_first, norms_around_zero
from tests.integration.many import request, tokens_of
from tests.integration.many import two_lanes as two_lanes
from tests.integration.test_drafters import BIAS, SIDE_BY_SIDE, assert_equal_side_by_side, plain
from tests.integration.test_epochs import answer_over_a_loss
from tests.integration.windows import SAMPLINGS, assert_same_samples
from tests.tiny import VOCAB
from tools.demo_data import mix
from tools.demo_data.rows import encode_turn
from worker.drafters.dflash import DFlashModule
from worker.drafters.next_token import EagleModule, MtpModule
from worker.errors import BrigadeError, InputError, ModelError
from worker.model.checkpoint import DEMO
from worker.model.model_spec import DraftHead, HeadKind
from worker.node.lifecycle import WorkerState
from worker.node.model_sources import ModelSources
from worker.node.weights_cache import WeightsCache

D, K, NUM_LAYERS = 64, 16, 4
_SIZES: dict[str, Any] = {
    "hidden_size": D, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": K,
    "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "attention_bias": False, "num_hidden_layers": 1,
}  # fmt: skip
_DRAFT_VOCAB = 50


def make_head(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a random draft head for the tiny models, in its published layout."""
    mx.random.seed(seed)
    extra: dict[str, mx.array] = {}
    if name == "mtp":
        rope = {"rope_theta": 10000.0, "type": "default", "partial_rotary_factor": 0.5}
        config: dict[str, Any] = {"model_type": "qwen3_5_mtp", "text_config": _SIZES | {"rope_parameters": rope}}
        module: Any = MtpModule(_head(HeadKind.MTP, config["text_config"] | {"model_type": "qwen3_5_mtp"}))
    elif name == "dflash":
        taps = {"target_layer_ids": [0, 1, 3], "mask_token_id": 3}
        config = _SIZES | {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "dflash_config": taps}
        config |= {"block_size": 8, "num_hidden_layers": 2}
        module = DFlashModule(_head(HeadKind.DFLASH, config | taps, num_layers=2, num_taps=3, windows=(None, None)))
    else:
        norms = name == "eagle3_norm"
        config = _SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "norm_before_fc": norms}
        config |= {"draft_vocab_size": _DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
        module = EagleModule(_head(HeadKind.EAGLE3, config, num_taps=3, norms_features=norms))
        extra["d2t"] = mx.arange(VOCAB - _DRAFT_VOCAB, VOCAB) - mx.arange(_DRAFT_VOCAB)
    weights = {
        key: 1 + 0.1 * mx.random.normal(array.shape) if array.ndim == 1 else mx.random.normal(array.shape) * 0.15
        for key, array in tree_flatten(module.parameters())
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights | extra)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _head(kind: HeadKind, config: dict[str, Any], num_layers: int = 1, **more: Any) -> DraftHead:
    return DraftHead(kind, config, num_layers, D, D, 2, K, **more)


HEADS = ("mtp", "dflash", "eagle3", "eagle3_norm")
GOALS: tuple[Goal, ...] = ("latency", "prompt")
FEWER = ("mtp",)  # of `HEADS`: dflash is tried in lanes, eagle3 over a loss, eagle3_norm with features of float16


def target(models: Models, name: str) -> Path:
    return models("qwen3_5").folder if name == "mtp" else models("qwen3", sharpen=4.0).folder


async def answer(chain: Chain, decode: Decode, sampling: Sampling, num_tokens: int = 16) -> Answer:
    return await generate_once(chain, Request(tokens_of(CHUNK + 3), num_tokens, sampling, decode), chunk=CHUNK)


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        *(pytest.param(name, ((4,), (1, 2, 1)), marks=() if name in FEWER else pytest.mark.matrix) for name in HEADS),
        *(pytest.param(name, ((1, 3), (1, 1, 1, 1), (3, 1)), marks=pytest.mark.matrix) for name in HEADS),
    ],
)
async def test_a_head_changes_no_token_and_drafts_alike_on_every_split(
    models: Models, monkeypatch: pytest.MonkeyPatch, name: str, splits: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    """Prompts that other nodes compute are read as well."""
    folder, head = target(models, name), make_head(tmp_path / name, name)
    found: dict[Any, list[tuple[int, ...]]] = {}
    monkeypatch.setattr(ChainCosts, "pays_apart", lambda *args: True)
    for layers, goal in itertools.product(splits, GOALS):
        if goal == "prompt" and len(layers) == 1:
            continue
        async with running(folder, layers, drafter=head, goal=goal) as chain:
            loaded = [status.weight_bytes for status in await chain.statuses()]
            assert loaded == [each.weight_bytes for each in chain.plan.assignments]
            for sampled, count in (("greedy", 1), ("penalties", 7)):
                sampling = SAMPLINGS[sampled]
                each = await answer(chain, Decode("draft", num_drafts=count), sampling)
                assert_same_samples(each, await answer(chain, Decode("ar"), sampling), f"{layers} {sampled} {count}")
                held = each.usage.num_steps, each.usage.drafts_held
                assert found.setdefault(sampled, held) == held, (layers, goal)


@pytest.mark.usefixtures("two_lanes")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "dflash" else pytest.mark.matrix) for name in HEADS]
)
async def test_sessions_with_and_without_drafts_share_a_lane(models: Models, name: str, tmp_path: Path) -> None:
    folder, head = target(models, name), make_head(tmp_path / name, name)
    source = SIDE_BY_SIDE[1]
    async with running(folder, (1, 2, 1), drafter=head) as chain:
        await assert_equal_side_by_side(chain, [*SIDE_BY_SIDE, request(tokens_of(40, 6), 16, Decode("draft"))])
        async with Engine(chain) as engine:  # the second turn forks the first one's slot
            turn = replace(source, prompt=(*source.prompt, *(await engine.answer(source)).tokens, 5))
            again = await engine.answer(turn)
            held, reserved = (await chain.statuses())[2].cache_bytes, engine.scheduler.slots.reserved[2]
            assert 0 < held <= reserved
        assert again.tokens == (await plain(chain, turn)).tokens


@pytest.mark.parametrize("name", ["dflash", "mtp"])
async def test_a_head_is_sent_to_workers_and_takes_what_is_planned(models: Models, name: str, tmp_path: Path) -> None:
    folder, head = target(models, name), make_head(tmp_path / name, name)
    store = WeightsCache(tmp_path / "received")
    own = str(folder) if name == "mtp" else None  # or the model is sent too, and with it the embedding to the last node
    async with (
        serving(2, ModelSources(own), store_of=lambda _: store) as nodes,
        opened(folder, (1, 2, 1), nodes, drafter=head) as chain,
    ):
        expected = await answer(chain, Decode("ar"), Sampling())
        assert (await answer(chain, Decode("draft", num_drafts=3), Sampling())).tokens == expected.tokens
        held = [status.weight_bytes for status in await chain.statuses()]
        assert held[1:] == [each.weight_bytes for each in chain.plan.assignments][1:]


@pytest.mark.parametrize("name", ["dflash", "eagle3_norm", pytest.param("eagle3", marks=pytest.mark.matrix)])
async def test_features_beyond_float16_fail_only_drafts(models: Models, name: str, tmp_path: Path) -> None:
    head = make_head(tmp_path / name, name)
    weights: Any = mx.load(str(head / "model.safetensors"))
    mx.save_safetensors(str(head / "model.safetensors"), weights | {"fc.weight": weights["fc.weight"] * 1e8})
    folder = models("qwen3", dtype=mx.float16, sharpen=4.0).folder
    sampling = SAMPLINGS["penalties"]
    async with running(folder, (4,)) as chain:
        expected = await answer(chain, Decode("ar"), sampling)
    async with running(folder, (1, 2, 1), drafter=head) as chain:
        for decode in (Decode("ar"), Decode("draft", num_drafts=3)):
            found = await answer(chain, decode, sampling)
            assert_same_samples(found, expected, decode.kind)
            assert found.finish_reason == expected.finish_reason == "length"


async def test_a_lost_chain_goes_on_with_a_head(models: Models, tmp_path: Path) -> None:
    folder, head = target(models, "eagle3"), make_head(tmp_path / "eagle3", "eagle3")
    each = request(tokens_of(20), 24, Decode("draft", num_drafts=3), logit_bias=BIAS)
    async with running(folder, (2, 2)) as chain:
        expected = await plain(chain, each)
    assert (await answer_over_a_loss(folder, (2, 2), each, 8, head)).tokens == expected.tokens


async def test_a_model_with_a_head_drafts(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in an original Qwen3.5 checkpoint: `mtp.*` beside the model, norms less one."""
    folder, head = target(models, "mtp"), make_head(tmp_path / "mtp", "mtp")
    both = Path(shutil.copytree(folder, tmp_path / "both"))
    parts: Any = mx.load(str(head / "model.safetensors"))
    own = norms_around_zero("")({f"mtp.{key}": array for key, array in parts.items()})
    trunk: Any = mx.load(str(folder / "model.safetensors"))
    trunk = norms_around_zero("layernorm.weight", "model.norm.weight", "_norm.weight")(convolutions_first(trunk))
    mx.save_safetensors(str(both / "model.safetensors"), {**trunk, **own})
    sampling = SAMPLINGS["biased"]
    steps = []
    for model, drafter in ((folder, head), (both, None)):
        async with running(model, (1, 3), drafter=drafter) as chain:
            expected = await answer(chain, Decode("ar"), sampling)
            found = await answer(chain, Decode("draft", num_drafts=3), sampling)
            assert found.tokens == expected.tokens
            steps.append((found.tokens, found.usage.num_steps))
    assert steps[0] == steps[1]
    specs = [(await read_model(str(both), draft_model))[1] for draft_model in (None, "none")]
    assert [spec.drafter is not None for spec in specs] == [True, False]
    odd = {name: array.astype(mx.int8) if name.endswith("fc.weight") else array for name, array in own.items()}
    mx.save_safetensors(str(both / "model.safetensors"), {**trunk, **odd})
    assert (await read_model(str(both)))[1].drafter is None
    assert "runs without its own draft head" in capsys.readouterr().err


async def test_a_draft_head_is_not_taken_for_a_model(tmp_path: Path) -> None:
    head = make_head(tmp_path / "dflash", "dflash")
    with pytest.raises(ModelError, match="give it as --draft-model"):
        await read_model(str(head))
    async with serving(1, ModelSources(str(head))) as [node]:
        request = load_request(head, 1, 2)
        with pytest.raises(BrigadeError, match="give it as --draft-model"):
            await node.load(request)
        assert node.service.worker.state is WorkerState.EMPTY


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target_hidden_size": 32}, InputError, "reads hidden states of 32 numbers, the model has 64"),
        ({"mask_token_id": VOCAB}, InputError, f"mask_token_id: expected an id below {VOCAB}, found {VOCAB}"),
        ({"target_layer_ids": [0, 1, 4]}, InputError, r"reads layers \[0, 1, 4\], the model has layers 0 to 3"),
        ({"target_layer_ids": [3, 1]}, ModelError, "expected ascending layers"),
        ({"mask_token_id": -1}, ModelError, r"dflash: config\.json: mask_token_id: expected a whole number from 0"),
        ({"draft_window_size": 100}, ModelError, "draft_window_size is not supported"),
    ],
)
def test_a_head_of_another_size_is_refused_by_its_numbers(
    models: Models, tmp_path: Path, changes: dict[str, Any], error: type[BrigadeError], message: str
) -> None:
    folder, head = target(models, "dflash"), make_head(tmp_path / "dflash", "dflash")
    check_drafter(opened_folder(folder, head))
    config = json.loads((head / "config.json").read_text())
    inner = config["dflash_config"]
    for key, value in changes.items():
        (inner if key in inner else config)[key] = value
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        check_drafter(opened_folder(folder, head))


async def test_the_bundled_drafter_makes_drafts_that_hold() -> None:
    text = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    prompt = tuple(encode_turn(text, mix.held_out("arithmetic", 1)[0])[0])
    async with running(DEMO, (4, 4), drafter=DEMO / "drafter") as chain:
        answers = [
            await generate_once(chain, Request(prompt, 40, Sampling(), decode))
            for decode in (Decode("ar"), Decode("draft", num_drafts=7))
        ]
    assert answers[0].tokens == answers[1].tokens
    assert answers[1].usage.num_steps <= 40 // 4
