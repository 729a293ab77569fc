"""Writing a plan's layers into cluster.yaml: nothing else in it changes, or nothing at all."""

from pathlib import Path

import pytest

from coordinator.deploy.cluster_file import write_layers
from coordinator.planning.plan import Assignment, Plan
from worker.config import load_cluster
from worker.errors import ConfigError

FILE = """\
# two Macs on a desk
model: demo   # the bundled one
workers:
  - {name: mini, address: "127.0.0.1:50070"}  # by Thunderbolt"""


def planned(*names: str) -> Plan:
    return Plan(tuple(Assignment(name, 4 * i, 4 * i + 4, 1, 1, 9) for i, name in enumerate(names)), 1)


def written(folder: Path, text: str, plan: Plan) -> str:
    """The file's text afterwards."""
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o640)
    try:
        write_layers(path, load_cluster(path), plan)
    finally:
        assert [each.name for each in folder.iterdir()] == ["cluster.yaml"]
        assert path.stat().st_mode & 0o777 == 0o640
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("end", ["", "\n"])
def test_layers_are_added_and_comments_stay(tmp_path: Path, end: str) -> None:
    found = written(tmp_path, FILE + end, planned("coordinator", "mini"))
    assert found == f"{FILE}\nlayers: [4, 4]  # as brigade plan says\n"
    assert load_cluster(tmp_path / "cluster.yaml").layers == (4, 4)


OTHERS = "expected a plan over coordinator, mini, in this order"
BY_HAND = r"write there yourself: layers: \[4, 4\]"
HERE = ("coordinator", "mini")


@pytest.mark.parametrize(
    ("text", "names", "said"),
    [
        (FILE, ("coordinator",), OTHERS),
        (FILE, ("mini", "coordinator"), OTHERS),
        ('{workers: [{name: mini, address: "127.0.0.1:50070"}]}', HERE, BY_HAND),
        (f"{FILE}\n...\n", HERE, BY_HAND),
    ],
)
def test_a_file_that_cannot_get_this_plan_stays_as_it_is(
    tmp_path: Path, text: str, names: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        written(tmp_path, text, planned(*names))
    assert (tmp_path / "cluster.yaml").read_text(encoding="utf-8") == text


def test_a_read_only_file_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    path.chmod(0o444)
    with pytest.raises(ConfigError, match=r"cluster\.yaml is read-only: expected a file that may be changed"):
        write_layers(path, load_cluster(path), planned("coordinator", "mini"))
    assert path.read_text(encoding="utf-8") == FILE and [each.name for each in tmp_path.iterdir()] == ["cluster.yaml"]
