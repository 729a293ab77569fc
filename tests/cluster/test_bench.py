"""`brigade bench` and `brigade plan --simulate` as users run them, over real workers: what they say."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.bench import bench as module
from coordinator.bench.bench import MlxLmModel, OnChain, Workload
from coordinator.bench.results import ONE_PROCESS, Bench, BenchRow, BenchTrial
from coordinator.cli.bench import run_bench
from coordinator.cluster.options import cluster_options
from coordinator.decoding.decode_options import Decode
from coordinator.sessions.request import Request
from tests.cluster.commands import run_here
from tests.cluster.models import make_talker
from tests.cluster.processes import write_cluster
from tools import bench_auto
from worker.errors import BrigadeError, InputError, StageLost
from worker.model.describe import describe
from worker.node.loading import open_checkpoint
from worker.platform.machine import machine_name

LOAD = ("-p", "24", "-g", "16", "-n", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("models") / "talker")


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One bench of two nodes with a picture: its JSON object, and that as a file."""
    folder = tmp_path_factory.mktemp("bench")
    plot = folder / "bench.png"
    load = ("--concurrency", "4,1", *LOAD[:-1], "2")  # trials
    done = run_here("bench", "--model", model, "--local", "1", *load, "--json", "--plot", plot)
    assert done.code == 0, done.err
    assert plot.read_bytes().startswith(b"\x89PNG")
    (folder / "bench.json").write_text(done.out)
    return json.loads(done.out), folder / "bench.json"


def test_every_system_is_measured_at_every_number_of_requests(measured: tuple[dict[str, Any], Path]) -> None:
    bench, _ = measured
    rows = {(row["system"], row["concurrency"]): row for row in bench["rows"]}
    assert list(rows) == [(system, count) for count in (1, 4) for system in ("one process", "mlx_lm", "cluster")]
    assert bench["machine"] == machine_name()
    for row in rows.values():
        assert row["tokens_per_s"] > 0 and row["prompt_tokens_per_s"] > 0
        assert 0 < row["gap_p50_ms"] <= row["gap_p95_ms"] and 0 < row["ttft_p50_s"] <= row["ttft_p95_s"]
    for row in (rows["cluster", 1], rows["cluster", 4]):
        assert len(row["utilisation"]) == len(row["bytes_per_token"]) == len(row["hop_ms"]) == 2
        assert all(0 < part <= 1 for part in row["utilisation"])
        assert row["bubble"] == pytest.approx(1 - sum(row["utilisation"]) / 2)
        assert row["bytes_per_token"][0] > 64 * 4, "a token's hidden state"
        assert row["bytes_per_token"][1] < 200, "token ids, no logits"
        assert 0 < row["loop_share"] < 1
    alone, cluster = rows["one process", 1], rows["cluster", 1]
    ratio = cluster["tokens_per_s_per_request"] / alone["tokens_per_s_per_request"]
    assert bench["ratio_vs_one_process"] == pytest.approx(ratio)


def test_a_measured_bench_can_be_simulated(measured: tuple[dict[str, Any], Path]) -> None:
    """How close the forecast comes is no claim here: this machine is shared while tests run."""
    bench, path = measured
    predicted = {row["system"]: row["predicted_tokens_per_s"] for row in bench["rows"]}
    assert predicted["one process"] > 0 and predicted["cluster"] > 0 and predicted["mlx_lm"] is None
    [costs] = bench["frame_costs"]
    assert costs["layers"] == bench["rows"][-1]["layers"] and len(costs["hop_ms"]) == 2
    for by_rows in costs["stage_ms"]:
        sizes = set(map(int, by_rows))
        assert 1 in sizes and all(ms > 0 for ms in by_rows.values())
        assert len(sizes) > 1, "frames of several rows were measured too, whichever lanes this machine chose"
    load = ("--concurrency", "1,4,9", "-p", "24", "-g", "16")
    done = run_here("plan", "--simulate", "--measured", path, *load, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["simulated"]
    assert [row["concurrency"] for row in found] == [1, 4, 9]
    assert all(len(row["utilisation"]) == 2 and row["tokens_per_s"] > 0 for row in found)


def test_without_workers_only_this_process_is_measured_and_each_decoder_once(model: Path, tmp_path: Path) -> None:
    config = write_cluster(tmp_path / "cluster.yaml", model=str(model), workers="[]")
    done = run_here("bench", "--config", config, "--concurrency", "1", *LOAD, "--decode", "ar, ar,auto,ngram", "--json")
    assert done.code == 0, done.err
    bench = json.loads(done.out)
    cases = [(row["system"], row["decode"]) for row in bench["rows"]]
    assert cases == [("one process", "ar"), ("mlx_lm", "ar"), ("one process", "ngram")]
    assert bench["ratio_vs_one_process"] is bench["ratio_vs_mlx_lm_batch"] is bench["overhead_ms_per_token"] is None


def test_more_requests_than_there_is_memory_for_are_left_out(model: Path, tmp_path: Path) -> None:
    """They would wait for each other, and the table would not tell."""
    spec = describe(open_checkpoint(str(model)))
    everything = 0, spec.num_layers
    three = spec.shard_bytes(*everything) + 3 * spec.reserved_bytes(*everything, 24 + 16)
    config = write_cluster(tmp_path / "cluster.yaml", model=str(model), coordinator=f"{{name: me, memory: {three}}}")
    done = run_here("bench", "--config", config, "--concurrency", "3,4", *LOAD, "--json")
    assert done.code == 0, done.err
    assert {row["concurrency"] for row in json.loads(done.out)["rows"]} == {3}
    assert "one process: 4 at once left out, there is memory for 3\n" in done.err
    none = run_here("bench", "--config", config, "--concurrency", "4", *LOAD, "--json")
    assert (none.code, none.out) == (2, "")
    assert "there is memory for 3\n" in none.err and "error: --concurrency: expected a case that fits" in none.err


def test_cases_that_cannot_be_measured_are_named_and_the_rest_goes_on(model: Path, tmp_path: Path) -> None:
    """This node has room for one layer of four, the model has no MASK token."""
    spec = describe(open_checkpoint(str(model)))
    one = spec.shard_bytes(0, 1) + 2 * spec.reserved_bytes(0, 1, 24 + 16)
    config = write_cluster(tmp_path / "cluster.yaml", model=str(model), coordinator=f"{{name: me, memory: {one}}}")
    done = run_here(
        "bench", "--config", config, "--local", "1", "--layers", "3,1", "--layers", "1,3", "--concurrency", "1",
        "--decode", "ar,diffusion", *LOAD,
    )  # fmt: skip
    assert done.code == 0, done.err
    said = done.err.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "--decode diffusion left out", "no comparison with one process", "cluster 3,1 left out"
    ], said  # fmt: skip
    assert f"{model.name} with 40 tokens of context does not fit: me lacks" in said[2]
    assert done.out.count("cluster 1,3 ") == 1 and "cluster 3,1" not in done.out
    assert max(map(len, done.out.splitlines()[1:])) <= 100


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How many steps the progress bar has in all, and each step that it showed."""
    shown: list[str] = []

    @contextmanager
    def show_steps(total: int) -> Iterator[Callable[[str], None]]:
        shown.append(str(total))
        yield shown.append

    monkeypatch.setattr(module, "show_steps", show_steps)
    return shown


def in_this_process(model: Path, *counts: int) -> Bench:
    options = cluster_options(None, str(model), 0, None, None)
    return asyncio.run(module.measure(options, Workload(counts, 4, 4, (Decode(),), (None,), 1)))


def test_the_bar_says_which_case_it_is_at_and_how_far(model: Path, begun: list[str]) -> None:
    in_this_process(model, 1, 2)
    assert begun == ["8"] + [
        f"{system}, ar, {count} at once, {trial}"
        for count in (1, 2)
        for trial in ("warming up", "trial 1")
        for system in ("one process", "mlx_lm")
    ]


def test_all_systems_share_the_one_thread_that_owns_mlx(
    model: Path, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, used = set(threading.enumerate()), []
    run_trial = OnChain.run

    async def run_and_note(self: OnChain, requests: Sequence[Request], *more: Any) -> BenchTrial:
        trial = await run_trial(self, requests, *more)
        used.append([thread for thread in {*threading.enumerate()} - before if thread.name == "mlx"])
        return trial

    monkeypatch.setattr(OnChain, "run", run_and_note)
    options = cluster_options(None, str(model), 1, None, None)
    found = asyncio.run(module.measure(options, Workload((1,), 2, 2, (Decode(),), (None,), 1)))
    assert [row.system for row in found.rows] == ["one process", "mlx_lm", "cluster"]
    assert all(len(threads) == 1 for threads in used)


def test_batches_that_mlx_lm_cannot_run_are_left_out(
    model: Path, begun: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    time_tokens = MlxLmModel.time_tokens

    def time_one(self: MlxLmModel, prompts: Sequence[Sequence[int]], *more: Any) -> list[list[float]]:
        if len(prompts) > 1:
            raise ValueError("ArraysCache does not yet support batching with history")
        return time_tokens(self, prompts, *more)

    monkeypatch.setattr(MlxLmModel, "time_tokens", time_one)
    found = in_this_process(model, 1, 2)
    assert [(row.system, row.concurrency) for row in found.rows] == [
        ("one process", 1), ("mlx_lm", 1), ("one process", 2)
    ]  # fmt: skip
    assert "mlx_lm, ar, 2 at once left out: mlx_lm cannot: ArraysCache does not" in capsys.readouterr().err


def test_a_cluster_that_fails_costs_none_of_what_was_measured(
    model: Path, begun: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_trial = OnChain.run

    async def run_or_fail(self: OnChain, requests: Sequence[Request], *more: Any) -> BenchTrial:
        if len(requests) > 1:
            raise StageLost("closed the connection", node="mini")
        return await run_trial(self, requests, *more)

    monkeypatch.setattr(OnChain, "run", run_or_fail)
    options = cluster_options(None, str(model), 0, None, None)
    workload = Workload((1, 2), 4, 4, (Decode(),), (None,), 1)
    with pytest.raises(StageLost, match="worker mini: closed the connection"):
        asyncio.run(run_bench(options, workload, as_json=True, plot=None))
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["system"], row["concurrency"]) for row in rows] == [("one process", 1), ("mlx_lm", 1)]
    with pytest.raises(StageLost):
        in_this_process(model, 2)  # nothing was measured


def test_a_picture_that_cannot_be_drawn_costs_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()

    async def measure_while_the_folder_goes(*_: object) -> Bench:
        shutil.rmtree(folder)
        return Bench("here", "model", 2, 2, 1, [BenchRow(ONE_PROCESS, [4], "ar", 1, 1, 1, 1, 1, 1, 1, 1)])

    monkeypatch.setattr(module, "measure", measure_while_the_folder_goes)
    workload = Workload((1,), 2, 2, (Decode(),), (None,), 1)
    options = cluster_options(None, None, 0, None, None)
    with pytest.raises(InputError, match=r"^plot: cannot write .*x\.png: No such file"):
        asyncio.run(run_bench(options, workload, as_json=True, plot=folder / "x.png"))
    assert json.loads(capsys.readouterr().out)["machine"] == "here"


def test_impossible_flags_are_refused_with_one_line() -> None:
    for command, field in (
        ("bench -p 4000", "--num-prompt"),
        ("plan --simulate --measured nowhere.json", "--measured"),
    ):
        done = run_here(*command.split())
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"error: {field}: ")


@pytest.mark.parametrize(
    ("splits", "plot", "said"),
    [
        (((9, 9),), None, "layers: expected a sum of 4"),
        ((None,), "nowhere/x.png", "plot: cannot write nowhere/x.png"),
        ((None,), "x.txt", "plot: expected a file ending in"),
    ],
)
def test_a_wrong_split_or_picture_is_refused_before_anything_is_measured(
    model: Path, splits: tuple[tuple[int, ...] | None, ...], plot: str | None, said: str
) -> None:
    options = cluster_options(None, str(model), 1, None, None)
    workload = Workload((1,), 4, 4, (Decode(),), splits, 1)
    with pytest.raises(BrigadeError, match=said):
        asyncio.run(run_bench(options, workload, as_json=True, plot=Path(plot) if plot else None))


@pytest.mark.matrix
def test_auto_is_measured_against_one_token_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masked = make_talker(tmp_path / "masked", mask_token_id=0)
    bench_auto.main(str(masked), local=0, requests="2", rounds=1)
    printed = capsys.readouterr().out
    assert [printed.count(word) for word in ("greedy", "sampled", " x (")] == [1, 1, 2]
