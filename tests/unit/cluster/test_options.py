"""Names of nodes: each belongs to one of them, or there is no cluster."""

from pathlib import Path

import pytest

from coordinator.cluster.options import ClusterOptions, cluster_options
from worker.config import ClusterConfig, WorkerConfig
from worker.errors import ConfigError


def test_a_coordinator_with_the_name_of_a_local_worker_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("coordinator: {name: worker-2}\n")
    with pytest.raises(ConfigError, match=r"^\S*cluster\.yaml: .* found two nodes called worker-2; .*$"):
        cluster_options(path, "demo", 2, None, None)
    assert cluster_options(path, "demo", 1, None, None).num_workers == 1


@pytest.mark.parametrize("names", [("mini", "mini"), ("coordinator",)])
def test_two_nodes_of_one_name_are_refused_wherever_a_configuration_comes_from(names: tuple[str, ...]) -> None:
    workers = tuple(WorkerConfig(name=name, address=(f"127.0.0.1:{i}",)) for i, name in enumerate(names, 1))
    with pytest.raises(ConfigError, match=f"found two nodes called {names[0]}; "):
        ClusterOptions(ClusterConfig(workers=workers), "demo", None, 128)
