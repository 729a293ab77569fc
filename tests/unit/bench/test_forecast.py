"""Forecasts: what bounds their work, that they can be interrupted, which flags and which files they refuse."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.bench import forecast as forecast_module
from coordinator.bench.forecast import Assumed, ForecastTimes, forecast, given_pipeline, profiled_pipeline, read_times
from coordinator.cli.app import app
from coordinator.cli.plan import run_forecast
from coordinator.cluster import open as open_module
from coordinator.cluster.options import cluster_options
from coordinator.cluster.peer import Peer
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS, LinkSpeed, NodeSpeed, Survey
from tests.unit.planning.test_planner import GB, ROOMY, model, nodes
from worker.errors import InputError
from worker.model.model_spec import CanvasTraining, Refinement

TWO_STAGES = Assumed(
    stage_ms=(10.0, 10.0), row_ms=(0.0,), hop_ms=(0.0,), gbps=None, measured=None, concurrency=(1, 2),
    num_prompt=1, num_tokens=20, chunk=None,
)  # fmt: skip
UNEQUAL = replace(TWO_STAGES, concurrency=(1, 2, 4, 8, 16), num_prompt=128, num_tokens=64)
FLAT = ForecastTimes(given_pipeline((10.0, 10.0), (0.0,), (0.0,), None, 0))
ROW = {
    "system": "cluster", "decode": "ar", "concurrency": 1, "layers": [4, 4],
    "stage_ms": [{"1": 10.0, "2": 12.0}, {"1": 6.0, "2": 8.0}], "hop_ms": [3.0, -0.1],
}  # fmt: skip
COSTS = {"layers": [4, 4], "stage_ms": [{"1": 7.0, "4": 9.0}, {"1": 7.5, "4": 9.5}], "hop_ms": [1.0, 0.5]}
ALONE = {"system": "mlx_lm", "decode": "ar", "concurrency": 1, "layers": None, "stage_ms": None, "hop_ms": None}


@pytest.mark.parametrize(
    ("times", "change"),
    [
        (FLAT, {"concurrency": tuple(range(500, 540)), "num_tokens": 200}),  # each of them alone is little enough
        (FLAT, {"concurrency": (512,), "num_tokens": 100_000}),
        (FLAT, {"num_prompt": 500_000, "chunk": 1}),
        (FLAT, {"num_prompt": 10**9}),
        (FLAT, {"canvas": (4096, 60_000), "num_tokens": 1, "concurrency": (8,)}),
        (ForecastTimes(given_pipeline((1.0,) * 10_000, (0.0,), (0.0,), None, 0)), {}),
    ],
)
def test_a_forecast_that_would_take_too_long_is_refused_at_once(times: ForecastTimes, change: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        forecast(times, replace(TWO_STAGES, **change))
    assert refused.value.field == "simulate"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("num_tokens", [64, 512])
def test_a_few_tokens_of_a_canvas_forecast_the_speed_of_many(num_tokens: int, count: int) -> None:
    given = replace(TWO_STAGES, canvas=(256, 8), concurrency=(count,))
    few, many = (forecast(FLAT, replace(given, num_tokens=each))[0] for each in (num_tokens, 60 * 256))
    assert few.tokens_per_s == pytest.approx(many.tokens_per_s, rel=0.02)


def write(folder: Path, *rows: object, **more: object) -> Path:
    path = folder / "bench.json"
    said = {"machine": "here", "prompt_tokens": 16, "generated_tokens": 20, "rows": rows, **more}
    path.write_text(json.dumps(said))
    return path


@pytest.mark.parametrize(("row_ms", "of_eight"), [(None, 8e3 / (2 * 26.5 * 220 / 107)), ((0.0,), 8e3 / 36.3)])
def test_rows_are_not_free_unless_somebody_says_so(row_ms: tuple[float, ...] | None, of_eight: float) -> None:
    """Two lanes of four rows, and the slower stage never idle; where rows are free, whoever comes goes along."""
    pipeline = given_pipeline((26.5, 6.5), row_ms, (3.0, 0.3), None, 0)
    one, eight = forecast(ForecastTimes(pipeline), replace(UNEQUAL, concurrency=(1, 8)))
    assert one.tokens_per_s == pytest.approx(1e3 / 36.3, rel=0.01)
    assert eight.tokens_per_s == pytest.approx(of_eight, rel=0.01)


def test_hops_are_one_or_as_many_as_stages() -> None:
    assert given_pipeline((1.0, 2.0), (0.0,), (3.0,), None, 0) == given_pipeline((1, 2), (0, 0), (3, 3), None, 0)
    with pytest.raises(InputError) as refused:
        given_pipeline((1.0, 2.0), (0.0,), (1.0, 2.0, 3.0), None, 0)
    assert refused.value.field == "hop_ms"


async def test_a_forecast_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it takes, the event loop goes on: there Ctrl-C cancels it."""
    begun, go_on = threading.Event(), threading.Event()

    def forecast_for_ever(*_: object) -> list[object]:
        begun.set()
        go_on.wait(30.0)
        return []

    monkeypatch.setattr(forecast_module, "forecast", forecast_for_ever)
    options = cluster_options(None)
    task = asyncio.create_task(run_forecast(options, TWO_STAGES, as_json=True))
    assert await asyncio.to_thread(begun.wait, 10.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()


def test_measured_times_are_those_of_as_many_requests_or_the_means_of_the_clusters_rows(tmp_path: Path) -> None:
    four = ROW | {"concurrency": 4, "stage_ms": [{"1": 20.0}, {"1": 8.0}], "hop_ms": [5.0, 0.3]}
    times = read_times(write(tmp_path, ALONE, ROW, four, ROW | {"decode": "ngram", "layers": [1, 7]}))
    for count, stages_s, hops_s in ((1, [0.010, 0.006], [0.003, 0]), (4, [0.020, 0.008], [0.005, 0.0003])):
        assert times.of(count).stages_s(1) == pytest.approx(stages_s)
        assert [hop.latency_s for hop in times.of(count).hops] == pytest.approx(hops_s)
    assert times.of(2).stages_s(1) == pytest.approx([0.015, 0.007])
    assert [hop.latency_s for hop in times.of(2).hops] == pytest.approx([0.004, 0.0001])


def test_more_requests_than_were_measured_go_by_what_frames_cost_while_all_stages_were_at_work(tmp_path: Path) -> None:
    """One request's row says what a row costs while the other stage is idle: too little where both share a machine."""
    alone = ROW | {"stage_ms": [{"1": 4.0, "32": 40.0}, {"1": 5.0, "32": 36.0}]}
    times = read_times(write(tmp_path, alone, frame_costs=[COSTS]))
    assert times.of(1).stages_s(1) == pytest.approx([0.004, 0.005])
    assert times.of(8).stages_s(1) == pytest.approx([0.007, 0.0075])
    assert times.of(8).stages_s(4) == pytest.approx([0.009, 0.0095])
    assert times.of(8).stages_s(32) == pytest.approx([0.040, 0.036]), "chunks of prompts as in the rows"
    assert [hop.latency_s for hop in times.of(8).hops] == pytest.approx([0.001, 0.0005])
    [eight] = forecast(times, replace(TWO_STAGES, concurrency=(8,), num_tokens=200))
    assert eight.tokens_per_s == pytest.approx(8 / 0.020, rel=0.01), "two lanes of four: each frame's way is 20 ms"


def test_a_canvas_goes_by_the_times_of_canvases(tmp_path: Path) -> None:
    canvas = ROW | {"decode": "canvas", "stage_ms": [{"16": 4.0}, {"16": 5.0}]}
    path = write(tmp_path, ROW, canvas)
    assert read_times(path, "canvas").of(1).stages_s(16) == pytest.approx([0.004, 0.005])
    with pytest.raises(InputError, match="--decode canvas"):
        read_times(write(tmp_path, ROW), "canvas")


def test_a_forecast_from_a_file_is_of_the_load_that_was_measured_unless_told_otherwise(tmp_path: Path) -> None:
    times = read_times(write(tmp_path, ROW))
    asked = replace(TWO_STAGES, num_prompt=None, num_tokens=None)
    assert (times.num_prompt, times.num_tokens) == (16, 20)
    assert forecast(times, asked) == forecast(times, replace(asked, num_prompt=16, num_tokens=20))
    assert forecast(times, asked) != forecast(times, replace(asked, num_prompt=17))
    same = read_times(write(tmp_path, ROW | {"stage_ms": [{"1": 6.0}, {"1": 6.0}]}))  # all frames had one size
    assert forecast(same, replace(TWO_STAGES, concurrency=(1,)))
    with pytest.raises(InputError) as refused:
        forecast(same, replace(TWO_STAGES, concurrency=(1, 2, 8)))
    assert refused.value.field == "concurrency"
    other_split = read_times(write(tmp_path, ROW, frame_costs=[COSTS | {"layers": [1, 7]}]))
    assert other_split.of(8).stages_s(1) == pytest.approx([0.010, 0.006]), "its frame costs are not taken"


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    for text in ("", "[]", "{}", "null", '{"rows": 5}', '{"rows": [1]}', "\udcff", "[" * 100_000):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(InputError, match="expected what `brigade bench --json` prints, found in"):
            read_times(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stage_ms": [{"1": 0}, {"1": 6.0}]}, r"rows\.0\.stage_ms\.0\.1"),
        ({"stage_ms": [{"1": -3.0}, {"1": 6.0}]}, r"rows\.0\.stage_ms\.0\.1"),
        ({"stage_ms": [{"1": float("nan")}, {"1": 6.0}]}, r"rows\.0\.stage_ms\.0\.1"),
        ({"stage_ms": [{"1": 6.0}, {"0": 6.0}]}, r"rows\.0\.stage_ms\.1\.0"),
        ({"stage_ms": [{"9" * 4000: 6.0}, {"1": 6.0}]}, r"rows\.0\.stage_ms\.0\."),
        ({"stage_ms": [{}, {}]}, r"rows\.0\.stage_ms\.0"),
        ({"hop_ms": [3.0, float("inf")]}, r"rows\.0\.hop_ms\.1"),
        ({"stage_ms": [], "hop_ms": []}, "of 2 stages in every row"),
        ({"stage_ms": None}, "of 2 stages in every row"),
        ({"hop_ms": [3.0]}, "of 2 stages in every row"),
        ({"layers": [], "stage_ms": [], "hop_ms": []}, "of 0 stages"),
        ({"system": "one process"}, "expected one split of a cluster, found 0"),
    ],
)
def test_rows_without_times_are_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_times(write(tmp_path, ROW | change))


def test_a_file_of_two_splits_and_frame_costs_without_times_are_refused(tmp_path: Path) -> None:
    for rows, costs, said in (
        ([ROW, ROW | {"layers": [2, 6]}], COSTS, "expected one split of a cluster, found 2"),
        ([ROW], COSTS | {"hop_ms": [0.1]}, "expected frame_costs of 2 stages"),
        ([ROW], COSTS | {"stage_ms": [{"1": 0}, {"1": 1}]}, r"frame_costs\.0\.stage_ms\.0\.1"),
    ):
        with pytest.raises(InputError, match=said):
            read_times(write(tmp_path, *rows, frame_costs=[costs]))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        *((f"plan --{name.replace('_', '-')} 1", name) for name in ("stage_ms", "row_ms", "hop_ms", "measured")),
        ("plan --gbps 1", "gbps"),
        ("plan -p 1", "num_prompt"),
        ("plan -g 64", "num_tokens"),  # its default, but given
        ("plan --prefill-step-size 1", "prefill_step_size"),
        *(
            (f"plan --simulate --stage-ms 5,5 --{name} {value}", name)
            for name, value in (("local", "1"), ("layers", "4,4"), ("context", "9"), ("model", "demo"))
        ),
        *(
            (f"plan --simulate --measured x --{name.replace('_', '-')} 1", name)
            for name in ("config", "row_ms", "hop_ms", "gbps")
        ),
        ("plan --simulate", "simulate"),
        ("plan --simulate --config x --hop-ms 1", "hop_ms"),
        ("plan --simulate --config x --local 1", "local"),
        ("plan --simulate --stage-ms 5 --measured x", "simulate"),
        ("plan --simulate --stage-ms a", "stage_ms"),
        ("plan --simulate --stage-ms 0,5", "stage_ms"),
        ("plan --simulate --stage-ms 1 --concurrency 3000", "concurrency"),
        *((f"bench --concurrency {value}", "concurrency") for value in ("1,zero", "0", "9" * 5000)),
        ("bench --decode fast", "decode"),
        ("bench --plot x.png --concurrency 4", "plot"),
        ("bench --local 0 --layers 99,7", "layers"),
    ],
)
def test_flags_that_mean_nothing_together_are_refused(arguments: str, field: str) -> None:
    with pytest.raises(InputError) as refused:
        app(arguments.split(), standalone_mode=False)
    assert refused.value.field == field


FIRST = NodeSpeed((((1, 1.0), (8, 29.0)),), ((1, 1.0), (8, 1.0)), 100)
SECOND = NodeSpeed((((1, 2.0), (8, 58.0)),), ((1, 1.0), (8, 1.0)), 50)
KNOWN = Survey({"n0": FIRST, "n1": SECOND}, {"n1": LinkSpeed(rtt_ms=1.0, bytes_per_s=1e6)})


def test_a_plan_whose_nodes_have_measured_themselves_is_simulated_with_what_rows_cost() -> None:
    """Two layers each, of 1 ms and 4 more per further row, and twice that on the other node, which has the head."""
    spec = model([GB] * 4, hidden=500)
    found = profiled_pipeline(spec, plan(spec, nodes(ROOMY, ROOMY), NO_SPEEDS, Objective(1, layers=[2, 2])), KNOWN)
    assert found.stages_s(1) == pytest.approx([0.002, 0.005]) and found.stages_s(8) == pytest.approx([0.058, 0.117])
    assert [hop.seconds(2) for hop in found.hops] == pytest.approx([0.0025, 0.0005])
    alone = profiled_pipeline(spec, plan(spec, nodes(ROOMY), NO_SPEEDS, Objective(1)), KNOWN)
    assert alone.stages_s(1) == pytest.approx([0.005]) and alone.hops_s(1) == 0


def test_all_rows_of_a_canvas_pass_the_head_and_their_expected_embeddings_go_back() -> None:
    """The head takes 1 ms per row, the two layers of each node nothing more for further rows."""
    speed = NodeSpeed((((1, 2.0), (512, 2.0)),), ((1, 1.0), (512, 512.0)), 50)
    survey = Survey({"n0": speed, "n1": speed}, KNOWN.ports)
    spec = replace(model([GB] * 4, hidden=500), canvas=CanvasTraining(None, 100, refinement=Refinement()))
    split = plan(spec, nodes(ROOMY, ROOMY), NO_SPEEDS, Objective(1, layers=[2, 2]))
    found = profiled_pipeline(spec, split, survey, 100)
    assert found.stages_s(100) == found.stages_s(512) == pytest.approx([0.004, 0.104])
    assert found.hops[-1].seconds(100) == pytest.approx(0.0005 + 0.1), "500 numbers in bfloat16 each"
    assert profiled_pipeline(spec, split, survey).stages_s(512) == pytest.approx([0.004, 0.005]), "of a prompt"


def test_the_plan_of_a_cluster_is_simulated_if_its_nodes_have_measured_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the bundled model's 8 layers."""
    known = {"n0": FIRST}

    @asynccontextmanager
    async def open_peers(*given: object) -> AsyncIterator[list[Peer]]:
        yield []

    async def ask_nodes(*given: object) -> list[Node]:
        return nodes(ROOMY, ROOMY)

    async def known_speeds(*given: object) -> Survey:
        return Survey(known, KNOWN.ports)

    for module, fake in ((forecast_module, open_peers), (open_module, ask_nodes), (open_module, known_speeds)):
        monkeypatch.setattr(module, fake.__name__, fake)
    config = tmp_path / "cluster.yaml"
    config.write_text("workers: [{name: n1, address: '127.0.0.1:1'}]", encoding="utf-8")
    arguments = ["plan", "--simulate", "--config", str(config), "--model", "demo", "--concurrency", "1", "--json"]
    with pytest.raises(InputError, match="or workers on other machines, which are measured"):
        app(arguments, standalone_mode=False)
    monkeypatch.setattr(forecast_module, "is_worth_measuring", lambda peers: True)
    with pytest.raises(InputError, match="measured themselves, found n1"):
        app(arguments, standalone_mode=False)
    known["n1"] = SECOND
    app(arguments, standalone_mode=False)
    [found] = json.loads(capsys.readouterr().out)["simulated"]
    assert len(found["utilisation"]) == 2
    assert found["tokens_per_s"] == pytest.approx(1000 / (7 * 1 + 1 * 2 + 1 + 1.5), rel=0.05), "7 layers and one"
