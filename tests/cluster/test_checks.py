"""`brigade plan`, `verify`, `doctor` and `smoke` over real workers: what they find, print and load, and exit codes."""

import json
from pathlib import Path

import pytest

from coordinator.cluster.options import ClusterOptions
from coordinator.deploy import checks
from coordinator.deploy import trial as trial_module
from coordinator.deploy.trial import ChainTrial
from tests.cluster.commands import parse, run_here
from tests.cluster.models import make_talker
from tests.cluster.processes import Starter, Worker, write_cluster
from tests.unit.deploy.cases import tried

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a MASK token, whose guesses are mostly wrong."""
    return make_talker(tmp_path_factory.mktemp("masked") / "model", mask_token_id=0)


@pytest.fixture(scope="module")
def workers(module_start: Starter, masked: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Worker]:
    """One with the coordinator's own copy of the model, and one that is sent its layers into a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return [module_start.worker("mini", "--model", masked), module_start.worker("air")]


def config_of(folder: Path, workers: list[Worker], model: Path, **keys: str) -> Path:
    nodes = [(worker.name, worker.address) for worker in workers]
    return write_cluster(folder / "cluster.yaml", *nodes, model=str(model), **keys)


def test_plan_adds_up_to_the_model_and_loads_nothing(workers: list[Worker], masked: Path, tmp_path: Path) -> None:
    command = ("plan", "--config", config_of(tmp_path, workers, masked), "--context", "1000")
    shown = run_here(*command, "--layers", "2,1,1")
    assert (shown.code, shown.err) == (0, "")
    rows = {line.split()[0]: line for line in shown.out.splitlines() if line.strip()}
    for node, layers in (("coordinator", "[0, 2)"), ("mini", "[2, 3)"), ("air", "[3, 4)")):
        assert layers in rows[node] and "yes" in rows[node]
    found = parse(run_here(*command, "--json"))
    assert (found["model"], found["num_layers"], found["context"], found["fits"]) == (str(masked), 4, 1000, True)
    nodes = found["nodes"]
    assert [node["node"] for node in nodes] == ["coordinator", "mini", "air"]
    assert [node["start"] for node in nodes] + [4] == [0] + [node["end"] for node in nodes]
    header_bytes = 8 + int.from_bytes((masked / "model.safetensors").read_bytes()[:8], "little")
    weights = (masked / "model.safetensors").stat().st_size - header_bytes
    assert sum(node["weight_bytes"] for node in nodes) == weights
    # both, of 2 heads of 16 float32 each, for 1000 tokens (caches of several sessions pack in powers of two), 4 layers
    assert sum(node["cache_bytes"] for node in nodes) == 2 * 2 * 16 * 4 * 1024 * 4
    assert all(node["fits"] and node["memory_bytes"] > 2**20 for node in nodes)
    assert [worker.status().weight_bytes for worker in workers] == [0, 0]

    mini, air = ((worker.name, worker.address) for worker in workers)
    config = write_cluster(tmp_path / "cluster.yaml", mini, (*air, "300KiB"), model=str(masked))
    refused = run_here("generate", "--config", config, "--layers", "2,1,1", "--prompt", "go")
    assert refused.code == 2 and "does not fit: air lacks" in refused.err
    rows_shown = [line.split()[0] for line in refused.err.splitlines()]
    assert [row for row in rows_shown if row in ("coordinator", "mini", "air")] == ["coordinator", "mini", "air"]
    assert [worker.status().weight_bytes for worker in workers] == [0, 0]


@pytest.mark.parametrize(
    "flags",
    [
        "--config {config} --layers 1,2,1 --decode diffusion --window 8",
        pytest.param("--local 1 --stream --decode ngram", marks=pytest.mark.matrix),
        pytest.param("--config {config} --decode diffusion-fast --window 8", marks=pytest.mark.matrix),
        pytest.param("--config {config} --layers 2,1,1", marks=pytest.mark.matrix),
        pytest.param("--config {config} --stream --decode diffusion", marks=pytest.mark.matrix),
        pytest.param("--local 2 --decode ngram", marks=pytest.mark.matrix),
    ],
)
def test_verify_finds_every_decoder_equal_on_every_split(
    workers: list[Worker], masked: Path, tmp_path: Path, flags: str
) -> None:
    words = flags.format(config=config_of(tmp_path, workers, masked)).split()
    found = parse(run_here("verify", "--model", masked, *words, "--json", "--max-tokens", "4"))
    assert (found["equal"], found["within_rounding"], found["tensors"]) == (True, 0, [])
    assert found["num_tensors"] == 47, "of the coordinator's layers too"
    assert found["streamed"] == ("--stream" in flags)
    assert found["margin"] is None if "diffusion-fast" in flags else 0 < found["margin"] < 1
    assert len(found["cases"]) >= 6
    for case in found["cases"]:
        assert case["expected"] == case["found"] and len(case["found"]) == 4, case["name"]


def test_a_line_per_finding_and_exit_code_1_if_one_is_a_problem(
    workers: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "VERY_SLOW_MS", 10_000.0)  # a machine that is busy with other tests
    nodes = [(worker.name, worker.address) for worker in workers]
    config = write_cluster(tmp_path / "cluster.yaml", *nodes)
    done = run_here("doctor", "--config", config)
    assert done.code == 0, done.err  # progress is told once it takes long
    lines = done.out.splitlines()
    for about in ("coordinator", "mini", "air", "coordinator → mini", "mini → air", "coordinator ← air", "all nodes"):
        assert about in lines
    assert lines[-1].startswith("nothing to fix; ") and not any("FIX" in line for line in lines)
    assert sum(" of each token (round trip " in line for line in lines) == 3
    assert sum("8 tokens through every node, twice, in " in line for line in lines) == 1

    write_cluster(config, nodes[0], ("gone", "127.0.0.1:1"))
    done = run_here("doctor", "--config", config, "--model", tmp_path / "nowhere", "--json")
    found = json.loads(done.out)
    assert (done.code, found["must_be_mended"], found["trial"]) == (1, 2, None)
    worst = {each["kind"]: each for each in found["findings"] if each["level"] == "must be mended"}
    assert set(worst) == {"unreachable", "model"} and worst["unreachable"]["about"] == "gone"
    assert worst["unreachable"]["fix"] == f"there: brigade worker --config {config} --name gone"
    assert [node["error"] is None for node in found["nodes"]] == [True, True, False]


def test_workers_at_each_others_addresses_are_told_though_they_have_no_configuration(
    workers: list[Worker], tmp_path: Path
) -> None:
    mini, air = workers
    config = write_cluster(tmp_path / "cluster.yaml", (mini.name, air.address), (air.name, mini.address))
    found = json.loads(run_here("doctor", "--config", config, "--json").out)["findings"]
    worst = [(each["about"], each["kind"]) for each in found if each["level"] == "must be mended"]
    assert worst == [(mini.name, "configuration"), (air.name, "configuration")]
    err = run_here("generate", "--config", config, "-m", "1", "Hi").err
    told = sorted(line.split(":")[1] for line in err.splitlines() if line.startswith("warning: "))
    assert told == [" worker air calls itself mini", " worker mini calls itself air"]


def test_without_a_configuration_this_machine_alone_is_examined() -> None:
    done = run_here("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == (1 if found["must_be_mended"] else 0)
    assert ([node["node"] for node in found["nodes"]], found["hops"], found["trial"]) == (["coordinator"], [], None)


def test_smoke_tells_every_hop_and_that_it_works_and_the_worker_runs_on(workers: list[Worker], tmp_path: Path) -> None:
    worker, _ = workers
    done = run_here("smoke", "--config", write_cluster(tmp_path / "cluster.yaml", ("mini", worker.address)))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("demo on coordinator [0, 4), mini [4, 8): open after ")
    assert [line.split()[:3] for line in lines[2:4]] == [["coordinator", "→", "mini"], ["mini", "→", "coordinator"]]
    assert lines[-1].startswith("8 tokens, twice, in ") and lines[-1].endswith("the same tokens: it works")
    worker.wait_slots(0, 30.0)
    assert worker.running.is_running


def test_smoke_tries_every_node_and_leaves_none_out(workers: list[Worker], tmp_path: Path) -> None:
    mini, air = ((worker.name, worker.address) for worker in workers)
    done = run_here("smoke", "--config", write_cluster(tmp_path / "cluster.yaml", mini, (*air, "100KB")))
    assert (done.code, done.out) == (2, "") and "does not fit: air lacks " in done.err


def test_other_tokens_of_smoke_are_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tries(options: ClusterOptions) -> ChainTrial:
        return tried(second=(7, 9))

    monkeypatch.setattr(trial_module, "try_cluster", tries)
    done = run_here("smoke", "--model", "demo", "--local", "0")
    assert done.code == 1 and "OTHER TOKENS the second time, [7, 8], then [7, 9]" in done.out.splitlines()[-1]
