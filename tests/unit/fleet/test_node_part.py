from pathlib import Path
from typing import Any

import yaml

from coordinator.fleet.node_part import node_part
from worker.config import load_cluster

FULL = """
model: &model owner/name
models: [shelf, ~/models, /volumes/models]
pull: hub
tls: {keys: some/where}
context: 8192
layers: [3, 2, 1]
order: fixed
coordinator: {name: studio, memory: 64GiB}
workers:
  - {name: mini, address: "10.0.0.2:50070", memory: 16GB, ssh: anna@mini.local}
  - {name: air, address: ["10.0.0.3:50070", "10.0.1.3:50070"], model: *model, ssh: air}
"""


def raw() -> dict[str, Any]:
    return dict(yaml.safe_load(FULL))


def test_a_node_gets_its_entry_and_what_counts_on_workers() -> None:
    assert node_part(raw(), "air") == {
        "model": "owner/name",
        "models": ["~/shelf", "~/models", "/volumes/models"],
        "pull": "hub",
        "tls": {"keys": "keys"},
        "workers": [{"name": "air", "address": ["10.0.0.3:50070", "10.0.1.3:50070"], "model": "owner/name"}],
    }


def test_what_it_gets_is_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(node_part(raw(), "mini")))
    [worker] = load_cluster(path).workers
    assert (worker.name, worker.addresses, worker.memory) == ("mini", ("10.0.0.2:50070",), 16 * 10**9)


def test_what_concerns_others_is_no_news_to_it() -> None:
    changed = raw() | {"context": 1, "layers": [1, 2, 3]}
    changed["workers"] = [changed["workers"][0] | {"ssh": "other"}, changed["workers"][1] | {"memory": "1GiB"}]
    assert node_part(changed, "mini") == node_part(raw(), "mini")
    assert node_part(changed, "air") != node_part(raw(), "air")
