"""A chain of real gRPC nodes gives the tokens and logits of mlx-lm's unsharded model, however it is split."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from coordinator.cluster.chain import Chain
from protos.brigade_pb2 import Sampling
from tests.integration.conftest import CHUNK, Layers, Models, Whole, answer, running
from tests.tiny import FAMILIES, VOCAB, write_folder
from worker.compute.shard import Shard
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

EVERY_SPLIT = [(4,), (1, 3), (2, 2), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 1, 1)]

LONG = tuple((7 * i + i * i) % VOCAB for i in range(3 * CHUNK + 1))  # four windows, the last of one row
SHORT = (42,)
NUM_TOKENS = 6

PENALTIES = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 2.5, 9: -9},
}
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(seed=1, temperature=0.8),
    "top-p": Sampling(seed=2, temperature=1.5, top_p=0.6),
    "top-k": Sampling(seed=3, temperature=1.5, top_k=5),
    "min-p": Sampling(seed=4, temperature=1.5, min_p=0.2),
    "all filters": Sampling(seed=5, temperature=1.2, top_p=0.9, top_k=20, min_p=0.02),
    "penalties": Sampling(seed=6, temperature=1.0, **PENALTIES),
    "of the field": Sampling(
        seed=7,
        temperature=1.4,
        top_n_sigma=2.5,
        xtc_probability=0.5,
        xtc_threshold=0.02,
        xtc_special_tokens=[9],
        repetition_penalty=1.2,
        repetition_context_size=50,
        presence_penalty=0.3,
        presence_context_size=3,
        dry_multiplier=2.0,
        dry_base=1.75,
        dry_allowed_length=1,
        dry_breakers=[7],
        min_tokens=3,
        begins=3 * CHUNK + 1,
        ends=range(0, VOCAB, 3),
    ),
}
GREEDY = {"greedy": SAMPLINGS["greedy"]}

Recorded = list[np.ndarray[Any, Any]]


def split_name(layers: Layers) -> str:
    return "+".join(map(str, layers))


FULL = (1, 2, 1)  # the split with a first, a middle and a last stage
# for what concerns files and tensors, which a split only hands out
one_split = pytest.mark.parametrize("layers", [FULL, pytest.param((3, 1), marks=pytest.mark.matrix)], ids=split_name)


async def assert_equal(chain: Chain, whole: Whole, samplings: dict[str, Sampling] = SAMPLINGS) -> None:
    """The chain's tokens are the whole model's, greedy and sampled, after many windows and after one row."""
    for name, sampling in samplings.items():
        found = await answer(chain, LONG, NUM_TOKENS, sampling)
        assert found.tokens == whole.tokens(LONG, NUM_TOKENS, sampling), name
    assert (await answer(chain, SHORT, NUM_TOKENS)).tokens == whole.tokens(SHORT, NUM_TOKENS)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, nothing_ahead: None) -> Recorded:
    """The logits that last stages compute, as they compute them."""
    rows: Recorded = []
    compute: Callable[[Shard, mx.array], mx.array] = Shard.logits

    def record(shard: Shard, h: mx.array) -> mx.array:
        logits = compute(shard, h)
        rows.append(np.array(logits))
        return logits

    monkeypatch.setattr(Shard, "logits", record)
    return rows


@pytest.fixture(scope="module")
def bits() -> dict[str, bytes]:
    """Each family's logits, as the first of its splits computed them."""
    return {}


def families_and_splits() -> list[Any]:
    """Every family over some splits with some samplings; under the mark `matrix` over every split with all of them."""
    found = []
    for number, family in enumerate(FAMILIES):
        for layers in EVERY_SPLIT:
            name = f"{family}-{split_name(layers)}"
            if layers in (FULL, EVERY_SPLIT[number % 5]) or (family == "qwen3" and len(set(layers)) == 1):
                found.append(pytest.param(family, layers, samplings_of(family, layers), id=name))
            found.append(pytest.param(family, layers, SAMPLINGS, id=f"{name}-all", marks=pytest.mark.matrix))
    return found


def samplings_of(family: str, layers: Layers) -> dict[str, Sampling]:
    """Every sampling for one family, penalties and one more for each other; only penalties where there is no middle."""
    names = [name for name in SAMPLINGS if name != "greedy"]
    if layers != FULL:
        names = ["penalties"]
    elif family != "qwen3":
        names = ["penalties", names[FAMILIES.index(family) - 1]]
    return {name: SAMPLINGS[name] for name in names}


@pytest.mark.parametrize(("family", "layers", "samplings"), families_and_splits())
async def test_any_split_gives_the_tokens_and_logits_of_the_whole_model_and_the_bits_of_any_other(
    models: Models,
    recorded: Recorded,
    bits: dict[str, bytes],
    family: str,
    layers: Layers,
    samplings: dict[str, Sampling],
) -> None:
    """Which rows are computed together decides the rounding, and no split changes that."""
    whole = models(family)
    async with running(whole.folder, layers) as chain:
        assert chain.plan.layers == list(layers)
        recorded.clear()
        tokens = (await answer(chain, LONG, NUM_TOKENS)).tokens
        found = np.concatenate(recorded)
        assert tokens == whole.tokens(LONG, NUM_TOKENS)
        await assert_equal(chain, whole, samplings)
    assert bits.setdefault(family, found.tobytes()) == found.tobytes()
    expected = np.array(whole.logits(LONG, tokens))
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape == (NUM_TOKENS, VOCAB)
    assert expected.std() > 0.3  # the tolerance is far below what the logits are
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_with_and_without_penalties_are_those_of_mlx_lm_generate(models: Models, family: str) -> None:
    """Of the reference, to which every split is equal."""
    whole = models(family)
    for penalties in ({}, PENALTIES):
        processors = make_logits_processors(**penalties)
        steps = generate_step(
            mx.array(LONG), whole.reference.model, max_tokens=NUM_TOKENS, logits_processors=processors
        )
        assert whole.tokens(LONG, NUM_TOKENS, Sampling(**penalties)) == [token for token, _ in steps]


async def test_reported_logprobs_are_the_log_softmax_of_the_whole_models_logits(whole: Whole) -> None:
    async with running(whole.folder, (2, 2)) as chain:
        samples = (await answer(chain, LONG, 5, Sampling(seed=1, temperature=1.0, logprobs=1 + VOCAB))).samples
    logits = np.array(whole.logits(LONG, [sample.token for sample in samples]), np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    for sample, row in zip(samples, expected, strict=True):
        assert sample.logprob == pytest.approx(row[sample.token], abs=1e-5)
        found = {alternative.token: alternative.logprob for alternative in sample.alternatives}
        assert [found[token] for token in range(VOCAB)] == pytest.approx(list(row), abs=1e-5)
        assert list(found.values()) == sorted(found.values(), reverse=True)


@one_split
async def test_a_window_that_has_long_slid_is_the_whole_models(models: Models, layers: Layers) -> None:
    """Long enough that the caches have let go of rows: they keep 256 and the window is 8."""
    whole = models("gemma3_text")
    prompt = tuple((3 * i + i * i) % VOCAB for i in range(270))
    async with running(whole.folder, layers) as chain:
        found = await answer(chain, prompt, 10)
        assert found.tokens == whole.tokens(prompt, 10)


WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
MODES: dict[str, dict[str, Any]] = {  # of quantising, other than affine
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}


def kinds_of_checkpoints() -> list[Any]:
    """What a model may be made of, by arguments of `make_model`; every second dtype and mixture under `matrix`."""
    found: list[Any] = []

    def add(name: str, family: str = "qwen3", *, is_rare: bool = False, **arguments: Any) -> None:
        found.append(pytest.param(family, arguments, marks=pytest.mark.matrix if is_rare else (), id=name))

    for family in ("qwen3", "qwen2", "llama", "gemma3_text", "qwen3_5"):
        add(f"{family}-tied", family, tied=True)
    for index, family in enumerate(f for f in FAMILIES if f != "qwen3_moe"):  # MLX on CPUs has experts in float32 only
        for at, (name, dtype) in enumerate((("bf16", mx.bfloat16), ("fp16", mx.float16))):
            add(f"{family}-{name}", family, dtype=dtype, is_rare=(index + at) % 2 > 0)
    half: dict[str, Any] = {"dtype": mx.bfloat16, "config": WIDE}
    # other groups and numbers of bits: by layers, in test_modes.py
    for tied, whole in ((True, True), (True, False), (False, True), (False, False)):
        name = f"4 bits{' and embedding' if whole else ''}{'-tied' if tied else ''}"
        add(name, quantize={"group_size": 64, "bits": 4}, quantize_embedding=whole, tied=tied, is_rare=not tied, **half)
    for mode, tied in (("mxfp4", False), ("nvfp4", True), ("mxfp8", False), ("mxfp8", True)):
        add(
            f"{mode}{'-tied' if tied else ''}",
            quantize=MODES[mode],
            tied=tied,
            is_rare=tied and mode == "mxfp8",
            **half,
        )
    # a quantised embedding of these modes yields bfloat16, whatever the norms are in
    for dtype, whole in ((mx.float16, True), (mx.float32, False), (mx.float16, False), (mx.float32, True)):
        name, is_rare = f"mxfp4{' and embedding' if whole else ''} in {dtype}", whole == (dtype == mx.float32)
        add(name, dtype=dtype, quantize=MODES["mxfp4"], quantize_embedding=whole, config=WIDE, is_rare=is_rare)
    return found


@one_split
@pytest.mark.parametrize(("family", "arguments"), kinds_of_checkpoints())
async def test_every_kind_of_checkpoint_gives_the_tokens_of_the_whole_model(
    models: Models, family: str, arguments: dict[str, Any], layers: Layers
) -> None:
    whole = models(family, **arguments)
    has_head = any("lm_head" in name for name, _ in tree_flatten(whole.reference.model.parameters()))
    assert has_head == (not arguments.get("tied"))
    names = ("greedy", "penalties") if arguments.keys() == {"dtype"} else ("greedy",)
    async with running(whole.folder, layers) as chain:
        await assert_equal(chain, whole, {name: SAMPLINGS[name] for name in names})


@one_split
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {"model_type": "wedlm", "qk_norm": True, "attention_bias": False}),
        ("qwen3", {"model_type": "wedlm"}),
        ("qwen2", {"model_type": "wedlm", "qk_norm": False, "attention_bias": True}),
        ("qwen2", {"model_type": "wedlm", "attention_bias": True}),
    ],
    ids=["qwen3", "qwen3-by-default", "qwen2.5", "qwen2.5-by-its-bias"],
)
async def test_a_wedlm_checkpoint_runs_as_the_model_it_was_made_from(
    models: Models, family: str, config: dict[str, Any], layers: Layers
) -> None:
    whole, origin = models(family, config=config), models(family)
    prompt = LONG[:9]
    assert whole.tokens(prompt, NUM_TOKENS) == origin.tokens(prompt, NUM_TOKENS)
    if "qk_norm" in config:  # the others say the same in fewer words
        async with running(whole.folder, layers) as chain:
            await assert_equal(chain, whole, GREEDY)


@one_split
async def test_a_llama_with_sliding_layers_gives_equal_tokens(models: Models, layers: Layers) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    whole = models("llama", config={"layer_types": kinds, "sliding_window": 6})
    assert whole.tokens(LONG, NUM_TOKENS) != models("llama").tokens(LONG, NUM_TOKENS)
    async with running(whole.folder, layers) as chain:
        await assert_equal(chain, whole, GREEDY)


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.matrix), "gemma3_text", "qwen3_5"])
async def test_a_session_replayed_on_another_split_goes_on_with_the_same_tokens(models: Models, family: str) -> None:
    """How a failure is survived: prompt and answer so far, fed as a prompt to other nodes. Every draw needs its key."""
    folder, hot = models(family).folder, Sampling(seed=3, temperature=2.0, top_p=0.99)
    async with running(folder, FULL) as chain:
        tokens = (await answer(chain, LONG, 12, hot)).tokens
    async with running(folder, (3, 1)) as chain:
        for lost_at in (1, 5, 11):
            assert (await answer(chain, (*LONG, *tokens[:lost_at]), 12 - lost_at, hot)).tokens == tokens[lost_at:]


def test_the_models_of_these_tests_are_told_apart_by_their_tokens(models: Models) -> None:
    """Else equality would prove little: tokens vary along an answer, and with prompt, family, seed and sampling."""
    seen = set()
    for family in FAMILIES:
        for sampling in SAMPLINGS.values():
            tokens = models(family).tokens(LONG, NUM_TOKENS, sampling)
            assert len(set(tokens)) >= 3, f"{family} repeats itself: {tokens}"
            seen.add(tuple(tokens))
    assert len(seen) == len(FAMILIES) * len(SAMPLINGS)


both_ends = pytest.mark.parametrize("layers", [(1, 3), pytest.param((3, 1), marks=pytest.mark.matrix)], ids=split_name)


def rewritten(whole: Whole, folder: Path, *, drop: str = "", **tensors: mx.array) -> Whole:
    """The model without the configuration's key `drop` and with more tensors, whose names have `__` for a dot."""
    config = json.loads((whole.folder / "config.json").read_text())
    config.pop(drop, None)
    stored = dict(mx.load(str(whole.folder / "model.safetensors")))
    stored |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_folder(folder, config, stored)
    return Whole(folder)


@pytest.fixture(scope="session")
def both(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Tied by configuration, with an lm_head that would say something else."""
    tied = models("qwen3", tied=True)
    shape = tied.reference.model.model.embed_tokens.weight.shape
    mx.random.seed(9)
    return rewritten(tied, tmp_path_factory.mktemp("both"), lm_head__weight=mx.random.normal(shape))


@both_ends
async def test_a_stored_head_is_ignored_where_it_is_tied(models: Models, both: Whole, layers: Layers) -> None:
    assert both.tokens(LONG, NUM_TOKENS) == models("qwen3", tied=True).tokens(LONG, NUM_TOKENS)
    async with running(both.folder, layers) as chain:
        await assert_equal(chain, both, GREEDY)


def test_a_plan_counts_the_embedding_at_both_ends_and_no_stored_lm_head(models: Models, both: Whole) -> None:
    spec, tied = (describe(open_folder(whole.folder)) for whole in (both, models("qwen3", tied=True)))
    assert spec.tied and (spec.head_bytes, spec.embed_bytes) == (tied.head_bytes, tied.embed_bytes)
    assert spec.shard_bytes(2, 4) == tied.shard_bytes(2, 4) > spec.embed_bytes


@both_ends
@pytest.mark.parametrize("is_tied", [True, False])
async def test_gemma3_without_a_word_on_tying_has_the_head_of_its_files_or_the_embedding(
    models: Models, tmp_path: Path, is_tied: bool, layers: Layers
) -> None:
    silent = rewritten(models("gemma3_text", tied=is_tied), tmp_path / "model", drop="tie_word_embeddings")
    assert "tie_word_embeddings" not in json.loads((silent.folder / "config.json").read_text())
    assert any("lm_head" in name for name in open_folder(silent.folder).tensors) != is_tied
    tied = models("gemma3_text", tied=True)
    assert (silent.tokens(LONG, NUM_TOKENS) == tied.tokens(LONG, NUM_TOKENS)) == is_tied
    async with running(silent.folder, layers) as chain:
        await assert_equal(chain, silent, GREEDY)
