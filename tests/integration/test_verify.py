"""`verify` on chains that are the model and on chains that are not quite."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from coordinator.cli.commands import run_verify
from coordinator.cluster import progress
from coordinator.cluster.chain import Chain
from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode import Decode
from coordinator.measure import verify as verify_module
from coordinator.measure.reference import Reference
from coordinator.measure.verdict import Case
from coordinator.measure.verify import compare, compare_tensors, load_alone
from coordinator.sessions.request import Request
from protos.brigade_pb2 import Sampling
from tests.integration.conftest import Models, running
from tests.tiny import VOCAB, make_model
from worker.compute.shard import Shard
from worker.model.checkpoint import open_folder
from worker.model.describe import describe

PROMPT = tuple((5 * i + i * i) % VOCAB for i in range(17))  # its last chunk is one row, as roughness needs
SAMPLED = Sampling(seed=3, temperature=0.8, top_k=40)
AT = 4  # the token that is to differ

Flip = Callable[[mx.array], mx.array]


async def verdict(chain: Chain, folder: Path, sampling: Sampling, decode: Decode | None = None) -> Case:
    decode = decode or Decode()
    checkpoint = open_folder(folder)
    alone = await chain.thread.run(lambda: load_alone(checkpoint, describe(checkpoint), decode))
    return await compare(chain, alone, "case", Request(PROMPT, 8, sampling, decode), lambda step: None)


def flip(monkeypatch: pytest.MonkeyPatch, change: Flip) -> None:
    """From now on change the logits that the chain's last stage has for token AT."""
    compute, rows = Shard.logits, iter(range(1000))

    def logits(shard: Shard, h: mx.array) -> mx.array:
        found = compute(shard, h)
        return change(found) if shard.start and next(rows) == AT else found

    monkeypatch.setattr(Shard, "logits", logits)


def make_rough(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """A machine that rounds windows of several rows otherwise than single rows, as GPUs do."""
    evaluate = Reference.logits

    def logits(reference: Reference, window: list[int], cache: list[object]) -> mx.array:
        return evaluate(reference, window, cache) + (by * mx.sin(mx.arange(VOCAB)) if len(window) > 1 else 0.0)

    monkeypatch.setattr(Reference, "logits", logits)


def raise_second(row: mx.array) -> mx.array:
    """The second-best token becomes the best by a little."""
    second, best = mx.argsort(row[0])[-2:].tolist()  # type: ignore[misc]
    return row.at[:, second].add(row[0, best] - row[0, second] + 0.01)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
async def test_one_flipped_logit_is_a_difference_that_rounding_does_not_explain(
    models: Models, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    whole = models("qwen3")
    make_rough(monkeypatch, by=0.02)
    async with running(whole.folder, (2, 2)) as chain:
        flip(monkeypatch, lambda row: row.at[:, row[0].argmin()].add(50.0))
        case = await verdict(chain, whole.folder, sampling)
    assert case.first_difference == AT and case.verdict == "DIFFERS"
    assert case.rounding is not None and case.rounding.measured == pytest.approx(0.02, rel=0.1)
    assert case.rounding.margin > 1


@pytest.mark.parametrize(("roughness", "expected"), [(0.0, "DIFFERS"), (0.001, "DIFFERS"), (5.0, "rounding")])
async def test_a_difference_is_explained_only_if_rounding_on_this_machine_is_as_wide(
    models: Models, monkeypatch: pytest.MonkeyPatch, roughness: float, expected: str
) -> None:
    """The same chain each time, of which one token is the second best."""
    whole = models("qwen3")
    make_rough(monkeypatch, by=roughness)
    async with running(whole.folder, (2, 2)) as chain:
        flip(monkeypatch, raise_second)
        case = await verdict(chain, whole.folder, Sampling())
    assert (case.first_difference, case.num_equal, case.verdict) == (AT, AT, expected)
    assert case.rounding is not None and 0.001 < case.rounding.margin < 5
    assert case.rounding.measured == pytest.approx(roughness, rel=0.1, abs=1e-4)


async def test_a_difference_of_a_decoder_that_mlx_lm_does_not_have_always_fails(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = models("qwen3", config={"mask_token_id": VOCAB - 1})
    make_rough(monkeypatch, by=50.0)
    async with running(whole.folder, (2, 2)) as chain:
        equal = await verdict(chain, whole.folder, Sampling(), Decode("diffusion-fast", 4))
        flip(monkeypatch, lambda rows: -rows)
        case = await verdict(chain, whole.folder, Sampling(), Decode("diffusion-fast", 4))
    assert (equal.verdict, case.verdict, case.rounding) == ("equal", "DIFFERS", None)


@pytest.mark.parametrize(("layer", "node"), [(0, "coordinator"), (3, "node-1")])
async def test_a_tensor_that_is_not_what_the_files_hold_is_found_on_every_node(
    tmp_path: Path, layer: int, node: str
) -> None:
    """The coordinator's own, too: here the file changes once all have loaded."""
    folder, altered = make_model(tmp_path / "model"), f"model.layers.{layer}.mlp.down_proj.weight"
    async with running(folder, (2, 2)) as chain:
        checkpoint, steps = open_folder(folder), []
        num_tensors, differing = await compare_tensors(chain, checkpoint, steps.append)
        assert (num_tensors, differing) == (len(checkpoint.tensors), [])
        weights = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
        mx.eval(weights)
        weights[altered][3, 5] += 1.0
        mx.save_safetensors(str(tmp_path / "other.safetensors"), weights, metadata={"format": "mlx"})
        (tmp_path / "other.safetensors").replace(folder / "model.safetensors")
        _, differing = await compare_tensors(chain, checkpoint, steps.append)
    assert differing == [(node, altered)]
    assert steps == ["tensors of coordinator", "tensors of node-1"] * 2


async def test_verify_shows_how_far_it_is_and_ends_with_its_verdict(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = io.StringIO()
    terminal = Console(file=drawn, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    options = cluster_options(None, str(models("qwen3").folder), 0, None, None)
    assert await run_verify(options, Decode(), max_tokens=2, seed=0, as_json=False) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == f"the cluster is the model: {2 * 12} tokens equal"
    for step in ("fetching the whole model", "tensors of coordinator", "loading the model", "penalised, 83 random"):
        assert step in drawn.getvalue()
    assert "13/14" in drawn.getvalue(), "one node, one model, twelve cases, of which the last has begun"

    monkeypatch.setattr(Shard, "logits", lambda shard, h, compute=Shard.logits: -compute(shard, h))
    assert await run_verify(options, Decode(), max_tokens=2, seed=0, as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "the cluster is NOT the model"


@pytest.mark.parametrize("is_terminal", [False, True])
async def test_verify_into_a_pipe_says_each_line_as_it_is_found(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    """A terminal shows a bar meanwhile, and the lines after it."""
    out: list[str] = []
    compare = verify_module.compare

    async def note(*arguments: Any) -> Case:
        out.append(capsys.readouterr().out)
        return await compare(*arguments)

    monkeypatch.setattr(verify_module, "compare", note)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    options = cluster_options(None, str(models("qwen3").folder), 0, None, None)
    assert await run_verify(options, Decode(), max_tokens=2, seed=0, as_json=False) == 0
    first, *others = out
    assert first.startswith("split: ") != is_terminal
    assert all(text.startswith("equal ") and text.count("\n") == 1 for text in others) != is_terminal
    assert capsys.readouterr().out.startswith("split: ") == is_terminal
