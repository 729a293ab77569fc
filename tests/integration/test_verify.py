"""`verify` on chains that are the model and on chains that are not quite."""

import io
import sys
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
from worker.compute.batching import LaneWindow
from worker.compute.shard import Shard
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

PROMPT = tuple((5 * i + i * i) % VOCAB for i in range(17))  # its last chunk is one row, as roughness needs

pytestmark = pytest.mark.usefixtures("uncompiled")


async def compared(chain: Chain, whole: Whole, *, stream: bool) -> ComparedAnswer:
    """One case, by either kind of reference."""
    request = Request(PROMPT, 50, Sampling(temperature=1.5))
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


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.matrix), True], ids=["in memory", "streamed"])
async def test_layers_that_do_a_hundredth_more_than_they_should_are_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """What they would hold is as it should be: only tokens can tell."""
    whole = models("qwen3")
    run = Shard.__call__

    def more(shard: Shard, x: mx.array, places: list[LaneWindow], ids: mx.array) -> mx.array:
        h = run(shard, x, places, ids)
        return x + 1.01 * (h - x) if (shard.start, shard.end) == (2, 4) else h

    async with running(whole.folder, (2, 2)) as chain:
        honest = await compared(chain, whole, stream=stream)
        monkeypatch.setattr(Shard, "__call__", more)
        case = await compared(chain, whole, stream=stream)
    assert (honest.verdict, case.verdict) == ("equal", "DIFFERS")
    assert case.rounding is not None and case.rounding.measured < case.rounding.margin


async def test_a_difference_of_a_decoder_that_mlx_lm_does_not_have_always_fails(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, decode = options_for(models("qwen3", config={"mask_token_id": VOCAB - 1})), Decode("diffusion-fast", 4)
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


@pytest.mark.parametrize("stream", [False, True], ids=["in memory", "streamed"])
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


async def test_verify_tells_which_drafts_of_a_good_and_of_a_bad_drafter_held(models: Models) -> None:
    """The tokens are equal with either."""
    target = models("qwen3").folder
    for drafter, is_good in ((target, True), (models("qwen3", seed=7).folder, False)):
        options = cluster_options(None, str(target), 0, None, None, draft_model=str(drafter))
        report = await verify(options, Decode("draft", num_drafts=5), max_tokens=8, seed=0)
        assert report.holds and len(report.drafts_held) == 5
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
