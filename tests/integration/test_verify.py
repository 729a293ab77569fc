"""`verify` on chains that are the model and on chains that are not quite."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from coordinator.cli.verify import run_verify
from coordinator.cluster import progress
from coordinator.cluster.chain import Chain
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.engine.engine import generate_once
from coordinator.quality import verify as verify_module
from coordinator.quality.reference import LayerDigests, Reference
from coordinator.quality.replay import CHUNK, ForcedPass, Replay
from coordinator.quality.report import ComparedAnswer, compare_tensors
from coordinator.quality.verify import Comparison, verify
from coordinator.sessions.output import Answer
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tests.integration.conftest import Models, Whole, running
from tests.tiny import VOCAB, make_model
from worker.compute.shard import Shard
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

PROMPT = tuple((5 * i + i * i) % VOCAB for i in range(17))  # its last chunk is one row, as roughness needs
SAMPLED = Sampling(seed=3, temperature=0.8, top_k=40)
AT = 4  # the token that is to differ

pytestmark = pytest.mark.usefixtures("uncompiled")
Flip = Callable[[mx.array], mx.array]
in_either_mode = pytest.mark.parametrize("stream", [False, True], ids=["in memory", "streamed"])


async def compared(
    chain: Chain, whole: Whole, sampling: Sampling, *, stream: bool, num_tokens: int = 8
) -> ComparedAnswer:
    """One case, by either kind of reference."""
    request = Request(PROMPT, num_tokens, sampling)
    replay = Replay("case", request, (await generate_once(chain, request, chunk=CHUNK)).tokens)
    checkpoint, cases = open_folder(whole.folder), list[ComparedAnswer]()
    comparison = Comparison(checkpoint, describe(checkpoint), chain.thread)
    if stream:
        await comparison.stream_layers([replay.decode_pass()])
        await comparison.finish_streamed([replay], cases.append)
    else:
        await comparison.replay_in_memory([replay], cases.append)
    return cases[0]


def options_for(whole: Whole) -> ClusterOptions:
    return cluster_options(None, str(whole.folder), 0, None, None)


def flip(monkeypatch: pytest.MonkeyPatch, change: Flip) -> None:
    """From now on change the logits that the chain's last stage has for token AT."""
    compute, rows = Shard.logits, iter(range(1000))

    def logits(shard: Shard, h: mx.array) -> mx.array:
        found = compute(shard, h)
        return change(found) if shard.start and next(rows) == AT else found

    monkeypatch.setattr(Shard, "logits", logits)


def make_rough(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """A machine that rounds the logits of several rows otherwise than of single rows, as GPUs do.

    A chain that decodes one token at a time asks for single rows only.
    """
    read, compute = Reference.rows, Shard.logits

    def rough(logits: mx.array) -> mx.array:
        return logits + (by * mx.sin(mx.arange(VOCAB)) if len(logits) > 1 else 0.0)

    monkeypatch.setattr(Reference, "rows", lambda reference, *window: rough(read(reference, *window)))
    monkeypatch.setattr(Shard, "logits", lambda shard, h: rough(compute(shard, h)))


def raise_second(row: mx.array) -> mx.array:
    """The second-best token becomes the best by a little."""
    second, best = mx.argsort(row[0])[-2:].tolist()  # type: ignore[misc]
    return row.at[:, second].add(row[0, best] - row[0, second] + 0.01)


@pytest.mark.parametrize(
    ("sampling", "stream"), [(Sampling(), False), (SAMPLED, True)], ids=["greedy, in memory", "sampled, streamed"]
)
async def test_one_flipped_logit_is_a_difference_that_rounding_does_not_explain(
    models: Models, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, stream: bool
) -> None:
    """One: the reference goes on from the chain's token."""
    whole = models("qwen3")
    make_rough(monkeypatch, by=0.02)
    async with running(whole.folder, (2, 2)) as chain:
        flip(monkeypatch, lambda row: row.at[:, row[0].argmin()].add(50.0))
        case = await compared(chain, whole, sampling, stream=stream)
    assert case.differences == [AT] and case.verdict == "DIFFERS"
    assert case.rounding is not None and case.rounding.measured == pytest.approx(0.02, rel=0.1)
    assert case.rounding.margin > 1


@pytest.mark.usefixtures("nothing_ahead")
@pytest.mark.parametrize(
    ("roughness", "expected", "stream"), [(0.0, "DIFFERS", False), (0.001, "DIFFERS", True), (5.0, "rounding", False)]
)
async def test_a_difference_is_explained_only_if_rounding_on_this_machine_is_as_wide(
    models: Models, monkeypatch: pytest.MonkeyPatch, roughness: float, expected: str, stream: bool
) -> None:
    """The same chain each time, of which one token is the second best."""
    whole = models("qwen3")
    make_rough(monkeypatch, by=roughness)
    async with running(whole.folder, (2, 2)) as chain:
        flip(monkeypatch, raise_second)
        case = await compared(chain, whole, Sampling(), stream=stream)
    assert (case.differences, case.num_equal, case.verdict) == ([AT], 7, expected)
    assert case.rounding is not None and case.margin is not None and 0.001 < case.rounding.margin < 5
    assert case.margin <= case.rounding.margin
    assert case.rounding.measured == pytest.approx(roughness, rel=0.1, abs=1e-4)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.matrix), True], ids=["in memory", "streamed"])
async def test_layers_that_do_a_hundredth_more_than_they_should_are_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """What they would hold is as it should be: only tokens can tell."""
    whole = models("qwen3")
    run = Shard.__call__

    def more(shard: Shard, x: mx.array, *rest: Any) -> mx.array:
        h = run(shard, x, *rest)
        return x + 1.01 * (h - x) if (shard.start, shard.end) == (2, 4) else h

    async with running(whole.folder, (2, 2)) as chain:
        honest = await compared(chain, whole, Sampling(temperature=1.5), stream=stream, num_tokens=50)
        monkeypatch.setattr(Shard, "__call__", more)
        case = await compared(chain, whole, Sampling(temperature=1.5), stream=stream, num_tokens=50)
    assert (honest.verdict, case.verdict) == ("equal", "DIFFERS")
    assert case.rounding is not None and case.rounding.measured < case.rounding.margin


async def test_a_difference_of_a_decoder_that_mlx_lm_does_not_have_always_fails(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, decode = options_for(models("qwen3", config={"mask_token_id": VOCAB - 1})), Decode("diffusion-fast", 4)
    make_rough(monkeypatch, by=50.0)
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
async def test_a_tensor_that_is_not_what_the_files_hold_is_found_on_every_node(
    tmp_path: Path, layer: int, node: str
) -> None:
    """The coordinator's own, too: here the file changes once all have loaded."""
    folder, altered = make_model(tmp_path / "model"), f"model.layers.{layer}.mlp.down_proj.weight"
    checkpoint = open_folder(folder)

    async def tensors(chain: Chain) -> tuple[int, list[tuple[str, str]]]:
        ours: LayerDigests = []
        theirs = [await chain.digests(), await chain.peers[0].digests()]
        await Comparison(checkpoint, chain.spec, chain.thread).stream_layers([], ours)
        return compare_tensors(chain.plan.assignments, theirs, ours)

    async with running(folder, (2, 2)) as chain:
        assert await tensors(chain) == (len(checkpoint.tensors), [])
        weights = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
        mx.eval(weights)
        weights[altered][3, 5] += 1.0
        mx.save_safetensors(str(tmp_path / "other.safetensors"), weights, metadata={"format": "mlx"})
        (tmp_path / "other.safetensors").replace(folder / "model.safetensors")
        assert (await tensors(chain))[1] == [(node, altered)]


@in_either_mode
async def test_verify_shows_how_far_it_is_and_ends_with_its_verdict(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    drawn = io.StringIO()
    terminal = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    options = options_for(models("qwen3"))
    assert await run_verify(options, Decode(), max_tokens=2, seed=0, stream=stream, as_json=False) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith(f"the cluster is the model: {2 * 12} tokens equal, smallest margin 0.")
    assert sum("smallest margin" in line for line in shown) == 13
    for step in ("fetching the whole model", "tensors of coordinator", "penalised, 83 random", "layer 4 of 4"):
        assert step in drawn.getvalue()
    assert "3/4" in drawn.getvalue() and "5/4" not in drawn.getvalue(), "a step is a layer"
    assert ("loading the model" in drawn.getvalue()) != stream
    if stream:
        return
    answer = verify_module.generate_once

    async def silent(*arguments: Any, **more: Any) -> Answer:
        found = await answer(*arguments, **more)
        found.samples.clear()
        return found

    monkeypatch.setattr(verify_module, "generate_once", silent)
    assert await run_verify(options, Decode(), max_tokens=2, seed=0, stream=stream, as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the cluster is NOT the model"


@pytest.mark.parametrize(
    ("decode", "num_places"),
    [(Decode("draft", num_drafts=5), 5), pytest.param(Decode(), 0, marks=pytest.mark.matrix)],
)
async def test_verify_tells_which_drafts_of_a_good_and_of_a_bad_drafter_held(
    models: Models, decode: Decode, num_places: int
) -> None:
    """The tokens are equal with either."""
    target = models("qwen3").folder
    for drafter, is_good in ((target, True), (models("qwen3", seed=7).folder, False)):
        options = cluster_options(None, str(target), 0, None, None, draft_model=str(drafter))
        report = await verify(options, decode, max_tokens=8, seed=0)
        assert report.holds and len(report.drafts_held) == num_places
        assert all(share == 1.0 if is_good else share < 0.5 for share in report.drafts_held)


@pytest.mark.parametrize("is_terminal", [False, True])
async def test_verify_into_a_pipe_says_each_line_as_it_is_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    """A terminal shows a bar meanwhile, and the lines after it."""
    out: list[str] = []
    read = Reference.read

    def note(reference: Reference, forced: ForcedPass) -> None:
        out.append(capsys.readouterr().out)
        read(reference, forced)

    monkeypatch.setattr(Reference, "read", note)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert await run_verify(options_for(models("qwen3")), Decode(), max_tokens=2, seed=0, as_json=False) == 0
    first, *others = out
    assert first.startswith("split: ") != is_terminal
    assert all(text.startswith("equal ") and text.count("\n") == 1 for text in others) != is_terminal
    assert capsys.readouterr().out.startswith("split: ") == is_terminal
