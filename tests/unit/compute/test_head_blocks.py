"""Rows go through the head in blocks: which, and that a canvas in blocks is the canvas whole."""

import time
from pathlib import Path

import mlx.core as mx
import pytest

from protos.brigade_pb2 import (
    CONDITIONING_EXACT,
    CONDITIONING_TOP,
    Conditioning,
    Frame,
    Opening,
    Result,
    Sampling,
    Window,
)
from worker.compute import executor
from worker.compute.executor import Executor
from worker.compute.header import check_header
from worker.compute.shard import Shard
from worker.compute.step import HeadRows, head_blocks
from worker.errors import FrameError
from worker.memory.history import History
from worker.model.checkpoint import open_folder
from worker.model.describe import describe
from worker.model.model_spec import HEAD_BYTES, most_head_rows

FOLDER = Path(__file__).parents[2] / "fixtures" / "diffusion_gemma"
SPEC = describe(open_folder(FOLDER))


def test_only_a_canvas_is_cut_and_a_block_holds_as_many_rows_as_may_be() -> None:
    canvas = Window(slot=1, tokens=[1, 2], canvas=[3] * 7, guessed=7)
    token, drafts = Window(slot=2, tokens=[1], wanted=1), Window(slot=3, tokens=[1] * 6, wanted=6)
    silent = Window(slot=4, tokens=[1, 2, 3])
    windows = [(token, 0), (canvas, 1), (silent, 10), (drafts, 13), (token, 19)]
    found = [[(part.window.slot, part.rows, part.at) for part in block] for block in head_blocks(windows, 4)]
    assert found == [
        [(2, range(1), 0)], [(1, range(3, 7), 0)], [(1, range(7, 10), 4)], [(3, range(13, 19), 0)],
        [(2, range(19, 20), 0)],
    ]  # fmt: skip
    assert list(head_blocks([(token, 0), (token, 1)], 4)) == [[HeadRows(token, range(1)), HeadRows(token, range(1, 2))]]


@pytest.mark.parametrize("conditioning", [CONDITIONING_EXACT, CONDITIONING_TOP])
def test_a_canvas_in_blocks_is_drawn_as_the_whole(conditioning: Conditioning, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(open_folder(FOLDER), 0, 6)
    shard.materialise(lambda num_bytes: None)
    window = Window(
        prefix_hash=History().prefix_hash(0), tokens=[1, 2, 3], canvas=range(16), guessed=16, canvas_step=1,
        temperature=0.7, conditioning=conditioning,
    )  # fmt: skip
    frame = Frame(opened=[Opening(sampling=Sampling(seed=3, temperature=9.0))], windows=[window])
    found = []
    for most in (16, 5):
        monkeypatch.setattr(executor, "most_head_rows", lambda vocab_size, most=most: most)
        result = Executor(shard, 0, SPEC.dtype).step(frame, 0)
        assert isinstance(result, Result)
        found.append(([sample.token for sample in result.guesses], result.soft[0].ids))
    assert found[0] == found[1]


def test_some_rows_of_a_canvas_guess_what_they_guess_among_all() -> None:
    shard = Shard(open_folder(FOLDER), 0, 6)
    shard.materialise(lambda num_bytes: None)
    frame = Frame(opened=[Opening(sampling=Sampling(seed=3, temperature=9.0))])
    found = []
    for first, count in ((0, 16), (3, 5)):
        rows = {"canvas": range(16), "canvas_first": first, "guessed": count, "canvas_step": 1}
        window = Window(prefix_hash=History().prefix_hash(0), tokens=[1, 2], targets=[2], **rows)  # type: ignore[arg-type]
        result = Executor(shard, 0, SPEC.dtype).step(Frame(opened=frame.opened, windows=[window]), 0)
        assert isinstance(result, Result)
        found.append(([sample.token for sample in result.guesses], result.scores))
    (whole, scores), (some, same) = found
    assert some == whole[3:8] and list(same) == list(scores) and len(scores) == 1


@pytest.mark.parametrize(
    "window",
    [Window(tokens=[1], masks=2, guessed=1, canvas_first=1), Window(canvas=[3] * 4, guessed=3, canvas_first=2)],
    ids=["without a canvas", "too many"],
)
def test_rows_to_guess_that_a_window_does_not_have_are_refused(window: Window) -> None:
    with pytest.raises(FrameError):
        check_header(Frame(windows=[window]), 0, 48, SPEC.dtype)


def test_the_layers_are_done_before_the_second_block_as_the_timing_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(open_folder(FOLDER), 0, 6)
    shard.materialise(lambda num_bytes: None)
    begun: list[int] = []
    logits = shard.logits

    def watched(rows: mx.array) -> mx.array:
        begun.append(time.monotonic_ns())
        return logits(rows)

    monkeypatch.setattr(shard, "logits", watched)
    monkeypatch.setattr(executor, "most_head_rows", lambda vocab_size: 5)
    window = Window(prefix_hash=History().prefix_hash(0), tokens=[1], canvas=range(16), guessed=16, canvas_step=1)
    result = Executor(shard, 0, SPEC.dtype).step(Frame(opened=[Opening()], windows=[window]), 0)
    [timing] = result.timings
    assert timing.started < timing.computed < begun[1] < begun[3] < timing.sampled


def test_a_plan_counts_the_head_of_the_last_stage_for_canvases_only() -> None:
    assert SPEC.scratch_bytes(5) == 0 and SPEC.scratch_bytes(6) >= 8 * 4 * 97 * 16
    assert most_head_rows(262144) == HEAD_BYTES // (4 * 262144) == 64
    assert most_head_rows(1 << 30) == 1
