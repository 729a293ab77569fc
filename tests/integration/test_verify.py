"""`verify`, on chains that are the model and not quite, against a reference in memory or read layer by layer."""

import asyncio
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from coordinator.cli.verify import run_verify
from coordinator.cluster import progress
from coordinator.cluster.chain import Chain
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.cluster.progress import Begin
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import generate_once
from coordinator.quality import verify as verify_module
from coordinator.quality.reference import LayerDigests, Reference, stream_layers
from coordinator.quality.replay import CHUNK, ForcedPass, Replay, full_windows, prompt_chunks
from coordinator.quality.report import compare_tensors
from coordinator.quality.verify import Comparison, verify
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tests.cluster.models import altered_copy
from tests.integration.conftest import Models, Whole, running, serving
from tests.tiny import FAMILIES, VOCAB, make_model
from tools.model_types.make import make_type
from worker.compute.shard import Shard
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import InputError
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

PROMPT = tuple((5 * i + i * i) % VOCAB for i in range(2 * CHUNK + 5))
NUM_TOKENS = 8
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(seed=3, temperature=0.8, top_k=40),
    "penalised": Sampling(seed=4, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.2),
}
MASKED: dict[str, Any] = {"config": {"mask_token_id": 90}, "sharpen": 4.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, MASKED) for family in FAMILIES if family != "qwen3_5"},
    "qwen3_5": ("qwen3_5", {}),
    "bfloat16": ("qwen3", {"dtype": mx.bfloat16}),
    "tied": ("qwen3", {"tied": True}),
    "four bits": ("qwen3", {"quantize": {"group_size": 32, "bits": 4}}),
}
LARGE = ("deepseek_v3", "qwen3_next")  # and under `matrix`:
LIKE_THEM = ("gpt_oss", "llama4", "qwen3_5_moe", "kimi_k25", "minimax", "glm4_moe", "step3p5")
JUDGED = ("qwen3",)  # the others differ in their layers only, which have a test above
SLIDING = ("gemma3_text", "gpt_oss", "step3p5")  # mlx-lm's caches there turn their rows around: other sums

pytestmark = pytest.mark.usefixtures("uncompiled")


def stream(whole: Whole, *feeds: ForcedPass) -> None:
    checkpoint = open_folder(whole.folder)
    for _ in stream_layers(checkpoint, describe(checkpoint).num_layers, feeds):
        pass


def assert_each_layer_alone_makes_its_logits(whole: Whole, is_sliding: bool, at_most: float) -> None:
    """Of every row, in windows of several lengths."""
    found: list[mx.array] = []
    windows = [*prompt_chunks(PROMPT[:-16], CHUNK), PROMPT[-16:-9], *full_windows(PROMPT[-9:-4], 3)]
    windows += [[token] for token in PROMPT[-4:]]
    forced = ForcedPass(windows, range(len(PROMPT)), lambda row, logits: found.append(logits))
    whole.reference.read(forced)
    stream(whole, forced)
    ours, theirs = mx.concatenate(found[len(PROMPT) :]), mx.concatenate(found[: len(PROMPT)])
    assert ours.shape == (len(PROMPT), VOCAB)
    assert mx.array_equal(ours, theirs) or (is_sliding and mx.allclose(ours, theirs, atol=at_most))


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_alone_makes_the_logits_of_mlx_lms_model(models: Models, kind: str) -> None:
    family, arguments = KINDS[kind]
    assert_each_layer_alone_makes_its_logits(models(family, **arguments), kind in SLIDING, 1e-3)


@pytest.mark.parametrize("name", [*LARGE, *(pytest.param(name, marks=pytest.mark.matrix) for name in LIKE_THEM)])
def test_each_layer_of_the_types_that_do_not_fit_makes_the_logits_of_mlx_lms_model(tmp_path: Path, name: str) -> None:
    assert_each_layer_alone_makes_its_logits(Whole(make_type(tmp_path / name, name)), name in SLIDING, 1e-4)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in JUDGED else pytest.mark.matrix) for kind in KINDS]
)
async def test_both_references_judge_the_answers_of_a_cluster_alike(models: Models, kind: str) -> None:
    """Greedy, sampled and penalised, of one model by each decoder: the same tokens, margins and verdicts to the bit."""
    family, arguments = KINDS[kind]
    whole = models(family, **arguments)
    asked = [(Decode(), sampled) for sampled in SAMPLINGS]
    if kind == "qwen3":
        asked += [(Decode("ngram"), "penalised"), (Decode("diffusion", 4), "sampled")]
    answers = {}
    async with running(whole.folder, (2, 2)) as chain:
        for decode, sampled in asked:
            request = Request(PROMPT, NUM_TOKENS, SAMPLINGS[sampled], decode)
            answers[decode.kind, sampled] = request, (await generate_once(chain, request, chunk=CHUNK)).tokens
    wrong = [*answers["ar", "greedy"][1]]
    wrong[3] = (wrong[3] + 1) % 90
    answers["ar", "wrong"] = answers["ar", "greedy"][0], wrong

    streamed, in_memory = ([Replay(str(name), *answer) for name, answer in answers.items()] for _ in range(2))
    stream(whole, *(replay.decode_pass() for replay in streamed))
    stream(whole, *(forced for replay in streamed for forced in replay.rounding_passes()))
    for replay in in_memory:
        whole.reference.read(replay.decode_pass())
        for forced in replay.rounding_passes():
            whole.reference.read(forced)
    cases = [replay.case() for replay in streamed]
    assert cases == ([replay.case() for replay in in_memory] if kind not in SLIDING else cases)
    for case, replay in zip(cases, in_memory, strict=True):
        assert case.margin == pytest.approx(replay.case().margin, rel=1e-2)
    assert [case.verdict for case in cases] == ["equal"] * len(asked) + ["DIFFERS"]
    assert cases[-1].first_difference == 3
    for (_, name), case in zip(list(answers)[:-1], cases, strict=False):
        assert case.expected == whole.tokens(PROMPT, NUM_TOKENS, SAMPLINGS[name])


def test_the_memory_of_one_layer_is_enough(tmp_path: Path, without_collector: None) -> None:
    """And of the embedding or the head: what is read goes when the next is read, without a collector."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 1024}
    whole = open_folder(make_model(tmp_path / "model", config=sizes))
    spec = describe(whole)
    largest = max(spec.shard_bytes(layer, layer + 1) for layer in range(12))
    forced = ForcedPass(full_windows(PROMPT, CHUNK), [len(PROMPT) - 1], lambda row, logits: None)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    held = [mx.get_active_memory() - before for _ in stream_layers(whole, 12, [forced], [])]
    assert max(held) < 1.1 * largest < spec.shard_bytes(0, 12) / 8
    assert mx.get_peak_memory() - before < 1.5 * largest, "with what it computes"
    assert mx.get_active_memory() - before < largest / 100
    assert mx.get_cache_memory() < largest / 10, "nothing is kept for later either"


# --- verify ---------------------------------------------------------------------------------------------------------


def in_this_process(whole: Whole) -> ClusterOptions:
    return cluster_options(None, str(whole.folder), 0)


@pytest.fixture
def cluster(models: Models) -> ClusterOptions:
    """Its context is short, as the prompts are then."""
    config = MASKED["config"] | {"max_position_embeddings": 24}
    return in_this_process(models("qwen3", **MASKED | {"config": config}))


@pytest.fixture
def size(cluster: ClusterOptions) -> int:
    return describe(open_folder(Path(cluster.model))).shard_bytes(0, 4)


@pytest.mark.parametrize("lacking", [0, 1])
async def test_what_does_not_fit_is_streamed_and_that_is_said(
    cluster: ClusterOptions,
    size: int,
    lacking: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(verify_module, "memory_budget", lambda: size - lacking)
    report = await verify(cluster, Decode(), max_tokens=2, seed=0)
    assert (report.holds, report.is_streamed) == (True, bool(lacking))
    said = capsys.readouterr().err
    assert (
        said.endswith("of this machine: the reference reads one layer at a time from disk\n") if lacking else not said
    )


@pytest.mark.parametrize("is_here", [True, False])
async def test_what_workers_on_this_machine_hold_is_not_there_for_the_reference(
    cluster: ClusterOptions, size: int, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    monkeypatch.setattr(verify_module, "memory_budget", lambda: size)
    monkeypatch.setattr(verify_module, "is_here", lambda address: is_here)
    async with serving(1) as [node]:
        workers = (WorkerConfig(name="mini", address=(node.address,)),)
        over_node = ClusterOptions(ClusterConfig(workers=workers), cluster.model, None, 64)
        report = await verify(over_node, Decode(), max_tokens=2, seed=0)
    assert (report.holds, report.is_streamed) == (True, is_here)


@pytest.mark.parametrize("forced", [True, False])
async def test_a_decoder_with_tokens_of_its_own_is_refused(
    cluster: ClusterOptions, size: int, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "memory_budget", lambda: size - 1)
    with pytest.raises(
        InputError, match=r"only with itself on the whole model in memory.*use a lossless decoder"
    ) as refusal:
        await verify(cluster, Decode("diffusion-fast", 4), max_tokens=2, seed=0, stream=forced)
    assert refusal.value.field == ("stream" if forced else "decode")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The first layer of each shard that is built, and the memory that is in use by then."""
    found: list[tuple[int, int]] = []
    build = Shard.__init__

    def note(shard: Shard, checkpoint: Any, start: int, *others: Any) -> None:
        found.append((start, mx.get_active_memory()))
        build(shard, checkpoint, start, *others)

    monkeypatch.setattr(Shard, "__init__", note)
    return found


def cancelling(at: str) -> Callable[[int], Any]:
    """Progress that cancels the task which shows this step."""

    @contextmanager
    def show_steps(total: int) -> Iterator[Begin]:
        def begin(step: str) -> None:
            task = asyncio.current_task()
            if step == at and task is not None:
                task.cancel()

        yield begin

    return show_steps


@pytest.mark.parametrize(
    ("at", "streams", "said"),
    [
        ("layer 2 of 4", True, "at layer 2 of 4"),
        ("sampled, 1 random tokens", False, "while the cluster answered"),
        ("loading the model in one process", False, "while one process was asked"),
    ],
)
async def test_an_interrupted_verify_says_how_far_it_was(
    cluster: ClusterOptions, built: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], at: str, streams: bool, said: str,
) -> None:  # fmt: skip
    """Once it streams, no other layer is read then."""
    monkeypatch.setattr(verify_module, "show_steps", cancelling(at))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(verify(cluster, Decode(), max_tokens=2, seed=0, stream=streams))
    assert capsys.readouterr().err == f"interrupted {said}: nothing is proved\n"
    assert not streams or [start for start, _ in built] == [0, 0, 1], "the cluster's, and two"


async def test_the_cluster_is_let_go_of_before_the_reference_is_read(
    cluster: ClusterOptions, size: int, thawed: None, built: list[tuple[int, int]]
) -> None:
    """Here it is the whole model: a coordinator may be full of its own layers."""
    assert (await verify(cluster, Decode(), max_tokens=2, seed=0, stream=True)).holds
    before, *layers = (held for _, held in built)
    assert len(layers) == 4 and max(layers) - before < size / 4


async def test_layers_that_do_a_hundredth_too_much_are_found(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they would hold is as it should be: only tokens can tell."""
    whole, request = models("qwen3"), Request(PROMPT[: CHUNK + 1], 50, Sampling(temperature=1.5))
    run = Shard.__call__

    def more(shard: Shard, x: mx.array, *rest: Any) -> mx.array:
        h = run(shard, x, *rest)
        return x + 1.01 * (h - x) if (shard.start, shard.end) == (2, 4) else h

    async with running(whole.folder, (2, 2)) as chain:
        for expected in ("equal", "DIFFERS"):
            replay = Replay("case", request, (await generate_once(chain, request, chunk=CHUNK)).tokens)
            stream(whole, replay.decode_pass())
            stream(whole, *replay.rounding_passes())
            case = replay.case()
            assert case.verdict == expected
            monkeypatch.setattr(Shard, "__call__", more)
    assert case.rounding is not None and case.rounding.measured < case.rounding.margin


async def test_a_difference_of_a_decoder_of_ours_always_fails(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    options, decode = in_this_process(models("qwen3", config={"mask_token_id": VOCAB - 1})), Decode("diffusion-fast", 4)
    equal = await verify(options, decode, max_tokens=2, seed=0)
    assert (equal.holds, equal.margin) == (True, None)
    ask, asked = verify_module.generate_once, iter(range(100))

    async def mishear(*arguments: Any, **more: Any) -> Answer:
        answer = await ask(*arguments, **more)
        if next(asked) == 3:
            answer.samples.pop()
        return answer

    monkeypatch.setattr(verify_module, "generate_once", mishear)
    report = await verify(options, decode, max_tokens=2, seed=0)
    assert [case.verdict for case in report.cases] == ["equal"] * 3 + ["DIFFERS"] + ["equal"] * 8
    assert report.cases[3].rounding is None


@pytest.mark.parametrize(("layer", "node"), [(0, "coordinator"), (3, "node-1")])
async def test_a_tensor_unlike_the_files_is_found_on_every_node(tmp_path: Path, layer: int, node: str) -> None:
    """The coordinator's own, too: here the file changes once all have loaded."""
    folder, altered = make_model(tmp_path / "model"), f"model.layers.{layer}.mlp.down_proj.weight"
    checkpoint = open_folder(folder)

    async def tensors(chain: Chain) -> tuple[int, list[tuple[str, str]]]:
        ours: LayerDigests = []
        theirs = [await chain.digests(), await chain.peers[0].digests()]
        await Comparison(checkpoint, chain.thread).stream_layers([], ours)
        return compare_tensors(chain.plan.assignments, theirs, ours)

    async with running(folder, (2, 2)) as chain:
        assert await tensors(chain) == (len(checkpoint.tensors), [])
        weights = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
        mx.eval(weights)
        weights[altered][3, 5] += 1.0
        mx.save_safetensors(str(tmp_path / "other.safetensors"), weights, metadata={"format": "mlx"})
        (tmp_path / "other.safetensors").replace(folder / "model.safetensors")
        assert (await tensors(chain))[1] == [(node, altered)]


@pytest.mark.parametrize("stream", [False, True], ids=["in memory", "streamed"])
async def test_verify_shows_how_far_it_is_and_ends_with_its_verdict(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    drawn = io.StringIO()
    terminal = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "plain_console", lambda stderr: terminal)
    options = in_this_process(models("qwen3"))
    assert await run_verify(options, Decode(), max_tokens=2, seed=0, stream=stream, as_json=False) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith(f"the cluster is the model: {2 * 12} tokens equal, smallest margin 0.")
    assert sum("smallest margin" in line for line in shown) == 13
    for step in ("fetching the whole model", "tensors of coordinator", "penalised, 83 random", "layer 4 of 4"):
        assert step in drawn.getvalue()
    assert "3/4" in drawn.getvalue() and "5/4" not in drawn.getvalue(), "a step is a layer"
    assert ("loading the model" in drawn.getvalue()) != stream


async def test_verify_tells_which_drafts_of_a_good_and_of_a_bad_drafter_held(models: Models) -> None:
    """The tokens are equal with either."""
    short = {"config": {"max_position_embeddings": 24}}
    target = models("qwen3", **short).folder
    for drafter, is_good in ((target, True), (models("qwen3", seed=7, **short).folder, False)):
        options = cluster_options(None, str(target), 0, draft_model=str(drafter))
        report = await verify(options, Decode("draft", num_drafts=3), max_tokens=5, seed=0)
        assert report.holds and len(report.drafts_held) == 3
        assert all(share == 1.0 if is_good else share < 0.5 for share in report.drafts_held)


async def test_verify_names_the_tensor_and_the_node_that_differ(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, altered = models("qwen3", **MASKED), "model.layers.2.mlp.down_proj.weight"

    def change(weights: dict[str, mx.array]) -> None:
        weights[altered][3, 5] += 4.0  # not where nodes compare samples of their copies before they load them

    async with serving(1, altered_copy(whole.folder, tmp_path / "odd", change)) as [node]:
        workers = (WorkerConfig(name=node.name, address=(node.address,)),)
        options = ClusterOptions(ClusterConfig(workers=workers), str(whole.folder), None, 64).with_layers((2, 2))
        assert await run_verify(options, Decode(), max_tokens=2, seed=0, as_json=True) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (printed.err, found["equal"]) == ("", False)
    assert found["tensors"] == [{"node": node.name, "tensor": altered}]
    assert any(case["expected"] != case["found"] for case in found["cases"])


async def test_verify_into_a_pipe_says_each_line_as_it_is_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal shows a bar meanwhile, and the lines after it."""
    out: list[str] = []
    read = Reference.read

    def note(reference: Reference, forced: ForcedPass) -> None:
        out.append(capsys.readouterr().out)
        read(reference, forced)

    monkeypatch.setattr(Reference, "read", note)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert await run_verify(in_this_process(models("qwen3")), Decode(), max_tokens=2, seed=0, as_json=False) == 0
    first, *others = out
    assert first.startswith("split: ")
    assert all(text.startswith("equal ") and text.count("\n") == 1 for text in others)
