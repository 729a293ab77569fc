"""What a cluster is made of: a name per node, the newest process at its addresses, and what each is asked to hold."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cluster.addresses import newest
from coordinator.cluster.deployment import Deployment
from coordinator.cluster.options import ClusterOptions, cluster_options
from coordinator.planning.plan import Node, Objective
from coordinator.planning.planner import plan
from coordinator.planning.speeds import NO_SPEEDS
from protos.brigade_pb2 import HelloReply
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import ConfigError, InputError
from worker.model.checkpoint import DEMO, open_folder
from worker.model.describe import BACK, FRONT, describe


def test_two_nodes_of_one_name_are_refused_wherever_a_configuration_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("coordinator: {name: worker-2}\n")
    with pytest.raises(ConfigError, match=r"^\S*cluster\.yaml: .* found two nodes called worker-2; .*$"):
        cluster_options(path, "demo", 2)
    assert cluster_options(path, "demo", 1).num_workers == 1
    for names in (("mini", "mini"), ("coordinator",)):
        workers = tuple(WorkerConfig(name=name, address=(f"127.0.0.1:{i}",)) for i, name in enumerate(names, 1))
        with pytest.raises(ConfigError, match=f"found two nodes called {names[0]}; "):
            ClusterOptions(ClusterConfig(workers=workers), "demo", None, 128)


def test_the_objective_is_the_files_unless_a_flag_gives_another(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("objective: prompt\n")
    assert cluster_options(path).objective == "prompt"
    assert cluster_options(path, objective="auto").objective == "auto"
    assert cluster_options(None).objective == "latency"


def test_a_plan_is_made_for_what_the_options_say() -> None:
    spec = describe(open_folder(DEMO))
    cluster = ClusterConfig(layers=(3, 5), order="fixed", workers=(WorkerConfig(name="a", address=("127.0.0.1:1",)),))
    options = ClusterOptions(
        *(cluster, "demo", None, 512), objective="throughput", num_requests=3, may_be_alone=False, needs_all=True,
        max_context=1024,
    )  # fmt: skip
    expected = Objective(
        *(512, 1024), goal="throughput", num_requests=3, layers=(3, 5), is_order_fixed=True, may_be_alone=False,
        needs_all=True,
    )  # fmt: skip
    assert options.objective_of(spec) == expected
    assert replace(options, context=1 << 20).objective_of(spec) == replace(expected, context=spec.context)


def test_workers_of_our_own_are_not_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text('workers: [{name: worker-1, address: "127.0.0.1:50071", memory: 1GiB}]\nlayers: [2, 2]\n')
    for local, num_configured, layers in ((None, 1, (2, 2)), (1, 0, None)):
        options = cluster_options(path, None, local)
        assert options.worker_names == ["worker-1"]
        assert (len(options.cluster.workers), options.cluster.layers) == (num_configured, layers)


def at(text: str) -> dict[str, HelloReply]:
    """`cable=mini-a@1 wifi=mini-b@2`: addresses, the name of whoever answers there, its process, its start."""
    replies = {}
    for part in text.split():
        address, _, who = part.partition("=")
        process, _, started = who.partition("@")
        replies[address] = HelloReply(node=process.split("-")[0], incarnation=process, started=int(started))
    return replies


@pytest.mark.parametrize(
    ("answers", "address", "older"),
    [
        ("cable=mini-a@1 wifi=mini-a@1", "cable", []),
        ("wifi=mini-a@1", "wifi", []),
        ("cable=mini-a@1 wifi=mini-b@2", "wifi", ["cable"]),
        ("cable=mini-b@2 wifi=mini-a@1", "cable", ["wifi"]),
        ("cable=mini-a@1 wifi=mini-b@2 relay=mini-b@2", "wifi", ["cable"]),
        ("cable=mini-a@1 wifi=mini-a@1 relay=mini-b@2", "relay", ["cable", "wifi"]),
        ("cable=air-b@2 wifi=mini-a@1", "wifi", []),  # somebody else's by now
        ("cable=air-b@2", "cable", []),
    ],
)
def test_the_first_address_of_the_newest_process_with_the_name(answers: str, address: str, older: list[str]) -> None:
    assert newest("mini", at(answers)) == (address, older)


def test_a_worker_hears_of_the_digests_of_its_own_layers_only() -> None:
    checkpoint = open_folder(DEMO)
    spec = describe(checkpoint)
    nodes = [Node(name, 1 << 40) for name in ("studio", "mini", "air")]
    deployment = Deployment(checkpoint, plan(spec, nodes, NO_SPEEDS, Objective(128, layers=(2, 3, 3))), [])
    known = {place: f"{place}" for place in (FRONT, BACK, *range(1, 8))}
    assert set(deployment.load_request(1, digests=known).digests) == {2, 3, 4}
    assert set(deployment.load_request(2, digests=known).digests) == {5, 6, 7, FRONT, BACK}


@pytest.mark.parametrize("field", ["model", "draft_model"])
def test_an_empty_name_of_a_model_is_refused(field: str) -> None:
    """As of a variable of the shell that is not set."""
    with pytest.raises(InputError, match="found nothing") as refused:
        cluster_options(None, **{field: ""})  # type: ignore[arg-type]
    assert refused.value.field == field
