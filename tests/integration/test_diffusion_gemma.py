"""DiffusionGemma gives what mlx-vlm gives, whose logits and answers tools/record_diffusion_gemma.py recorded."""

import asyncio
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import KINDS, Decode, make_cache_choice, make_decode, suit
from coordinator.engine.engine import Engine, generate_once
from coordinator.planning.costs import ChainCosts
from coordinator.quality.verify import verify
from coordinator.sessions.request import Request, check_request
from coordinator.sessions.session import Session
from protos.brigade_pb2 import CONDITIONING_EXACT, Cache, Frame, Grammar, Opening, Result, Sampling, Soft, Window
from tests.integration.conftest import CHUNK, Layers, running
from tests.integration.many import Live
from tests.integration.test_recovery import COMES_BACK, lose, supervised
from tests.tiny import write_folder
from tests.unit.compute.test_draws import chi_squared
from tools.model_types.chain import Chain, Feed
from tools.random_model import write_diffusion_gemma
from tools.record_diffusion_gemma import PROMPTS, WINDOW, T, tokens_of
from worker.compute.executor import Executor
from worker.compute.shard import Shard
from worker.errors import InputError, ModelError
from worker.memory.history import History
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.model.families import canvas_training_of
from worker.model.model_spec import CanvasTraining, Refinement

FOLDER = Path(__file__).parents[1] / "fixtures" / "diffusion_gemma"
RECORDED = json.loads((FOLDER / "runs.json").read_text())
SPEC = describe(open_folder(FOLDER))
FIRST, SECOND, THIRD = RECORDED["canvases"]
SPLITS = ((6,), (1, 5), (3, 3), (2, 1, 3), (1, 1, 1, 1, 1, 1))
IMAGES = frozenset({94, 95, 96})
CLOSE = 2e-4  # other processors round otherwise


@pytest.fixture(scope="module")
def recorded() -> dict[str, mx.array]:
    return mx.load(str(FOLDER / "logits.safetensors"))  # type: ignore[return-value]


def ends(layers: Layers) -> list[int]:
    return [sum(layers[: number + 1]) for number in range(len(layers))]


def logits_of(chain: Chain, length: int, soft: mx.array, chunk: int) -> dict[str, mx.array]:
    """What the recording has of a prompt: two steps of a canvas, then the next canvas fused with the text before."""
    session, prompt = chain.open(), tokens_of(length)
    for at in range(0, max(0, length - chunk), chunk):
        chain.run(Feed(session, prompt[at : at + chunk]))
    [first] = chain.run(Feed(session, prompt[len(session) :], canvas=FIRST))
    [later] = chain.run(Feed(session, (), length, SECOND, soft))
    [last] = chain.run(Feed(session, SECOND, length, THIRD))
    return {"first": first[-T:], "soft": later, "second": last[-T:]}


def difference(found: dict[str, mx.array], recorded: dict[str, mx.array], length: int) -> dict[str, float]:
    return {name: mx.abs(rows - recorded[f"{length}.{name}"]).max().item() for name, rows in found.items()}


@pytest.fixture(scope="module")
def unsplit(recorded: dict[str, mx.array]) -> dict[tuple[int, int], dict[str, mx.array]]:
    """The logits of one stage, by the length of the prompt and of its chunks."""
    chain = Chain(FOLDER, [6])
    return {
        (length, chunk): logits_of(chain, length, recorded[f"{length}.embedded"], chunk)
        for length in PROMPTS
        for chunk in (7, length)
    }


def test_logits_are_those_recorded(
    recorded: dict[str, mx.array], unsplit: dict[tuple[int, int], dict[str, mx.array]]
) -> None:
    for (length, _), found in unsplit.items():
        assert max(difference(found, recorded, length).values()) < CLOSE


@pytest.mark.parametrize("layers", SPLITS[1:], ids=str)
def test_logits_are_the_same_on_every_split(
    layers: Layers, recorded: dict[str, mx.array], unsplit: dict[tuple[int, int], dict[str, mx.array]]
) -> None:
    chain = Chain(FOLDER, ends(layers))
    for (length, chunk), expected in unsplit.items():
        found = logits_of(chain, length, recorded[f"{length}.embedded"], chunk)
        assert all(mx.array_equal(found[name], expected[name]) for name in expected)


def test_the_expected_embedding_is_that_recorded(recorded: dict[str, mx.array]) -> None:
    last = Chain(FOLDER, [3, 6]).stages[-1]
    for length in PROMPTS:
        found = last.soften(recorded[f"{length}.first"] / 0.8)
        assert mx.allclose(found, recorded[f"{length}.embedded"], atol=CLOSE)


@pytest.mark.parametrize("change", ["scalars", "window + 1", "window - 1", "causal", "router"])
def test_what_differs_from_the_reference_shows(
    change: str, recorded: dict[str, mx.array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls of the comparison."""
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    if change.startswith("window"):
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["sliding_window"] = WINDOW + int(change.removeprefix("window").replace(" ", ""))
        (folder / "config.json").write_text(json.dumps(config))
    chain, length = Chain(folder, [2, 6]), 40
    if change == "scalars":
        for layer in (layer for stage in chain.stages for layer in stage.cut.layers):
            layer.role_scalars = layer.role_scalars[::-1]
    if change == "router":
        from mlx_lm.models import gemma4_text

        from worker.model import diffusion_gemma

        monkeypatch.setattr(diffusion_gemma.Router, "__call__", gemma4_text.Router.__call__)
    if change == "causal":
        session = chain.open()
        chain.run(Feed(session, tokens_of(length)))
        [found] = chain.run(Feed(session, FIRST))
        assert mx.abs(found - recorded["40.first"]).max().item() > 100 * CLOSE
        return
    found = difference(logits_of(chain, length, recorded["40.embedded"], 7), recorded, length)
    if change == "router":
        assert 0 < max(found.values()) < CLOSE
    else:
        assert min(found.values()) > 100 * CLOSE


def request(run: dict[str, Any], **sampling: float) -> Request:
    threshold = run["threshold"] if run["sampler"] == "confidence" else None
    decode = make_decode(
        "auto",
        canvas_sampler=run["sampler"],
        canvas_steps=run["steps"],
        canvas_threshold=None if threshold is None else str(threshold),
    )
    return Request(
        tuple(run["prompt"]),
        run["max_tokens"],
        Sampling(seed=RECORDED["seed"], **sampling),  # type: ignore[arg-type]
        suit(decode, Cache(), SPEC),
        eos=frozenset(run["eos"]),
    )


@pytest.mark.parametrize(  # the logits of every split are compared above
    "layers", [pytest.param(each, marks=() if each in SPLITS[::3] else pytest.mark.matrix) for each in SPLITS], ids=str
)
async def test_answers_are_those_of_the_reference_in_as_many_forwards(layers: Layers) -> None:
    async with running(FOLDER, layers) as chain:
        for run in RECORDED["runs"]:
            answer = await generate_once(chain, request(run), chunk=CHUNK)
            assert answer.tokens == run["tokens"]
            assert (answer.finish_reason, answer.usage.num_steps) == (run["reason"], run["forwards"])


ANSWERED = [
    replace(request(RECORDED["runs"][number], temperature=3.0), prompt=tuple(tokens_of(length, length)), max_tokens=20)
    for number, length in ((0, 3), (1, 9), (1, 21), (2, 17))
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights in the layout of mlx-community."""
    config = json.loads((FOLDER / "config.json").read_text())
    config["text_config"] |= {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
    folder = tmp_path_factory.mktemp("packed") / "model"
    write_diffusion_gemma(folder, config, seed=3)
    return folder


async def test_sampled_answers_are_the_same_on_every_split_alone_and_in_lanes() -> None:
    found = []
    for layers in SPLITS[::3]:
        async with running(FOLDER, layers) as chain:
            found.append([(await generate_once(chain, each, chunk=CHUNK)).tokens for each in ANSWERED])
            async with Engine(chain) as engine:
                found.append([each.tokens for each in await asyncio.gather(*map(engine.answer, ANSWERED))])
            if layers == SPLITS[0]:
                for sampling in (Sampling(seed=7), Sampling(seed=8, temperature=3.0)):
                    other = replace(ANSWERED[1], sampling=sampling)
                    assert (await generate_once(chain, other, chunk=CHUNK)).tokens != found[0][1]
    assert all(each == found[0] for each in found)


def test_draws_of_a_canvas_follow_both_temperatures_the_request_s_and_the_step_s() -> None:
    """In 300 steps of equal canvases each place draws from one distribution; its tokens but three count as one."""
    shard = Shard(open_folder(FOLDER), 0, 6)
    shard.materialise(lambda num_bytes: None)
    executor = Executor(shard, 0, SPEC.dtype)
    tokens, slots, drawn = tokens_of(5), range(10), list[list[int]]()
    opened = [Opening(slot=slot, sampling=Sampling(seed=3 + slot, temperature=1.5)) for slot in slots]
    canvas: dict[str, Any] = {"tokens": tokens, "canvas": FIRST, "guessed": T, "temperature": 0.7}
    for step in range(1, 31):
        begun: dict[str, Any] = {"prefix_hash": History().prefix_hash(0), "canvas_step": step}
        windows = [Window(slot=slot, **canvas, **begun) for slot in slots]
        result = executor.step(Frame(opened=opened if step == 1 else [], windows=windows), 0)
        assert isinstance(result, Result)
        drawn += [[guess.token for guess in result.guesses if guess.slot == slot] for slot in slots]
    chain = Chain(FOLDER)
    [logits] = chain.run(Feed(chain.open(), tokens, canvas=FIRST))

    def chi_square(temperature: float) -> float:
        """Of all places, with three degrees of freedom each."""
        total = 0.0
        for p, place in zip(
            np.array(mx.softmax(logits[-T:] / temperature, axis=-1)), zip(*drawn, strict=True), strict=True
        ):
            best = np.argsort(-p)[:3].tolist()
            kinds = [best.index(token) if token in best else 3 for token in place]
            total += chi_squared(kinds, np.append(p[best], 1 - p[best].sum()))
        return total

    assert chi_square(1.5 * 0.7) < 84.1, "one in a thousand by chance, with 48 degrees of freedom"
    assert min(chi_square(1.5), chi_square(0.7)) > 84.1, "the test could not tell"


def test_a_canvas_that_makes_nan_for_its_next_step_ends_its_own_session_only() -> None:
    shard = Shard(open_folder(FOLDER), 0, 6)
    shard.materialise(lambda num_bytes: None)
    nan = Soft(slot=0, conditioning=CONDITIONING_EXACT, rows=np.full(T * 48, np.nan, np.float32).tobytes())
    canvas = {"canvas": FIRST, "guessed": T, "canvas_step": 2, "conditioning": CONDITIONING_EXACT}
    windows = [
        Window(slot=slot, prefix_hash=History().prefix_hash(0), tokens=[5], soft=soft, **canvas)  # type: ignore[arg-type]
        for slot, soft in ((0, nan), (1, None))
    ]
    frame = Frame(opened=[Opening(slot=slot) for slot in (0, 1)], windows=windows)
    result = Executor(shard, 0, SPEC.dtype).step(frame, 0)
    assert isinstance(result, Result)
    assert [(failure.slot, failure.kind) for failure in result.failures] == [(0, "FrameError")]
    assert {guess.slot for guess in result.guesses} == {soft.slot for soft in result.soft} == {1}


@pytest.mark.long
async def test_a_chain_is_verified_against_one_process() -> None:
    options = cluster_options(None, str(FOLDER), 0)
    report = await verify(options, Decode("canvas"), max_tokens=4, seed=0)
    assert report.holds and {case.verdict for case in report.cases} == {"equal"}


@pytest.mark.long
async def test_a_lost_worker_changes_no_answer() -> None:
    async with running(FOLDER, (6,)) as chain:
        expected = [(await generate_once(chain, each, chunk=CHUNK)).tokens for each in ANSWERED]
    async with supervised(FOLDER, COMES_BACK, (2, 2, 2)) as rig, rig.engine() as engine:
        live = [Live(engine, each) for each in ANSWERED]
        await live[0].wait_pieces(1)
        await lose(rig, 1, comes_back=True)
        assert [(await each.answer()).tokens for each in live] == expected
        assert rig.cluster.num_recoveries == 1


async def test_the_likeliest_tokens_alone_make_nearly_the_same_rows_and_the_same_answer_on_every_split() -> None:
    """The model has 97 tokens, 64 of which hold nearly all of the probability."""
    run = RECORDED["runs"][0]
    exact = request(run)
    top = replace(exact, decode=replace(exact.decode, conditioning="top-64"))
    assert [soft_size(each) for each in (exact, top)] == [48 * 4 * T, 64 * 6 * T]
    found = []
    for layers in SPLITS[::2]:
        async with running(FOLDER, layers) as chain:
            found.append((await generate_once(chain, top, chunk=CHUNK)).tokens)
    assert found[1:] == found[:1] * 2


def soft_size(asked: Request) -> int:
    """The bytes that the first step of an answer sends back for the next one."""
    shard = Shard(open_folder(FOLDER), 0, 6)
    shard.materialise(lambda num_bytes: None)
    executor = Executor(shard, 0, SPEC.dtype)
    session = Session(asked, asked.decode.make_decoder(asked.eos, ChainCosts(1), seed=7))
    session.take_slot(0)
    while not (window := session.next_window()).canvas:
        executor.step(Frame(opened=[Opening(slot=0)] * (not window.base), windows=[window]), 0)
    result = executor.step(Frame(opened=[Opening(slot=0)] * (not window.base), windows=[window]), 0)
    assert isinstance(result, Result)
    [soft] = result.soft
    return len(soft.rows) + len(soft.ids)


@pytest.mark.parametrize(
    "layers",
    [pytest.param(each, marks=() if each == (2, 1, 3) else pytest.mark.matrix) for each in SPLITS[1:]],
    ids=str,
)
async def test_packed_experts_of_four_bits_answer_alike_on_every_split(layers: Layers, packed: Path) -> None:
    spec = describe(open_folder(packed))
    asked = replace(ANSWERED[1], decode=suit(Decode("auto", canvas_steps=4), Cache(), spec), max_tokens=18)
    whole, stages = Chain(packed, [6]), Chain(packed, ends(layers))
    soft = mx.random.normal((T, spec.hidden_size)).astype(mx.bfloat16)
    found, expected = (logits_of(chain, 20, soft, 7) for chain in (stages, whole))
    assert all(mx.array_equal(found[name], expected[name]) for name in found)
    async with running(packed, (6,)) as chain, running(packed, layers) as other:
        assert len({tuple((await generate_once(each, asked)).tokens) for each in (chain, other)}) == 1


def test_both_published_layouts_hold_the_same_tensors(tmp_path: Path) -> None:
    names = dict[str, mx.array](mx.load(str(FOLDER / "model.safetensors")))  # type: ignore[arg-type]
    assert any("vision_tower" in name for name in names)
    renamed = {f"{name}.weight" if name.endswith("_proj") else name: array for name, array in names.items()}
    tie = {"model.encoder.language_model.norm.weight": mx.zeros((48,))}
    write_folder(tmp_path, open_folder(FOLDER).config, {**renamed, **tie})
    one, other = (Shard(open_folder(folder), 0, 6) for folder in (FOLDER, tmp_path))
    assert renamed.keys() != names.keys() and one.digests() == other.digests()


@pytest.mark.parametrize(
    ("kind", "options", "cache", "field"),
    [
        *((kind, {}, Cache(), "decode") for kind in KINDS if kind not in ("auto", "canvas")),
        ("auto", {"canvas": 17}, Cache(), "canvas"),
        ("auto", {"canvas_threshold": "2", "canvas_sampler": "confidence"}, Cache(), "canvas_threshold"),
        ("auto", {}, make_cache_choice("rotating", 64), "kv"),
        ("auto", {}, make_cache_choice("int8", None), "kv"),
    ],
)
def test_what_it_was_not_trained_for_is_refused(kind: str, options: dict[str, Any], cache: Cache, field: str) -> None:
    with pytest.raises(InputError) as refusal:
        suit(make_decode(kind, **options), cache, SPEC)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"sampling": Sampling(**{name: value})}, name)  # type: ignore[arg-type]
          for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("logprobs", 2), ("presence_penalty", 1.0),
                              ("logit_bias", {3: 1.0}), ("top_n_sigma", 1.0), ("xtc_probability", 0.5))),
        ({"sampling": Sampling(grammar=Grammar(text="x"))}, "decode"),
        *(({"prompt": (5, image, 6)}, "prompt") for image in (94, 95, 96)),
    ],
)  # fmt: skip
def test_what_has_no_meaning_for_it_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refusal:
        check_request(replace(ANSWERED[0], **changes), SPEC)
    assert refusal.value.field == field


def test_models_that_keep_decided_places_take_no_conditioning() -> None:
    spec = replace(SPEC, canvas=CanvasTraining(5, 4))
    with pytest.raises(InputError) as refusal:
        suit(Decode("canvas", conditioning="top-64"), Cache(), spec)
    assert refusal.value.field == "conditioning"


def test_generation_config_says_how_canvases_are_refined() -> None:
    assert SPEC.canvas and SPEC.canvas.refinement
    assert (SPEC.canvas.refinement.num_steps, SPEC.canvas.refinement.stop_entropy) == (12, 0.1)
    config = open_folder(FOLDER).config
    found = canvas_training_of(config, 97, {"t_min": 0.2, "entropy_bound": 1.5})
    assert found and found.refinement == replace(Refinement(), coldest=0.2, entropy_bound=1.5, not_text=IMAGES)
    for wrong in ({"t_max": 0}, {"t_max": math.nan}, {"max_denoising_steps": 1.5}, {"max_denoising_steps": True}):
        with pytest.raises(ModelError, match=r"^generation_config.json: "):
            canvas_training_of(config, 97, wrong)


@pytest.mark.parametrize(
    "change",
    [{"num_experts": None}, {"num_kv_shared_layers": 2}, {"hidden_size_per_layer_input": 8}, {"num_hidden_layers": 7}],
    ids=str,
)
def test_another_architecture_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model: .*config\.json|lacks tensor|model_encoder"):
        describe(open_folder(folder))
