"""`brigade bench` and `brigade plan --simulate` as users run them, over real workers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.bench.bench import OnChain, OnMlxLm, Workload
from coordinator.bench.results import BenchTrial
from coordinator.decoding.decode_options import Decode
from coordinator.sessions.request import Request
from tests.cluster.commands import parse, run_here
from tests.cluster.models import VOCAB, make_refiner, make_talker
from tests.cluster.processes import write_cluster
from tools import bench_auto
from worker.errors import StageLost
from worker.model.describe import describe
from worker.node.loading import open_checkpoint
from worker.platform.machine import machine_name

LOAD = ("-p", "24", "-g", "16", "-n", "1")


def memory_for(model: Path, num_layers: int, num_requests: int) -> str:
    """The `coordinator` of a cluster.yaml with memory for so many layers and requests of LOAD."""
    spec = describe(open_checkpoint(str(model)))
    reserved = num_requests * spec.reserved_bytes(0, num_layers, 24 + 16)
    return f"{{name: me, memory: {spec.shard_bytes(0, num_layers) + reserved}}}"


def test_every_system_is_measured_at_every_concurrency_and_can_be_simulated(talker: Path, tmp_path: Path) -> None:
    """How close the forecast comes is no claim here: this machine is shared while tests run."""
    plot = tmp_path / "bench.png"
    load = ("--concurrency", "4,1", *LOAD[:-1], "2", "--prompts", "20,9")
    bench = parse(run_here("bench", "--model", talker, "--local", "1", *load, "--json", "--plot", plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = {(row["system"], row["concurrency"]): row for row in bench["rows"]}
    assert list(rows) == [(system, count) for count in (1, 4) for system in ("one process", "mlx_lm", "cluster")]
    assert bench["machine"] == machine_name()
    for row in rows.values():
        assert row["tokens_per_s"] > 0 and row["prompt_tokens_per_s"] > 0
        assert 0 < row["gap_p50_ms"] <= row["gap_p95_ms"] and 0 < row["ttft_p50_s"] <= row["ttft_p95_s"]
    for row in (rows["cluster", 1], rows["cluster", 4]):
        assert len(row["utilisation"]) == len(row["hop_ms"]) == 2 and 0 < row["loop_share"] < 1
        assert all(0 < part <= 1 for part in row["utilisation"])
        assert row["bubble"] == pytest.approx(1 - sum(row["utilisation"]) / 2)
        hidden_states, tokens = row["bytes_per_token"]
        assert hidden_states > 64 * 4 and tokens < 200, "token ids, no logits"
    ratio = rows["cluster", 1]["tokens_per_s_per_request"] / rows["one process", 1]["tokens_per_s_per_request"]
    assert bench["ratio_vs_one_process"] == pytest.approx(ratio)
    assert [rows[name, 1]["predicted_tokens_per_s"] is None for name in ("one process", "mlx_lm")] == [False, True]
    timed = [(row["system"], row["prompt_tokens"]) for row in bench["prompts"]]
    assert timed == [(system, length) for length in (9, 20) for system in ("one process", "mlx_lm", "cluster")]
    for row in bench["prompts"]:
        assert row["prompt_s"] > 0 and row["prompt_s"] * row["prompt_tokens_per_s"] == pytest.approx(
            row["prompt_tokens"]
        )
    [costs] = bench["frame_costs"]
    assert costs["layers"] == rows["cluster", 4]["layers"] and len(costs["hop_ms"]) == 2
    assert all("1" in by_rows and len(by_rows) > 1 and min(by_rows.values()) > 0 for by_rows in costs["stage_ms"])

    (tmp_path / "bench.json").write_text(json.dumps(bench))
    load = ("--concurrency", "1,9", *LOAD[:-2])
    found = parse(run_here("plan", "--simulate", "--measured", tmp_path / "bench.json", *load, "--json"))["simulated"]
    assert [row["concurrency"] for row in found] == [1, 9]
    assert all(len(row["utilisation"]) == 2 and row["tokens_per_s"] > 0 for row in found)


@pytest.mark.long
def test_a_node_that_makes_answers_alone_is_measured_with_those_that_compute_its_prompts(talker: Path) -> None:
    """Their frames are no chain's, so that nothing follows about further requests."""
    flags = ("--local", "1", "--objective", "prompt", "--layers", "2,2", "--concurrency", "1", *LOAD, "--prompts", "60")
    bench = parse(run_here("bench", "--model", talker, *flags, "--json"))
    [row] = [row for row in bench["rows"] if row["system"] == "cluster"]
    busiest, other = row["utilisation"]
    assert 0 <= other < busiest <= 1 and row["tokens_per_s"] > 0
    assert row["stage_ms"] is row["hop_ms"] is row["predicted_tokens_per_s"] is None and not bench["frame_costs"]
    assert [each["system"] for each in bench["prompts"]] == ["one process", "mlx_lm", "cluster"]


def test_without_workers_each_decoder_is_measured_once_with_what_fits(talker: Path, tmp_path: Path) -> None:
    """Requests beyond the memory would wait for each other, and the table would not tell."""
    config = write_cluster(
        tmp_path / "cluster.yaml", model=str(talker), workers="[]", coordinator=memory_for(talker, 4, 1)
    )
    command = ("bench", "--config", config, *LOAD, "--decode", "ar, ar,auto,ngram", "--json", "--concurrency")
    done = run_here(*command, "1,2")
    bench = parse(done)
    cases = [(row["system"], row["decode"], row["concurrency"]) for row in bench["rows"]]
    assert cases == [("one process", "ar", 1), ("mlx_lm", "ar", 1), ("one process", "ngram", 1)]
    assert bench["ratio_vs_one_process"] is bench["overhead_ms_per_token"] is None
    assert "one process: 2 at once left out, there is memory for 1\n" in done.err
    none = run_here(*command, "2")
    assert (none.code, none.out) == (2, "") and "error: --concurrency: expected a case that fits" in none.err


def test_cases_that_cannot_be_measured_are_named_and_the_rest_is_measured(talker: Path, tmp_path: Path) -> None:
    """This node has room for one layer of four, the model has no MASK token."""
    config = write_cluster(tmp_path / "cluster.yaml", model=str(talker), coordinator=memory_for(talker, 1, 2))
    done = run_here(
        "bench", "--config", config, "--local", "1", "--layers", "3,1", "--layers", "1,3", "--concurrency", "1",
        "--decode", "ar,diffusion", *LOAD,
    )  # fmt: skip
    assert done.code == 0, done.err
    said = [line.partition(":")[0] for line in done.err.splitlines()]  # and progress, on a busy machine
    wanted = ["--decode diffusion left out", "no comparison with one process", "cluster 3,1 left out"]
    assert [line for line in said if line in wanted] == wanted
    assert done.out.count("cluster 1,3 ") == 1 and "cluster 3,1" not in done.out
    assert max(map(len, done.out.splitlines()[1:])) <= 100


def test_a_model_that_mlx_lm_lacks_is_measured_with_prompts_of_text(tmp_path: Path) -> None:
    refiner = make_refiner(tmp_path / "refiner")
    flags = ("--local", "0", "--decode", "auto", "-p", "4", "-g", "4", "-n", "1", "--concurrency", "1", "--json")
    rows = parse(run_here("bench", "--model", refiner, *flags))["rows"]
    assert [(row["system"], row["decode"]) for row in rows] == [("one process", "canvas")]
    spec, decode = describe(open_checkpoint(str(refiner))), Decode("canvas")
    [asked] = Workload((1,), 3000, 1, (decode,), (None,), 1).requests(1, decode, spec, seed=0)
    assert all(map(spec.is_text, asked.prompt)) and not spec.is_text(VOCAB - 1)


def test_a_failure_costs_none_of_what_was_measured(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx_lm cannot batch this model's caches; the cluster is lost with the third number of requests."""
    time_tokens, run_trial = OnMlxLm.time_tokens, OnChain.run

    def time_one(self: OnMlxLm, prompts: Sequence[Sequence[int]], *more: Any) -> list[list[float]]:
        if len(prompts) > 1:
            raise ValueError("ArraysCache does not yet support batching with history")
        return time_tokens(self, prompts, *more)

    async def run_or_fail(self: OnChain, requests: Sequence[Request], *more: Any) -> BenchTrial:
        if len(requests) > 2:
            raise StageLost("closed the connection", node="mini")
        return await run_trial(self, requests, *more)

    monkeypatch.setattr(OnMlxLm, "time_tokens", time_one)
    monkeypatch.setattr(OnChain, "run", run_or_fail)
    command = ("bench", "--model", talker, "--local", "0", "-p", "4", "-g", "4", "-n", "1", "--json", "--concurrency")
    done = run_here(*command, "1,2,3")
    rows = [(row["system"], row["concurrency"]) for row in json.loads(done.out)["rows"]]
    assert rows == [("one process", 1), ("mlx_lm", 1), ("one process", 2)]
    assert "mlx_lm, ar, 2 at once left out: mlx_lm cannot: ArraysCache does not" in done.err
    lost = run_here(*command, "3")
    assert (lost.code, lost.out) == (3, ""), "nothing was measured"


@pytest.mark.matrix
def test_auto_is_measured_against_one_token_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masked = make_talker(tmp_path / "masked", mask_token_id=0)
    bench_auto.main(str(masked), local=0, requests="2", rounds=1)
    printed = capsys.readouterr().out
    assert [printed.count(word) for word in ("greedy", "sampled", " x (")] == [1, 1, 2]
