"""`brigade verify` and `brigade plan` over real workers: what they find, print and load."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from tests.cluster.commands import parse, run_here
from tests.cluster.models import altered_copy
from tests.cluster.processes import Starter, Worker, write_cluster
from tests.tiny import make_model, write_folder

ALTERED = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def workers(module_start: Starter) -> list[Worker]:
    """Two workers that nothing is ever loaded into."""
    return [module_start.worker(name) for name in ("mini", "air")]


@pytest.fixture(scope="module")
def honest(module_start: Starter, talker: Path) -> Worker:
    """A worker that has the coordinator's own copy of the model."""
    return module_start.worker("honest", "--model", talker)


@pytest.fixture(scope="module")
def altered_config(
    module_start: Starter, honest: Worker, talker: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A cluster whose second worker has a copy of the model in which one number differs."""

    def change(weights: dict[str, mx.array]) -> None:
        weights[ALTERED][3, 5] += 4.0

    folder = tmp_path_factory.mktemp("altered")
    other = altered_copy(talker, folder / "model", change)
    odd = module_start.worker("odd", "--model", other)
    nodes = [(worker.name, worker.address) for worker in (honest, odd)]
    return write_cluster(folder / "cluster.yaml", *nodes, model=str(talker), layers="[1, 1, 2]")


@pytest.mark.parametrize("split", ["--local 2", "--config {config} --layers 3,1", "--local 1 --stream"])
def test_verify_finds_every_split_equal(talker: Path, honest: Worker, tmp_path: Path, split: str) -> None:
    config = write_cluster(tmp_path / "cluster.yaml", ("honest", honest.address))
    flags = split.format(config=config).split()
    found = parse(run_here("verify", "--model", talker, *flags, "--json", "--max-tokens", "12"))
    assert (found["equal"], found["within_rounding"], found["tensors"]) == (True, 0, [])
    assert found["num_tensors"] == 47, "of the coordinator's layers too"
    assert found["streamed"] == ("--stream" in split) and 0 < found["margin"] < 1
    assert len(found["cases"]) >= 6
    for case in found["cases"]:
        assert case["expected"] == case["found"] and len(case["found"]) == 12, case["name"]


def test_verify_names_the_tensor_and_the_node_that_differ(altered_config: Path) -> None:
    outcome = run_here("verify", "--config", altered_config, "--max-tokens", "3")
    assert outcome.code == 1, outcome.err
    assert [line for line in outcome.out.splitlines() if "tensor" in line] == [
        f"DIFFERS  tensor {ALTERED} on worker odd"
    ]
    assert "greedy" in outcome.out and outcome.out.splitlines()[-1] == "the cluster is NOT the model"
    assert outcome.err == ""


def test_verify_as_json_names_the_tensor_and_the_node_that_differ(altered_config: Path) -> None:
    outcome = run_here("verify", "--config", altered_config, "--json", "--max-tokens", "3")
    assert outcome.code == 1, outcome.err
    found = json.loads(outcome.out)
    assert found["equal"] is False
    assert found["tensors"] == [{"node": "odd", "tensor": ALTERED}]
    assert any(case["expected"] != case["found"] for case in found["cases"])


@pytest.mark.skipif(sys.platform != "linux", reason="macOS holds no process to such a limit")
def test_a_reference_that_is_streamed_needs_less_memory_than_the_model(start: Starter, tmp_path: Path) -> None:
    """100 MiB for 149: in memory that is too little, while 1000 are enough for the same token."""
    model = make_large(tmp_path / "model")
    assert (model / "model.safetensors").stat().st_size > 145 * 2**20
    runs = [
        start.python("-m", "tests.cluster.limited_reference", model, mib, mode)
        for mib, mode in (("100", "streamed"), ("1000", "in memory"), ("100", "in memory"))
    ]
    streamed, in_memory, limited = (run.wait() for run in runs)
    assert (streamed.code, in_memory.code) == (0, 0), streamed.err + in_memory.err
    assert streamed.out == in_memory.out and limited.code != 0


def make_large(folder: Path) -> Path:
    """Twelve layers of 12 MiB whose weights, being random enough, take no time to make."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    config = json.loads((make_model(folder / "small") / "config.json").read_text()) | sizes
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    write_folder(folder, config, {name: scattered(array) for name, array in tree_flatten(model.parameters())})
    return folder


def scattered(like: mx.array) -> mx.array:
    """Numbers of a gain that keeps layers alive, by a multiplicative hash; vectors are ones."""
    if like.ndim < 2:
        return mx.ones(like.shape)
    hashed = (mx.arange(like.size, dtype=mx.uint32) * 2654435761) >> 8
    return (hashed / 2**23 - 1).reshape(like.shape) * (2.5 / like.shape[-1] ** 0.5)


def test_plan_prints_the_layers_that_were_asked_for_and_loads_nothing(
    talker: Path, workers: list[Worker], tmp_path: Path
) -> None:
    config = _config(tmp_path, workers, talker)
    outcome = run_here("plan", "--config", config, "--layers", "2,1,1", "--context", "1000")
    assert (outcome.code, outcome.err) == (0, "")
    rows = {line.split()[0]: line for line in outcome.out.splitlines() if line.strip()}
    for node, layers in (("coordinator", "[0, 2)"), ("mini", "[2, 3)"), ("air", "[3, 4)")):
        assert layers in rows[node] and "yes" in rows[node]
    assert "1000 tokens" in outcome.out
    assert [worker.status().weight_bytes for worker in workers] == [0, 0]


def test_plan_as_json_adds_up_to_the_model(talker: Path, workers: list[Worker], tmp_path: Path) -> None:
    config = _config(tmp_path, workers, talker)
    outcome = run_here("plan", "--config", config, "--context", "1000", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert (found["model"], found["num_layers"], found["context"], found["fits"]) == (str(talker), 4, 1000, True)
    nodes = found["nodes"]
    assert [node["node"] for node in nodes] == ["coordinator", "mini", "air"]
    assert [node["start"] for node in nodes] + [4] == [0] + [node["end"] for node in nodes]
    assert found["layers"] == [node["end"] - node["start"] for node in nodes]
    header_bytes = 8 + int.from_bytes((talker / "model.safetensors").read_bytes()[:8], "little")
    weights = (talker / "model.safetensors").stat().st_size - header_bytes
    assert sum(node["weight_bytes"] for node in nodes) == weights
    # both, of 2 heads of 16 float32 each, for 1000 tokens (caches of several sessions pack in powers of two), 4 layers
    keys_and_values = 2 * 2 * 16 * 4 * 1024 * 4
    assert sum(node["cache_bytes"] for node in nodes) == keys_and_values
    assert all(node["fits"] and node["memory_bytes"] > 2**20 for node in nodes)
    assert [worker.status().weight_bytes for worker in workers] == [0, 0]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_plan_prints_what_does_not_fit_and_says_so(
    talker: Path, workers: list[Worker], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    config = _config(tmp_path, workers, talker, memory="300KiB")
    outcome = run_here("plan", "--config", config, *flags)
    assert outcome.code == 2
    if flags:
        found = json.loads(outcome.out)
        assert (found["fits"], [node["fits"] for node in found["nodes"]]) == (False, [True, True, False])
    else:
        assert [line.split()[0] for line in outcome.out.splitlines() if " NO" in line] == ["air"]
    assert outcome.err.startswith("error: ") and "does not fit: air lacks" in outcome.err
    assert [worker.status().weight_bytes for worker in workers] == [0, 0]


def _config(folder: Path, workers: list[Worker], model: Path, memory: str | None = None) -> Path:
    """Both workers, the last with this memory."""
    first, last = ((worker.name, worker.address) for worker in workers)
    return write_cluster(folder / "cluster.yaml", first, (*last, memory) if memory else last, model=str(model))
