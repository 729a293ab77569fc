"""The cluster.yaml that comes of a draft: it loads, says what was found, and takes no other file's place."""

import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.finding import written
from coordinator.finding.draft import Chosen, Draft
from coordinator.finding.media import Medium
from coordinator.finding.ways import Way
from coordinator.finding.written import cluster_text, require_room, write_cluster
from tests.unit.finding.test_draft import CABLE, LOOPBACK, WIFI
from worker.config import Cluster, load_cluster
from worker.errors import ConfigError

MINI = Chosen("mini", (CABLE, WIFI), is_encrypted=True)


def test_a_draft_is_written_as_a_file_that_says_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    cluster = write_cluster(path, cluster_text("org/model", "studio", Draft((MINI,))), force=False)
    assert cluster == load_cluster(path)
    assert (cluster.model, cluster.coordinator.name, cluster.insecure) == ("org/model", "studio", False)
    assert cluster.tls is not None and cluster.tls.keys == str(tmp_path / "keys")
    assert [(each.name, each.addresses) for each in cluster.workers] == [("mini", ("169.254.10.2:1", "192.168.1.7:1"))]
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.yaml"]


@pytest.mark.parametrize(("way", "is_insecure"), [(CABLE, True), (LOOPBACK, False)])
def test_only_links_that_leave_the_machine_unencrypted_are_said_to(tmp_path: Path, way: Way, is_insecure: bool) -> None:
    text = cluster_text("demo", "coordinator", Draft((Chosen("mini", (way,), is_encrypted=False),)))
    cluster = write_cluster(tmp_path / "cluster.yaml", text, force=False)
    assert cluster.insecure is is_insecure and cluster.tls is None


def test_a_file_that_is_there_stays_unless_it_is_wished_away(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: mine\n")
    text = cluster_text("demo", "coordinator", Draft((MINI,)))
    with pytest.raises(ConfigError, match=r"is there already, and is not written over: give --force"):
        write_cluster(path, text, force=False)
    with pytest.raises(ConfigError, match=r"is there already, and is not written over: give --force"):
        require_room(path, force=False)
    assert path.read_text() == "model: mine\n"
    require_room(path, force=True)
    require_room(tmp_path / "other.yaml", force=False)
    write_cluster(path, text, force=True)
    assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.yaml"]


def test_a_disk_that_becomes_full_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there once it is known to load is the file: nothing is written any more."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def load(path: Path) -> Cluster:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, most[1]))
        return load_cluster(path)

    monkeypatch.setattr(written, "load_cluster", load)
    text = cluster_text("demo", "coordinator", Draft((MINI,)))
    try:
        write_cluster(tmp_path / "cluster.yaml", text, force=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("cluster.yaml", text)]


def test_what_would_not_load_is_not_written(tmp_path: Path) -> None:
    twice = Draft((MINI, MINI))
    with pytest.raises(ConfigError, match="problem"):
        write_cluster(tmp_path / "cluster.yaml", cluster_text("demo", "coordinator", twice), force=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("force", [False, True])
def test_where_there_is_no_folder_it_is_said_before_and_after(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").touch()
    for folder, why in (("file", "Not a directory"), ("nowhere", "No such file or directory")):
        path = tmp_path / folder / "cluster.yaml"
        with pytest.raises(ConfigError, match=rf"{folder} is not a folder that is there; make it, or give another"):
            require_room(path, force=force)
        with pytest.raises(ConfigError, match=rf"cannot write {path}: {why}"):
            write_cluster(path, cluster_text("demo", "coordinator", Draft((MINI,))), force=force)


@settings(max_examples=25)
@given(model=st.text(min_size=1, max_size=40), name=st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True))
def test_no_text_becomes_anything_but_text(tmp_path_factory: pytest.TempPathFactory, model: str, name: str) -> None:
    path = tmp_path_factory.mktemp("written") / "cluster.yaml"
    way = Way("127.0.0.1:1", "lo", Medium.LOOPBACK)
    cluster = write_cluster(path, cluster_text(model, f"{name}-", Draft((Chosen(name, (way,), False),))), force=False)
    assert (cluster.model, cluster.workers[0].name, cluster.coordinator.name) == (model, name, f"{name}-")


@pytest.mark.parametrize("place", [".", "/"])
def test_a_folder_is_no_file(place: str) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        require_room(Path(place), force=True)
