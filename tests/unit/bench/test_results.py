"""From trials to rows and ratios, on numbers that can be checked by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.bench.report import print_bench, to_markdown, write_plot
from coordinator.bench.results import (
    CLUSTER,
    MLX_LM,
    ONE_PROCESS,
    Bench,
    BenchRow,
    BenchTrial,
    fastest_splits,
    measured_pipeline,
    sent_between,
    summarise,
    with_overheads,
    with_plan,
    with_predictions,
)
from coordinator.bench.simulate import Hop
from coordinator.planning.plan import Objective
from coordinator.planning.planner import plan
from coordinator.planning.prediction import Prediction
from coordinator.planning.speeds import NO_SPEEDS
from coordinator.sessions.waterfall import Moments, Passage
from protos.brigade_pb2 import StatusReply
from tests.unit.planning.test_planner import GB, ROOMY, model, nodes, surveyed


def times(first: float, gap: float, count: int) -> list[float]:
    return [first + gap * number for number in range(count)]


def split(layers: list[int], count: int, together: float) -> BenchRow:
    return replace(row(CLUSTER, count, together / count, together), layers=layers)


def row(system: str, count: int, each: float, together: float, prompt: float = 100.0, decode: str = "ar") -> BenchRow:
    return BenchRow(system, None, decode, count, prompt, each, together, 0.1, 0.1, 1.0, 1.0)


def test_a_row_says_how_fast_each_and_all_were() -> None:
    trial = BenchTrial(num_prompt=20, started=10.0, token_times=[times(11, 0.5, 9), times(12, 0.25, 9)])
    found = summarise(ONE_PROCESS, [4], "ar", [trial])
    assert (found.concurrency, found.layers, found.utilisation) == (2, [4], None)
    assert found.prompt_tokens_per_s == pytest.approx(20 / 2), "until the last one has its first token"
    assert found.tokens_per_s_per_request == pytest.approx((2 + 4) / 2), "the median of both"
    assert found.tokens_per_s == pytest.approx((4 + 8) / 2), "from 12 to 14, while both decode"
    assert (found.ttft_p50_s, found.ttft_p95_s) == pytest.approx((1.5, 2.0))
    assert (found.gap_p50_ms, found.gap_p95_ms) == pytest.approx((375.0, 500.0))


def test_the_tokens_of_the_first_step_took_no_time_of_decoding() -> None:
    trial = BenchTrial(num_prompt=2, started=0.0, token_times=[[2.0] * 16 + [4.0] * 16])
    found = summarise(ONE_PROCESS, [4], "canvas", [trial])
    assert found.tokens_per_s_per_request == found.tokens_per_s == 8.0
    together = summarise(ONE_PROCESS, [4], "canvas", [replace(trial, token_times=[[2.0] * 16])])
    assert together.tokens_per_s_per_request is together.tokens_per_s is None
    assert together.prompt_tokens_per_s == 1


def test_what_a_single_canvas_hides_is_null(tmp_path: Path) -> None:
    """All tokens come after four steps: neither a prompt's time is known, nor what stages do while all decode."""
    passage = Passage([Moments(0, 0, 0, 0, 10**8, 10**8, 10**8)], 2 * 10**9, 4)
    trial = BenchTrial(2, 0.0, [[2.0] * 16], [passage], [0], [0], first_steps=4)
    found = summarise(CLUSTER, [1], "canvas", [trial])
    assert found.prompt_tokens_per_s is found.tokens_per_s is found.utilisation is found.bubble is None
    bench = bench_of(found, replace(found, layers=[2]))
    assert bench.as_json()["fastest"] == []
    assert "| 2.000 / 2.000 s" in to_markdown(bench)
    write_plot(bench, tmp_path / "plot.svg")


def test_requests_that_never_decode_at_once_count_from_the_first_token_to_the_last() -> None:
    trial = BenchTrial(num_prompt=2, started=0.0, token_times=[times(1, 0.1, 5), times(3, 0.1, 5)])
    assert summarise(MLX_LM, None, "ar", [trial]).tokens_per_s == pytest.approx(9 / 2.4)
    pipeline = measured_pipeline([{"4": 20.0, "1": 10.0}], [3.0])  # read back from JSON: numbers of rows are text
    assert pipeline.stages_s(1) == [0.010] and pipeline.stages_s(4) == [0.020] and pipeline.hops_s(1) == 0.003
    assert measured_pipeline([{1: 10.0}] * 2, [-0.2, 0.5]).hops == (Hop(0.0), Hop(0.0005)), "clocks made one negative"


def test_stages_are_busy_while_they_compute_and_hops_are_what_lies_between() -> None:
    """Two stages whose clocks differ by an hour; frames of 100 ms, of which they compute 30 and 40."""
    hour = 3600 * 10**9
    passages = []
    for number in range(20):
        at = number * 100_000_000
        first = Moments(at, at, at, *[at + 30_000_000] * 4)
        arrived = hour + at + 40_000_000
        second = Moments(arrived, arrived, arrived, arrived + 30_000_000, *[arrived + 40_000_000] * 3)
        passages.append(Passage([first, second], at + 100_000_000, 4))
    trial = BenchTrial(8, 0.0, [times(0.1, 0.1, 20)] * 4, passages, [0, hour], [800, 80], 0.03)
    found = summarise(CLUSTER, [1, 1], "ar", [trial])
    assert found.utilisation == pytest.approx([0.3, 0.4], abs=0.01)
    assert found.bubble == pytest.approx(0.65, abs=0.01)
    assert found.bytes_per_token == pytest.approx([800 / 88, 80 / 88]), "of 8 prompt tokens and 80 others"
    assert found.stage_ms == [{4: pytest.approx(30)}, {4: pytest.approx(40)}]
    assert found.hop_ms == pytest.approx([10, 20]) and found.loop_share == 0.03
    stayed = [Passage(each.timings[:1], each.returned, 4) for each in passages]  # one node makes answers alone
    found = summarise(CLUSTER, [1, 1], "ar", [replace(trial, passages=[*passages[:1], *stayed[1:]])])
    assert found.utilisation == pytest.approx([0.3, 0.0], abs=0.01)
    assert found.stage_ms is found.hop_ms is with_predictions([found], 2, 20)[0].predicted_tokens_per_s is None


def test_a_hop_to_a_busy_stage_does_not_count() -> None:
    """Two stages of 20 and 5 ms with hops of 1 ms: most results wait for the next frame's step on the first stage."""

    def frame(at: int, returned: int) -> Passage:
        moments = [(at, at + 20), (at + 21, at + 26)]
        first, second = (Moments(*[begin * 10**6] * 3, *[end * 10**6] * 4) for begin, end in moments)
        return Passage([first, second], returned * 10**6, 1)

    passages = [frame(0, 40), frame(20, 60), frame(40, 67)]
    trial = BenchTrial(2, 0.0, [times(0.04, 0.02, 3)], passages, [0, 0], [0, 0])
    assert summarise(CLUSTER, [1, 1], "ar", [trial]).hop_ms == pytest.approx([1, 1])


def test_what_a_stage_sent_is_unknown_where_its_worker_did_not_say() -> None:
    """A worker that does not answer in time has a status of zeros; bytes per token are those of the other trials."""
    before = [StatusReply(clock=5, sent_bytes=100), StatusReply(clock=7, sent_bytes=40), StatusReply()]
    after = [StatusReply(clock=9, sent_bytes=180), StatusReply(), StatusReply(clock=8, sent_bytes=60)]
    assert sent_between(before, after) == [80, None, None]
    passage = Passage([Moments(0, 0, 0, 0, 1, 1, 1), Moments(0, 0, 0, 0, 1, 1, 1)], 2, 1)
    trials = [BenchTrial(2, 0.0, [times(1, 1, 2)], [passage], [0, 0], sent) for sent in ([400, None], [None, None])]
    found = summarise(CLUSTER, [1, 1], "ar", trials)
    assert found.bytes_per_token == [100, None]
    assert "| 100 · ? " in to_markdown(Bench("machine", "model", 2, 2, 1, [found]))


def bench_of(*rows: BenchRow, **more: Any) -> Bench:
    return Bench("machine", "model", 16, 16, 8, list(rows), **more)


def test_the_ratios_are_those_that_are_promised() -> None:
    rows = [
        row(ONE_PROCESS, 1, 100, 100), row(MLX_LM, 1, 120, 120), row(CLUSTER, 1, 90, 90),
        row(ONE_PROCESS, 8, 20, 150, prompt=300), row(MLX_LM, 8, 25, 200, prompt=400),
        row(CLUSTER, 8, 40, 300, prompt=450), row(CLUSTER, 1, 1, 1), row(CLUSTER, 8, 1, 1),  # of a second split
    ]  # fmt: skip
    found = Bench("machine", "model", 16, 16, 8, with_overheads(rows)).as_json()
    assert found["ratio_vs_one_process"] == pytest.approx(0.9)
    assert found["overhead_ms_per_token"] == pytest.approx(1e3 / 90 - 10)
    assert found["prefill_ratio_vs_one_process"] == pytest.approx(1.5)
    assert found["ratio_vs_mlx_lm_batch"] == pytest.approx(1.5)


def test_a_comparison_that_was_not_run_or_did_not_fit_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench_of(row(ONE_PROCESS, 8, 20, 150), row(MLX_LM, 8, 25, 200)).as_json()
    keys = ("overhead_ms_per_token", "ratio_vs_one_process", "prefill_ratio_vs_one_process", "ratio_vs_mlx_lm_batch")
    assert [found[key] for key in keys] == [None] * 4
    bench = bench_of(*(row(system, 4, 20, 80) for system in (ONE_PROCESS, MLX_LM, CLUSTER)))  # 8 were asked for
    assert [bench.as_json()[key] for key in keys[2:]] == [None] * 2
    print_bench(bench)
    assert " x " not in capsys.readouterr().out


def test_a_prediction_needs_stages_and_follows_from_their_times() -> None:
    measured = BenchRow(
        CLUSTER, [1, 1], "ar", 2, 1, 1, 1, 1, 1, 1, 1, stage_ms=[{1: 10.0, 2: 10.0}, {1: 10.0}], hop_ms=[0.0, 0.0]
    )
    one, other = with_predictions([measured, row(MLX_LM, 2, 1, 1)], num_prompt=1, num_tokens=50)
    assert one.predicted_tokens_per_s == pytest.approx(100, rel=0.05), "two in turn on two stages of 10 ms"
    assert other.predicted_tokens_per_s is None


EVEN, FRONT = [4, 4], [5, 3]


def test_the_plan_s_figures_stand_beside_the_measured_ones() -> None:
    spec = model([GB] * 2)
    found = plan(spec, nodes(ROOMY, ROOMY), NO_SPEEDS, Objective(1))
    promised = Prediction(spec, found, surveyed(spec, 100, 100))  # 10 ms on each node
    one, two, alone = row(CLUSTER, 1, 45, 45), row(CLUSTER, 2, 40, 80), row(MLX_LM, 1, 9, 9)
    planned = [
        with_plan(each, promised).planned_tokens_per_s for each in (one, two, alone, replace(one, decode="ngram"))
    ]
    assert planned == [pytest.approx(50), pytest.approx(100), None, None]
    assert with_plan(one, Prediction(spec, found, NO_SPEEDS)).planned_tokens_per_s is None


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([split(EVEN, 1, 90), split(EVEN, 8, 300)], []),  # one split is no contest
        ([split(EVEN, 1, 90), split(EVEN, 8, 300), split(FRONT, 1, 80), split(FRONT, 8, 330)], [(8, FRONT), (1, EVEN)]),
        ([split(EVEN, 1, 90), split(FRONT, 1, 80)], [(1, EVEN)]),
        ([split(EVEN, 2, 90), split(EVEN, 8, 300), split(FRONT, 2, 100)], [(2, FRONT)]),  # no memory for 8 there
        ([split(EVEN, 2, 90), split(FRONT, 8, 100)], []),  # nothing was measured of both
    ],
)
def test_fastest_splits_with_most_and_one_request(rows: list[BenchRow], expected: list[tuple[int, list[int]]]) -> None:
    alone = [row(ONE_PROCESS, 8, 99, 999), row(MLX_LM, 1, 999, 999)]
    assert [(found.concurrency, found.layers) for found in fastest_splits([*alone, *rows])] == expected
    told = bench_of(*alone, *rows).as_json()["fastest"]
    assert [(found["concurrency"], found["layers"], found["decode"]) for found in told] == [
        (*found, "ar") for found in expected
    ]
