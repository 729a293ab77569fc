"""`brigade verify` and `brigade plan` over real workers: what they find, print and load."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from tests.cluster.commands import parse, run_here
from tests.cluster.models import altered_copy, make_talker
from tests.cluster.processes import Starter, Worker, write_cluster

pytestmark = pytest.mark.usefixtures("uncompiled")
ALTERED = "model.layers.2.mlp.down_proj.weight"


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
    refused = run_here("generate", "--config", config, "--prompt", "go")
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
def test_verify_finds_every_decoder_equal_on_any_split(
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


def test_verify_names_the_differing_tensor_and_node(
    workers: list[Worker], start: Starter, masked: Path, tmp_path: Path
) -> None:
    def change(weights: dict[str, mx.array]) -> None:
        weights[ALTERED][3, 5] += 4.0  # not where nodes compare samples of their copies before they load them

    odd = start.worker("odd", "--model", altered_copy(masked, tmp_path / "odd", change))
    config = config_of(tmp_path, [workers[0], odd], masked, layers="[1, 1, 2]")
    outcome = run_here("verify", "--config", config, "--json", "--max-tokens", "2", "--decode", "ar")
    found = json.loads(outcome.out)
    assert (outcome.code, outcome.err, found["equal"]) == (1, "", False)
    assert found["tensors"] == [{"node": "odd", "tensor": ALTERED}]
    assert any(case["expected"] != case["found"] for case in found["cases"])
